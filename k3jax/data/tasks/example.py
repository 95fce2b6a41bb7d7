"""What a task gives: tokens, and which of them are answers; and how it shares out its symbols."""

from __future__ import annotations

import dataclasses
from typing import Protocol

import numpy as np


@dataclasses.dataclass(frozen=True)
class Example:
    """One drawn document, without bos.

    `tokens [n]` int32; `answers [n]` bool: the tokens that follow from what stands before them, so
    that a model without error predicts each. They alone are learned and scored.
    """

    tokens: np.ndarray
    answers: np.ndarray


class Task(Protocol):
    """A frozen dataclass of options, and how to draw a document."""

    def draw(self, rng: np.random.Generator, length: int, symbols: int) -> Example:
        """A document of at most `length` tokens out of the ids 0 .. `symbols` - 1.

        Raises `ValueError` with one line where so few tokens or symbols cannot hold the task.
        """


class Writer:
    """A document as it grows."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._answers: list[bool] = []

    def __len__(self) -> int:
        return len(self._tokens)

    def given(self, *tokens: int) -> None:
        """Append tokens that need not be predicted."""
        self._tokens.extend(tokens)
        self._answers.extend([False] * len(tokens))

    def answer(self, *tokens: int) -> None:
        """Append tokens that a model is to predict."""
        self._tokens.extend(tokens)
        self._answers.extend([True] * len(tokens))

    def example(self) -> Example:
        return Example(np.array(self._tokens, np.int32), np.array(self._answers, bool))


def share_out(task: str, symbols: int, **sizes: int) -> list[range]:
    """Consecutive ranges of ids, one for each of `sizes`; a size of 0 shares what the others leave.

    Raises `ValueError` where there are too few `symbols`, naming `task`.
    """
    fixed, open_ended = sum(sizes.values()), sum(size == 0 for size in sizes.values())
    spare = symbols - fixed
    if spare < 2 * open_ended:
        needs = fixed + 2 * open_ended
        wants = ", ".join(f"{name} {size}" for name, size in sizes.items() if size)
        raise ValueError(
            f"task {task}: {symbols} symbols are too few, at least {needs} are needed"
            + (f" ({wants})" if wants else "")
        )
    ranges, start = [], 0
    for size in sizes.values():
        width = size or spare // open_ended
        ranges.append(range(start, start + width))
        start += width
    return ranges


def need(task: str, length: int, least: int) -> None:
    """Raises `ValueError` where a document of `length` tokens cannot hold the task."""
    if length < least:
        raise ValueError(f"task {task}: length = {length}: must be at least {least} tokens")
