"""Which tokens of a row belong together: built once per batch, read by every layer.

`segment_ids [B, T]` int32 number the documents of a row from 1, non-decreasing over real tokens; 0
is padding, anywhere. A document's tokens see one another and nothing else.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from k3jax.parallel.context import Before, before_shards
from k3jax.parallel.local import local
from k3jax.sharding import sequence_axis, spec_of, under_mesh
from pallas_kernels.checks import concrete


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Documents:
    """The documents of a batch of rows.

    `segment_ids [B, T]` int32, as above. `positions [B, T]` int32: how many real tokens of its
    document precede a token. `order [B, T]` int32: the token indices of the row, or of each shard
    of a split one, real tokens first, in order. `gaps`: bool scalar, whether padding stands before
    a real token in any row or shard, so that a token's predecessor is not simply its left
    neighbour; None where it is known that none does. `before`: what stands before each shard, and
    before the row's end.
    """

    segment_ids: jax.Array
    positions: jax.Array
    order: jax.Array
    gaps: jax.Array | None
    before: Before

    @property
    def real(self) -> jax.Array:
        """`[B, T]` bool: not padding."""
        return self.segment_ids > 0

    @property
    def starts(self) -> jax.Array:
        """`[B, T]` bool: first token of its document."""
        return self.real & (self.positions == 0)


def documents_of(segment_ids: jax.Array, gapless: bool = False) -> Documents:
    """The `Documents` of `segment_ids [B, T]`.

    `gapless` is the caller's word that padding stands at the ends of rows alone: programs then do
    without the way that gaps need, which no compiler can know to be idle. Raises `ValueError` for a
    wrong shape or dtype, and, where the values are concrete, for negative ids, ids that decrease
    along a row, or a gap where there should be none.
    """
    if segment_ids.ndim != 2 or segment_ids.dtype != jnp.int32:
        raise ValueError(
            f"segment_ids: {segment_ids.dtype}{list(segment_ids.shape)}, must be int32 [B, T]"
        )
    if concrete(segment_ids):
        _check_values(np.asarray(segment_ids))
        if gapless:
            check_gapless(np.asarray(segment_ids))
    if not under_mesh():
        found = _documents(segment_ids, None)
        return dataclasses.replace(found, gaps=None) if gapless else found
    axis, spec = sequence_axis(segment_ids), spec_of(segment_ids)
    whole = PartitionSpec(spec[0], None)
    ids, positions, order, gaps, *before = local(
        lambda ids: jax.tree.leaves(_documents(ids, axis, rowwise=True)),
        segment_ids,
        out_specs=[*(spec,) * 4, *(whole,) * 3],
    )
    anywhere = None if gapless else jax.sharding.reshard(jnp.any(gaps), PartitionSpec())
    return Documents(ids, positions, order, anywhere, Before(*before))


def one_document(tokens: jax.Array) -> Documents:
    """Rows of one document each, without padding, laid out as `tokens [B, T]` are."""
    return documents_of(jnp.ones_like(tokens, jnp.int32))


def check_gapless(ids: np.ndarray) -> None:
    """Raises `ValueError` where padding stands before a real token in `ids [..., T]`."""
    gaps = (ids[..., 1:] > 0) & (ids[..., :-1] == 0)
    if gaps.any():
        *row, column = np.argwhere(gaps)[0]
        raise ValueError(
            f"segment_ids: padding at token {column} of row {tuple(map(int, row))} stands before a "
            "real token, must be at the ends of rows"
        )


def _check_values(ids: np.ndarray) -> None:
    if ids.size and ids.min() < 0:
        raise ValueError(f"segment_ids: {ids.min()} found, must be 0 (padding) or positive")
    latest = np.maximum.accumulate(ids, axis=1)
    if np.any((ids > 0) & (ids < latest)):
        row, column = np.argwhere((ids > 0) & (ids < latest))[0]
        raise ValueError(
            f"segment_ids: {ids[row, column]} after {latest[row, column]} in row {row} at token "
            f"{column}, must not decrease over real tokens"
        )


def _documents(ids: jax.Array, axis: str | None, rowwise: bool = False) -> Documents:
    real, before = ids > 0, before_shards(ids, axis)
    here = Before(*(x[:, None] for x in before.here(axis)))
    rank = jnp.cumsum(real, axis=1, dtype=jnp.int32) - 1
    left = jnp.pad(jax.lax.cummax(ids, axis=1)[:, :-1], ((0, 0), (1, 0)))
    first = real & (ids != jnp.maximum(left, here.document))
    start = jax.lax.cummax(jnp.where(first, rank, 0), axis=1)
    position = rank - start + jnp.where(ids == here.document, here.of_document, 0)
    order = jnp.argsort(~real, axis=1, stable=True).astype(jnp.int32)
    gap = jnp.pad(real[:, 1:] & ~real[:, :-1], ((0, 0), (0, 1)))
    gaps = gap if rowwise else jnp.any(gap)
    return Documents(ids, jnp.where(real, position, 0), order, gaps, before)
