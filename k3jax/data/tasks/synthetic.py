"""The synthetic tasks of Kimi Linear (KLR §5.1): recall, palindrome, stacks.

All ask for exact memory of what a fixed-size state has seen: what belongs to a key, the order of
a string, the last element of many stacks.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from k3jax.data.tasks.example import Example, Writer, need, share_out


@dataclasses.dataclass(frozen=True)
class Recall:
    """Multi-query associative recall: `k v` pairs, a mark, then each key again and its value.

    `pairs`: how many; 0 takes as many as the length holds (a quarter of it), but no more than there
    are keys, which are half of all symbols. Keys differ, values are drawn freely; the queries are
    the keys in another order, as many of them as fit.
    """

    pairs: int = 0

    def draw(self, rng: np.random.Generator, length: int, symbols: int) -> Example:
        mark, keys, values = share_out("recall", symbols, mark=1, keys=0, values=0)
        pairs = self.pairs or min((length - 1) // 4, len(keys))
        if pairs > len(keys):
            raise ValueError(
                f"task recall: pairs = {pairs}: must be at most the {len(keys)} keys that "
                f"{symbols} symbols give"
            )
        need("recall", length, 2 * max(pairs, 1) + 3)
        key = rng.choice(keys, pairs, replace=False)
        value = rng.choice(values, pairs)
        given = np.append(np.stack([key, value], axis=1), mark[0])
        asked = rng.permutation(pairs)[: (length - len(given)) // 2]
        queries = np.stack([key[asked], value[asked]], axis=1)
        tokens = np.append(given, queries).astype(np.int32)
        answers = np.zeros(len(tokens), bool)
        answers[len(given) + 1 :: 2] = True
        return Example(tokens, answers)


@dataclasses.dataclass(frozen=True)
class Palindrome:
    """Random symbols, a mark, then the same symbols backwards."""

    def draw(self, rng: np.random.Generator, length: int, symbols: int) -> Example:
        need("palindrome", length, 3)
        mark, letters = share_out("palindrome", symbols, mark=1, letters=0)
        text = rng.choice(letters, (length - 1) // 2)
        tokens = np.concatenate([text, mark, text[::-1]]).astype(np.int32)
        return Example(tokens, np.arange(len(tokens)) > len(text))


@dataclasses.dataclass(frozen=True)
class Stack:
    """Operations on `stacks` stacks: `push s e` and `pop s e`, where the popped `e` is the answer.

    Half of the operations pop, from any stack that is not empty; the elements are all symbols but
    those of the operations and of the stacks' names.
    """

    stacks: int = 64

    def draw(self, rng: np.random.Generator, length: int, symbols: int) -> Example:
        need("stack", length, 6)
        names = {"operations": 2, "stacks": self.stacks, "elements": 0}
        (push, pop), stacks, elements = share_out("stack", symbols, **names)
        operations = length // 3
        pops = rng.random(operations) < 0.5
        pops[:2] = False, True  # at least one answer
        which, pushed = rng.choice(stacks, operations), rng.choice(elements, operations)
        picked = rng.random(operations)
        pops, which, pushed, picked = (x.tolist() for x in (pops, which, pushed, picked))
        held: dict[int, list[int]] = {}
        filled: list[int] = []  # the stacks that are not empty, in any order
        document = Writer()
        for n in range(operations):
            if pops[n] and filled:
                place = int(picked[n] * len(filled))
                stack = filled[place]
                document.given(pop, stack)
                document.answer(held[stack].pop())
                if not held[stack]:
                    filled[place] = filled[-1]
                    filled.pop()
            else:
                stack = which[n]
                document.given(push, stack, pushed[n])
                if not held.setdefault(stack, []):
                    filled.append(stack)
                held[stack].append(pushed[n])
        return document.example()
