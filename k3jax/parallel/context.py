"""A row of tokens split over the context axis: what its shards tell one another.

The functions here run inside a `shard_map`, on one shard of a row; `axis` names the mesh axis that
the row is split over, None where the row is whole. What is sent has a fixed size whatever the
length of a shard, save in `gather_tokens`. A document may lie on any number of shards, and a shard
may hold any number of documents, or none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.kda import spans


def gather_tokens[Tree](x: Tree, axis: str | None) -> Tree:
    """Arrays `[B, T, ...]` of all shards, joined along T; the gradient is a reduce-scatter."""

    def gather(a: jax.Array) -> jax.Array:
        if axis is None or a.size == 0:  # XLA has no collective of nothing
            return a
        return jax.lax.all_gather(a, axis, axis=1, tiled=True)

    return jax.tree.map(gather, x)


class Before(NamedTuple):
    """What stands before each shard of a row, and before its end: `[B, shards + 1]`, int32.

    `document`: the one that is live there, the largest id so far (0: none); `tokens`: how many real
    tokens there are; `of_document`: how many of them belong to `document`.
    """

    document: jax.Array
    tokens: jax.Array
    of_document: jax.Array

    def here(self, axis: str | None) -> Before:
        """The same before this shard: `[B]`."""
        shard = _shard(axis)
        return Before(*(x[:, shard] for x in self))


def before_shards(segment_ids: jax.Array, axis: str | None) -> Before:
    """`Before` of the row whose shard `segment_ids [B, T]` is: the same on all shards."""
    last = segment_ids.max(axis=1, initial=0)
    count = (segment_ids > 0).sum(axis=1, dtype=jnp.int32)
    of_last = ((segment_ids > 0) & (segment_ids == last[:, None])).sum(axis=1, dtype=jnp.int32)
    last, count, of_last = _all(jnp.stack([last, count, of_last]), axis, 2)
    document = _behind(jax.lax.cummax(last, axis=1))
    # All of a shard's tokens of a document that outlives it are counted as those of its last one.
    mine = (last[:, :, None] == document[:, None, :]) & _earlier(last.shape[1])
    of_document = (mine * of_last[:, :, None]).sum(axis=1, dtype=jnp.int32)
    return Before(document, _behind(jnp.cumsum(count, axis=1)), of_document)


def last_tokens[Tree](
    ends: Tree, tokens_before: jax.Array, tail: Tree, axis: str
) -> tuple[Tree, Tree]:
    """The last real tokens before this shard, and those of the whole row.

    Args:
      ends: `[B, W, C]` the shard's last W real tokens, anything before them where it has fewer.
      tokens_before: `[B, shards + 1]`, `Before.tokens`.
      tail: `[B, W, C]` the last W tokens before the row.

    Returns: two arrays `[B, W, C]`. Shards may be shorter than W, or padding alone, so W tokens of
    every shard are gathered. `ends` and `tail` may be trees of such arrays.
    """
    leaves, structure = jax.tree.flatten(ends)
    width, shards = leaves[0].shape[1], tokens_before.shape[1] - 1
    if width == 0:  # XLA has no collective of nothing
        return tail, tail
    counts = jnp.diff(tokens_before, axis=1)[..., None]
    real = jnp.arange(width) >= width - counts  # [B, shards, W]

    def last(row: jax.Array, there: jax.Array) -> jax.Array:
        there = jnp.pad(there.reshape(row.shape[0], -1), ((0, 0), (width, 0)), constant_values=True)
        order = jnp.argsort(there, axis=1, stable=True)[:, row.shape[1] - width :]
        return jnp.take_along_axis(row, order[..., None], axis=1)

    earlier = real & (jnp.arange(shards)[:, None] < _shard(axis))
    before, after = [], []
    for end, own in zip(leaves, jax.tree.leaves(tail), strict=True):
        row = jnp.concatenate([own, jax.lax.all_gather(end, axis, axis=1, tiled=True)], axis=1)
        before.append(last(row, earlier))
        after.append(last(row, real))
    return jax.tree.unflatten(structure, before), jax.tree.unflatten(structure, after)


def recur(
    attention: Callable[..., tuple[jax.Array, jax.Array | None]],
    span_map: Callable[..., spans.SpanMap],
    *,
    segment_ids: jax.Array,
    documents_before: jax.Array,
    axis: str,
    initial_state: jax.Array | None = None,
    max_documents: int = 1,
    return_final_state: bool = False,
) -> tuple[jax.Array, jax.Array | None]:
    """A linear recurrence over a split row, by one exchange of affine maps (K3R §5.1.2).

    Each shard sums its tokens up as S_out = M S_in + N, for the state of the live document; all
    maps are gathered, and each shard folds those before it into the state it starts from.

    Args:
      attention: the recurrence over this shard's tokens as a function of `initial_state`,
        `segment_ids`, `max_documents` and `return_final_state`, as `pallas_kernels.kda.kda` is.
      span_map: the map of this shard's tokens as a function of `initial_state`, `segment_ids`,
        `max_documents` and `document_before`, as `pallas_kernels.kda.spans.span_map` is.
      segment_ids: `[B, T]`, this shard's; ids are those of the row.
      documents_before: `[B, shards + 1]`, `Before.document`.
      initial_state: `[B, N, HV, K, V]` of the row's documents, on every shard; None is zeros.
      max_documents: N. Without states a row may hold any number of documents.

    Returns: o `[B, T, HV, V]` of this shard, and the row's final states `[B, N, HV, K, V]`, on
    every shard, or None.
    """
    rank, shards = jax.lax.axis_index(axis), documents_before.shape[1] - 1
    before = documents_before[:, rank]
    states = {"initial_state": initial_state, "max_documents": max_documents}
    own = span_map(segment_ids=segment_ids, document_before=before, **states)
    maps = jax.tree.map(lambda x: jax.lax.all_gather(x, axis), own)

    def fold(S: jax.Array, shard: tuple[jax.Array, spans.SpanMap]) -> tuple[jax.Array, None]:
        place, span = shard
        return jnp.where(place < rank, spans.apply(span, S), S), None

    earlier = jax.tree.map(lambda x: x[:-1], maps)  # nothing follows the last one
    S, _ = jax.lax.scan(fold, jnp.zeros_like(own.N), (jnp.arange(shards - 1), earlier))

    # In the shard, document 1 is the one that goes on, and those that start here follow it.
    ids = jnp.where(segment_ids > 0, segment_ids - before[:, None] + 1, 0)
    if initial_state is None and not return_final_state:
        return attention(initial_state=S[:, None], segment_ids=ids)
    slots = jnp.arange(max_documents)
    rows = jnp.arange(before.size)[:, None]
    starts = jnp.zeros((before.size, max_documents, *S.shape[1:]), S.dtype)
    if initial_state is not None:
        starts = initial_state.at[rows, before[:, None] + slots].get(mode="fill", fill_value=0)
    o, finals = attention(
        initial_state=jnp.concatenate([S[:, None], starts], axis=1),
        segment_ids=ids,
        max_documents=max_documents + 1,
        return_final_state=return_final_state,
    )
    if finals is None:
        return o, None
    # A document's final state is known where it is live at the end of the row, or another one
    # starts behind it.
    document = slots + 1
    ended = (document < documents_before[:, rank + 1, None]) | (rank == shards - 1)
    here = (document >= before[:, None]) & ended
    finals = finals[rows, jnp.clip(document - before[:, None], 0, max_documents)]
    return o, jax.lax.psum(jnp.where(here[..., None, None, None], finals, 0), axis)


def _shard(axis: str | None) -> Any:
    return 0 if axis is None else jax.lax.axis_index(axis)


def _all(x: jax.Array, axis: str | None, position: int) -> jax.Array:
    """`x` of every shard, on a new axis at `position`."""
    if axis is None:
        return jnp.expand_dims(x, position)
    return jax.lax.all_gather(x, axis, axis=position)


def _behind(x: jax.Array) -> jax.Array:
    """From what there is at the end of each shard to what is before the next; first 0."""
    return jnp.pad(x, ((0, 0), (1, 0)))


def _earlier(shards: int) -> jax.Array:
    """`[shards, shards + 1]` bool: a shard stands before a boundary."""
    return jnp.arange(shards)[:, None] < jnp.arange(shards + 1)
