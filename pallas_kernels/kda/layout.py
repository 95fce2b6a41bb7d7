"""Rows of tokens cut into spans of chunks, with a state slot per chunk.

A chunk works on one state. Without states a row of documents needs no care: the log decay of a
document's first token is a reset, and what a chunk carries is the state of its last document. With
states every document that owns a slot is moved to start at a chunk, so that a chunk begins from
its document's state and leaves it there; the row grows by at most a chunk per slot.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from . import documents

CHUNK = 64
# Chunks in a span: they are prepared side by side, and one state is saved per span. One number for
# rows of every length, so that a short row is computed by the program of a long one: what tokens
# come later, or how many, changes no bit.
SPAN = 4


class Layout(NamedTuple):
    """Where tokens went, and what each chunk does.

    source: `[B, L]` the token at each place of the layout (T where there is none), or None where
      tokens kept their places.
    place: `[B, T]` the place of each token, or None.
    real: `[B, L]` the place holds a real token.
    reset: `[B, L]` the token forgets everything before it.
    slot, begins, ends: `[B, L / CHUNK]` the state that a chunk works on, and whether the chunk is
      the first, or the last, one of that state. Slot N is a spare one that no caller sees.
    """

    source: jax.Array | None
    place: jax.Array | None
    real: jax.Array
    reset: jax.Array
    slot: jax.Array
    begins: jax.Array
    ends: jax.Array


def plan(
    batch: int, tokens: int, segment_ids: jax.Array | None, slots: int, states_asked: bool
) -> Layout:
    """The layout of a row of T >= 1 tokens; its length L is a multiple of a span."""
    if segment_ids is None or not states_asked:
        length = _whole_spans(tokens)
        pad = ((0, 0), (0, length - tokens))
        if segment_ids is None:
            real = jnp.broadcast_to(jnp.arange(length) < tokens, (batch, length))
            reset = jnp.zeros((batch, length), bool)
        else:
            docs = documents.read(segment_ids)
            real, reset = jnp.pad(docs.real, pad), jnp.pad(docs.first, pad)
        edge = jnp.zeros((batch, length // CHUNK), bool)
        slot = jnp.zeros(edge.shape, jnp.int32)
        return Layout(
            None, None, real, reset, slot, edge.at[:, 0].set(True), edge.at[:, -1].set(True)
        )

    docs = documents.read(segment_ids)
    groups = slots + 2
    group, bounds, first_chunk = grouped(docs, slots)
    rank = jnp.arange(tokens) - jnp.take_along_axis(bounds, group, axis=1)
    place = jnp.take_along_axis(first_chunk, group, axis=1) * CHUNK + rank
    length = _whole_spans(tokens + groups * (CHUNK - 1))
    rows = jnp.arange(batch)[:, None]
    source = jnp.full((batch, length), tokens).at[rows, place].set(jnp.arange(tokens))

    index = jnp.arange(length // CHUNK)
    owner = owners(first_chunk, index)
    owned = (owner >= 1) & (owner <= slots)
    slot = jnp.where(owned, owner - 1, slots)
    start = jnp.take_along_axis(first_chunk, jnp.minimum(owner, groups), axis=1) == index
    last = jnp.pad(first_chunk[:, 1:], ((0, 0), (0, 1)), mode="edge")
    end = jnp.take_along_axis(last, jnp.minimum(owner, groups), axis=1) == index + 1
    reset = docs.first & (group == slots + 1)
    layout = Layout(source, place, docs.real, reset, slot, owned & start, owned & end)
    return layout._replace(real=gather(layout, docs.real), reset=gather(layout, reset))


class Groups(NamedTuple):
    """The tokens of a row by the state they belong to, each group in chunks of its own: 0, before
    the first document; 1 to N, the slots; N + 1, documents that own no slot.

    group: `[B, T]`. bounds, first_chunk: `[B, N + 3]` the first token, and the first chunk, of
    every group, and one past the last.
    """

    group: jax.Array
    bounds: jax.Array
    first_chunk: jax.Array


def grouped(docs: documents.Documents, slots: int) -> Groups:
    group = jnp.minimum(docs.live, slots + 1)
    bounds = documents.places(group, jnp.arange(slots + 3))
    chunks = -(-jnp.diff(bounds) // CHUNK)
    return Groups(group, bounds, jnp.pad(jnp.cumsum(chunks, axis=1), ((0, 0), (1, 0))))


def owners(first_chunk: jax.Array, index: jax.Array) -> jax.Array:
    """The group of each chunk of `index`, `[B, len(index)]`; N + 2 past the last."""
    return documents.places(first_chunk, index, side="right") - 1


def gather(layout: Layout, x: jax.Array) -> jax.Array:
    """`[B, T, ...]` to `[B, L, ...]`, zero where there is no token."""
    if layout.source is None:
        spare = layout.real.shape[1] - x.shape[1]
        return jnp.pad(x, ((0, 0), (0, spare)) + ((0, 0),) * (x.ndim - 2))
    rows = jnp.arange(x.shape[0])[:, None]
    return x.at[rows, layout.source].get(mode="fill", fill_value=0)


def scatter(layout: Layout, x: jax.Array, tokens: int) -> jax.Array:
    """`[B, L, ...]` back to `[B, T, ...]`."""
    if layout.place is None:
        return x[:, :tokens]
    return x[jnp.arange(x.shape[0])[:, None], layout.place]


def to_spans(x: jax.Array) -> jax.Array:
    """`[B, L, ...]` to `[spans, B, L / spans, ...]`, for a scan over spans."""
    return jnp.moveaxis(x.reshape(x.shape[0], -1, SPAN * CHUNK, *x.shape[2:]), 1, 0)


def from_spans(x: jax.Array) -> jax.Array:
    """Back from `to_spans`."""
    x = jnp.moveaxis(x, 0, 1)
    return x.reshape(x.shape[0], -1, *x.shape[3:])


def _whole_spans(tokens: int) -> int:
    return -(-tokens // (SPAN * CHUNK)) * SPAN * CHUNK
