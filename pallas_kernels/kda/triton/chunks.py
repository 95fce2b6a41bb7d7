"""Which tokens a chunk holds, and which chunks share a state.

Tokens are never moved: where documents own states, a chunk is a run of at most 64 tokens of one
group, and it is the kernels that begin at its first token. Groups are the tokens before the first
document, one document for each slot, and the documents that own no slot; each starts a chain of
chunks of its own.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from .. import documents
from ..layout import CHUNK, grouped, owners


class Chunks(NamedTuple):
    """bounds: `[B, NC, 2]` int32, a chunk's first token and the one after its last, equal where it
      holds none; or None where chunk n begins at token 64 n.
    groups: `[B, G + 1]` int32, the first chunk of every group, or None where a row is one group.
    marks: `[B, T]` int8, 1 at a real token, 3 if it forgets everything before it, 0 at padding; or
      None where every token is real.
    """

    bounds: jax.Array | None
    groups: jax.Array | None
    marks: jax.Array | None


def count(tokens: int, slots: int, moved: bool) -> int:
    """Chunks of a row: the groups' last ones may hold fewer tokens than 64."""
    spare = (slots + 2) * (CHUNK - 1) if moved else CHUNK - 1
    return (tokens + spare) // CHUNK


def plan(segment_ids: jax.Array | None, slots: int, states_asked: bool) -> Chunks:
    """The chunks of rows of T >= 1 tokens."""
    if segment_ids is None:
        return Chunks(None, None, None)
    docs = documents.read(segment_ids)
    if not states_asked:
        return Chunks(None, None, _marks(docs.real, docs.first))
    group, bounds, first = grouped(docs, slots)
    index = jnp.arange(count(segment_ids.shape[1], slots, moved=True))
    owner = owners(first, index)
    held = owner < slots + 2
    owner = jnp.where(held, owner, 0)
    rank = index - jnp.take_along_axis(first, owner, axis=1)
    start = jnp.take_along_axis(bounds, owner, axis=1) + rank * CHUNK
    stop = jnp.minimum(start + CHUNK, jnp.take_along_axis(bounds, owner + 1, axis=1))
    spans = jnp.where(held[..., None], jnp.stack([start, stop], axis=-1), 0)
    marks = _marks(docs.real, docs.first & (group == slots + 1))
    return Chunks(spans.astype(jnp.int32), first.astype(jnp.int32), marks)


def _marks(real: jax.Array, reset: jax.Array) -> jax.Array:
    return jnp.where(real, jnp.where(reset, 3, 1), 0).astype(jnp.int8)
