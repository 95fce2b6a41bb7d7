"""Tasks that ask how far back a model can look, and through how much that does not matter."""

from __future__ import annotations

import dataclasses

import numpy as np

from k3jax.data.tasks.example import Example, Writer, need, share_out


@dataclasses.dataclass(frozen=True)
class Needle:
    """Noise with `needles` notes `note k v` in it, and at its end the question `ask k` for one.

    `depth`: where the note that is asked for stands, from 0 (first) to 1 (last thing before the
    question); drawn evenly where it is negative. Its key is no other note's. Keys and values have
    symbols of their own, the noise has the rest.
    """

    depth: float = -1.0
    needles: int = 4

    def __post_init__(self) -> None:
        if not 0 <= self.depth <= 1 and self.depth != -1:
            raise ValueError(f"task needle: depth = {self.depth}: must lie in [0, 1], or be -1")

    def draw(self, rng: np.random.Generator, length: int, symbols: int) -> Example:
        need("needle", length, 3 * self.needles + 3)
        (note, ask), keys, values, noise = share_out(
            "needle", symbols, marks=2, keys=self.needles, values=0, noise=0
        )
        spare = length - 3 * self.needles - 3
        depth = rng.random() if self.depth < 0 else self.depth
        # How much noise stands before each note; the first is the one that is asked for.
        places = rng.integers(spare + 1, size=self.needles)
        places[0] = round(depth * spare)
        key, value = rng.permutation(keys), rng.choice(values, self.needles)
        # A sort that keeps ties in order, with the wanted note first or last among equals.
        order = np.lexsort((np.where(np.arange(self.needles) == 0, depth > 0.5, 0.5), places))
        hay, document, used = rng.choice(noise, spare), Writer(), 0
        for n in order:
            document.given(*hay[used : places[n]], note, key[n], value[n])
            used = places[n]
        document.given(*hay[used:], ask, key[0])
        document.answer(value[0])
        return document.example()


@dataclasses.dataclass(frozen=True)
class Variables:
    """Assignments `let a 7` and copies `let b a`, then the questions `ask b` for values.

    A variable has the value that its source had when it was assigned, and may be assigned again.
    `names` variables; half of the assignments copy; `questions` at the end, of variables that have
    a value.
    """

    names: int = 16
    questions: int = 4

    def draw(self, rng: np.random.Generator, length: int, symbols: int) -> Example:
        need("variables", length, 3 * self.questions + 3)
        sizes = {"marks": 2, "names": self.names, "values": 0}
        (let, ask), names, values = share_out("variables", symbols, **sizes)
        now: dict[int, int] = {}
        document = Writer()
        assignments = length // 3 - self.questions
        copies, targets = rng.random(assignments) < 0.5, rng.choice(names, assignments)
        sources, literals = rng.random(assignments), rng.choice(values, assignments)
        for n, name in enumerate(targets.tolist()):
            if copies[n] and now:
                source = list(now)[int(sources[n] * len(now))]
                now[name] = now[source]
            else:
                source = now[name] = int(literals[n])
            document.given(let, name, source)
        for name in rng.choice(list(now), self.questions):
            document.given(ask, int(name))
            document.answer(now[int(name)])
        return document.example()


@dataclasses.dataclass(frozen=True)
class Agent:
    """A trace that is mostly read: questions, tool calls, long outputs, short answers.

    A turn is `user k`, the call `call k` (k is the answer), the tool's output of `output` tokens
    with `field k v` somewhere among noise, `end`, and the reply `reply v` (v is the answer). Every
    fourth turn or so asks again for a key of an earlier turn, and replies without a call. `keys`
    different keys, each called at most once.
    """

    output: int = 48
    keys: int = 32

    def draw(self, rng: np.random.Generator, length: int, symbols: int) -> Example:
        turn, field = 2 + 2 + self.output + 1 + 2, 3
        if self.output < field:
            raise ValueError(f"task agent: output = {self.output}: must be at least {field}")
        need("agent", length, turn)
        sizes = {"marks": 5, "keys": self.keys, "values": 0, "noise": 0}
        marks, keys, values, noise = share_out("agent", symbols, **sizes)
        user, call, mark, end, reply = marks
        known: dict[int, int] = {}
        fresh = [int(key) for key in rng.permutation(keys)]
        document = Writer()
        while True:
            again = bool(known) and (not fresh or rng.random() < 0.25)
            if len(document) + (4 if again else turn) > length:
                return document.example()
            if again:
                key = int(rng.choice(sorted(known)))
                document.given(user, key, reply)
            else:
                key = fresh.pop()
                known[key] = int(rng.choice(values))
                text = rng.choice(noise, self.output - field)
                place = rng.integers(len(text) + 1)
                document.given(user, key, call)
                document.answer(key)
                document.given(*text[:place], mark, key, known[key], *text[place:], end, reply)
            document.answer(known[key])
