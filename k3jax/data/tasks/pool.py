"""Tasks as rows: drawn afresh for every row of every epoch, packed side by side."""

from __future__ import annotations

import dataclasses
import hashlib
from typing import Any

import numpy as np

from k3jax.data.tasks.example import Task
from k3jax.data.tasks.long_context import Agent, Needle, Variables
from k3jax.data.tasks.synthetic import Palindrome, Recall, Stack
from k3jax.data.tokenizer import Tokenizer

PREFIX = "task:"
TOKENS = 1 << 26  # of an epoch, which for a task is only a unit to count in

TASKS: dict[str, type[Any]] = {
    "recall": Recall,
    "palindrome": Palindrome,
    "stack": Stack,
    "needle": Needle,
    "variables": Variables,
    "agent": Agent,
}


@dataclasses.dataclass(frozen=True)
class TaskPool:
    """Rows of one task's documents, each behind a bos.

    A row is filled with documents of `shortest` to `longest` tokens (0: as long as the row) while
    they fit, the rest is padding. It depends on its place, the epoch and `seed` alone.
    """

    task: Task
    symbols: int
    bos_id: int
    seed: int
    longest: int = 0
    shortest: int = 0

    def __len__(self) -> int:
        """Tokens of an epoch."""
        return TOKENS

    def rows(self, length: int) -> int:
        """Rows of `length` predictions in an epoch."""
        return -(-(len(self) - 1) // length)

    def epoch(self, seed: int) -> TaskPool:
        """The pool whose rows are drawn with `seed`, and with its own."""
        return dataclasses.replace(self, seed=_mix(self.seed, seed))

    def read(self, starts: np.ndarray, length: int) -> tuple[np.ndarray, ...]:
        """As `Stream.read`: `(tokens, segment_ids, answers)`, each `[R, length + 1]`."""
        tokens, segment_ids = np.zeros((2, len(starts), length + 1), np.int32)
        answers = np.zeros((len(starts), length + 1), bool)
        longest = self.longest or length
        if longest > length:
            raise ValueError(
                f"{PREFIX} length = {longest}: must be at most data.sequence_length = {length}"
            )
        shortest = self.shortest or longest
        if shortest > length:
            raise ValueError(
                f"{PREFIX} shortest = {shortest}: must be at most data.sequence_length = {length}"
            )
        for place, start in enumerate(starts):
            if start < 0:
                continue
            rng, used, number = np.random.default_rng(_mix(self.seed, int(start))), 0, 0
            while used + 1 + shortest <= length + 1:
                size = int(rng.integers(shortest, min(longest, length - used) + 1))
                example = self.task.draw(rng, size, self.symbols)
                end = used + 1 + len(example.tokens)
                number += 1
                tokens[place, used], tokens[place, used + 1 : end] = self.bos_id, example.tokens
                answers[place, used + 1 : end] = example.answers
                segment_ids[place, used:end] = number
                used = end
        return tokens, segment_ids, answers


def parse(name: str, tokenizer: Tokenizer, seed: int) -> TaskPool:
    """The pool that `task:NAME:option=value...` names.

    Options are the task's own, `length` and `shortest` (the pool's `longest` and `shortest`), and
    `symbols`: how many of the tokenizer's ids below bos and eos a document is made of, all by
    default. Raises `ValueError` with one line for what is unknown or no number.
    """
    title, *options = name.removeprefix(PREFIX).split(":")
    if title not in TASKS:
        raise ValueError(f"data.sources = {name!r}: no such task, must be of {', '.join(TASKS)}")
    own = {field.name: field.default for field in dataclasses.fields(TASKS[title])}
    known: dict[str, Any] = own | {"length": 0, "shortest": 0, "symbols": 0}
    chosen = {}
    for option in options:
        key, equals, text = option.partition("=")
        if not equals or key not in known:
            raise ValueError(
                f"data.sources = {name!r}: option {option!r} must read option=number, with an "
                f"option of {', '.join(known)}"
            )
        kind = type(known[key])
        try:
            chosen[key] = kind(text)
        except ValueError as error:
            what = "whole" if kind is int else "decimal"
            raise ValueError(
                f"data.sources = {name!r}: {option} must be a {what} number"
            ) from error
        if kind is int and chosen[key] < 1:
            raise ValueError(f"data.sources = {name!r}: {option} must be at least 1")
    longest, shortest = chosen.pop("length", 0), chosen.pop("shortest", 0)
    if longest and shortest > longest:
        raise ValueError(
            f"data.sources = {name!r}: shortest = {shortest} must be at most length = {longest}"
        )
    plain = min(tokenizer.bos_id, tokenizer.eos_id)
    symbols = chosen.pop("symbols", plain)
    if symbols > plain:
        raise ValueError(
            f"data.sources = {name!r}: symbols = {symbols}: must be at most the {plain} ids of "
            "data.tokenizer below bos and eos"
        )
    task = TASKS[title](**chosen)
    return TaskPool(task, symbols, tokenizer.bos_id, seed, longest, shortest)


def _mix(*parts: int) -> int:
    digest = hashlib.sha256(repr(parts).encode()).digest()
    return int.from_bytes(digest[:8], "little")
