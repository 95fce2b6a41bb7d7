"""The masks of a visit, inside a kernel, from the marks that `visits` made for it."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from .plan import Plan
from .tiles import CHUNK, PAIR, beside, iota
from .visits import AFTER, BEFORE


class Marks(NamedTuple):
    """Masks of n pairs of heads.

    alive: `[n, C, 1]` the token takes part; alive_column: the same as `[chunks * C, 1]`.
    same: `[n, C, 128]` both tokens are of one document.
    carried, kept: `[n, C, 1]` the token's document is the one whose state enters, or leaves.
    survives: `[n, 1, 1]` the document that enters the chunk leaves it.
    """

    alive: jax.Array
    alive_column: jax.Array
    same: jax.Array
    carried: jax.Array
    kept: jax.Array
    survives: jax.Array


def read(plan: Plan, marks: jax.Array) -> Marks:
    """Masks from a visit's `marks [chunks, 1, 128]`."""
    diagonal = iota((CHUNK, CHUNK), 0) == iota((CHUNK, CHUNK), 1)
    per_chunk = []
    for c in range(plan.chunks):
        row = marks[c]
        code = row[:, :CHUNK]
        column = jnp.sum(jnp.where(diagonal, code, 0.0), axis=1, keepdims=True)
        before, after = row[:, BEFORE : BEFORE + 1], row[:, AFTER : AFTER + 1]
        same = jnp.broadcast_to(column, (CHUNK, PAIR)) == beside(code, code)
        per_chunk.append((column >= 0, same, column == before, column == after, before == after))
    pairs = plan.heads // 2
    alive, same, carried, kept, survives = (
        jnp.stack([x for x in masks for _ in range(pairs)])
        for masks in zip(*per_chunk, strict=True)
    )
    column = jnp.concatenate([masks[0] for masks in per_chunk], axis=0)
    return Marks(alive, column, same, carried, kept, survives)
