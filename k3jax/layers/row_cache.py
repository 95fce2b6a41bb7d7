"""Growing a row: where new tokens go in a cache of tokens, and what they see of it.

A cached row holds one document. Its buffers are `[B, S, ...]`, S being the capacity, and
`length [B]` int32 counts the tokens in them. Padding (segment 0, anywhere in a row) is neither
written nor seen.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from k3jax.layers.attention import Visibility, unsplit_sequence
from k3jax.layers.documents import Documents
from k3jax.parallel.local import local
from k3jax.sharding import BATCH, spec_of, under_mesh
from pallas_kernels.checks import concrete


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


class TokenCache(Protocol):
    """A cache of tokens: how many there are in each row, `length [B]` int32, and may be."""

    @property
    def length(self) -> jax.Array: ...

    @property
    def capacity(self) -> int: ...


def grow(documents: Documents, cache: TokenCache) -> Growth:
    """Puts the real tokens of `documents` behind the cached ones of each row.

    Raises `ValueError` as `check` does. Under jit nothing can be raised: a token past the capacity
    is not kept, so no other sees it, and itself it sees the cached ones only.
    """
    check(documents, cache)
    real, length, capacity = documents.real, cache.length, cache.capacity
    at = length[:, None] + documents.positions
    slots = jnp.where(real, at, capacity)
    total = jnp.minimum(length + real.sum(1, dtype=jnp.int32), capacity)
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


def check(documents: Documents, cache: Any) -> None:
    """Raises `ValueError` where `documents` do not fit `cache`, if their values are concrete.

    `cache` is that of a layer, of a stack of equal layers, or a tree of those: with any, a row
    holds one document; with one of tokens, it must not outgrow the capacity.
    """
    ids = documents.segment_ids
    if not jax.tree.leaves(cache) or not concrete(ids):
        return
    if np.max(ids, initial=0) > 1:
        raise ValueError(
            f"segment_ids: {np.max(ids)} found, a row with a cache holds one document, id 1"
        )
    for part in jax.tree.leaves(cache, is_leaf=_holds_tokens):
        if not _holds_tokens(part) or not concrete(part.length):
            continue
        total = np.asarray(part.length) + np.asarray(documents.real).sum(1)
        if np.max(total, initial=0) > part.capacity:
            row = int(np.argmax(total)) % total.shape[-1]
            raise ValueError(
                f"cache: row {row} would hold {total.max()} tokens, its capacity is {part.capacity}"
            )


def _holds_tokens(part: Any) -> bool:
    return hasattr(part, "capacity")
