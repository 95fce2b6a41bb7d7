"""Growing a row: where new tokens go in a cache of tokens, and what they see of it.

A cached row holds one document. Its buffers are `[B, S, ...]`, S being the capacity, and
`length [B]` int32 counts the tokens in them. Padding (segment 0, anywhere in a row) is neither
written nor seen.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from k3jax.layers.attention import Visibility, unsplit_sequence
from k3jax.layers.documents import Documents
from k3jax.parallel.local import local
from k3jax.sharding import BATCH, spec_of, under_mesh


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Growth:
    """New tokens `[B, T]` on top of cached ones.

    `slots [B, T]` int32: each token's place in its row, S for padding; `length [B]` int32: how many
    tokens are cached then; `seen`: what the new tokens see of the cache, themselves included.
    """

    slots: jax.Array
    length: jax.Array
    seen: Visibility


def empty(batch: int, shape: tuple[int, ...], dtype: jnp.dtype, *axes: str | None) -> jax.Array:
    """Zeros `[batch, *shape]`, split over the batch axes of the current mesh, then over `axes`."""
    spec = PartitionSpec(BATCH, *axes) if under_mesh() else None
    return jnp.zeros((batch, *shape), dtype, out_sharding=spec)


def grow(documents: Documents, length: jax.Array, capacity: int) -> Growth:
    """Puts the real tokens of `documents` behind the `length [B]` cached ones of each row.

    Where the values are concrete, raises `ValueError` when a row holds more than one document or
    outgrows `capacity`. Under jit nothing can be raised: a token past the capacity is not kept, so
    no other sees it, and itself it sees the cached ones only.
    """
    real = documents.real
    total = length + real.sum(1, dtype=jnp.int32)
    _check(documents.segment_ids, total, capacity)
    at = length[:, None] + documents.positions
    slots = jnp.where(real, at, capacity)
    total = jnp.minimum(total, capacity)
    kv_index = jax.lax.broadcasted_iota(jnp.int32, (length.size, capacity), 1)
    kept = (kv_index < total[:, None]).astype(jnp.int32)
    return Growth(slots, total, Visibility(real.astype(jnp.int32), kept, at, kv_index))


def write(buffer: jax.Array, tokens: jax.Array, slots: jax.Array) -> jax.Array:
    """`buffer [B, S, ...]` with `tokens [B, T, ...]` at `slots [B, T]`, S and above left out."""

    def rows(buffer: jax.Array, tokens: jax.Array, slots: jax.Array) -> jax.Array:
        row = jnp.arange(buffer.shape[0])[:, None]
        return buffer.at[row, slots].set(tokens.astype(buffer.dtype), mode="drop")

    tokens, slots = unsplit_sequence(tokens), unsplit_sequence(slots)
    out_specs = spec_of(buffer) if under_mesh() else None
    return local(rows, buffer, tokens, slots, out_specs=out_specs)


def _check(segment_ids: jax.Array, total: jax.Array, capacity: int) -> None:
    if not isinstance(segment_ids, jax.core.Tracer) and np.max(segment_ids, initial=0) > 1:
        raise ValueError(
            f"segment_ids: {np.max(segment_ids)} found, a row with a cache holds one document, id 1"
        )
    if not isinstance(total, jax.core.Tracer) and np.max(total, initial=0) > capacity:
        row = int(np.argmax(total))
        raise ValueError(
            f"cache: row {row} would hold {total[row]} tokens, its capacity is {capacity}"
        )
