"""The short causal convolution before KDA: depthwise, a few taps, SiLU (KLR §3, K3R eq. 1).

A document never sees the tokens of another one, and padding counts as nothing: a token's
predecessors are the real tokens before it in its document, however much padding stands between.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from k3jax.layers.documents import Documents


def short_conv(
    x: jax.Array, taps: jax.Array, documents: Documents, tail: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """`y[t] = SiLU(sum_j taps[W-1-j] * x[t-j])` over the last W real tokens of a document.

    `x [B, T, C]`, `taps [W, C]` (the last one weighs the current token), `tail [B, W-1, C]` what
    came before the row: None or zeros where documents start; a row with another tail holds one
    document, which goes on. Returns `y [B, T, C]` and the next tail: the last W-1 real inputs.
    Products and their sum are taken in the dtype of `x`, as the official code does.
    """
    if tail is None:
        tail = jnp.zeros((x.shape[0], taps.shape[0] - 1, x.shape[2]), x.dtype)
    padded = jnp.concatenate([tail.astype(x.dtype), x], axis=1)
    taps = taps.astype(x.dtype)
    y = jax.lax.cond(documents.gaps, _with_gaps, _gapless, padded, taps, documents)
    return jax.nn.silu(y), _next_tail(padded, tail, documents)


def _gapless(padded: jax.Array, taps: jax.Array, documents: Documents) -> jax.Array:
    """A row whose real tokens come first: predecessors are left neighbours."""
    return _convolve(padded, taps, documents.positions, documents.segment_ids)


def _with_gaps(padded: jax.Array, taps: jax.Array, documents: Documents) -> jax.Array:
    """Closes the gaps, convolves, and puts every token back where it stood."""
    behind = padded.shape[1] - documents.order.shape[1]
    back = jnp.argsort(documents.order, axis=1)
    closed = permute_rows(padded[:, behind:], documents.order, back)
    y = _convolve(
        jnp.concatenate([padded[:, :behind], closed], axis=1),
        taps,
        jnp.take_along_axis(documents.positions, documents.order, axis=1),
        jnp.take_along_axis(documents.segment_ids, documents.order, axis=1),
    )
    return permute_rows(y, back, documents.order)


def _convolve(
    padded: jax.Array, taps: jax.Array, positions: jax.Array, segment_ids: jax.Array
) -> jax.Array:
    width, length = taps.shape[0], positions.shape[1]
    total = jnp.zeros_like(padded[:, width - 1 :])
    for back in range(width):
        window = jax.lax.slice_in_dim(padded, width - 1 - back, width - 1 - back + length, axis=1)
        inside = (positions >= back) | (jnp.arange(length) < back)  # in the document, or its tail
        total += jnp.where((inside & (segment_ids > 0))[..., None], window, 0) * taps[-1 - back]
    return total


def _next_tail(padded: jax.Array, tail: jax.Array, documents: Documents) -> jax.Array:
    behind = tail.shape[1]
    count = documents.real.sum(axis=1, dtype=jnp.int32)[:, None]
    wanted = count + jnp.arange(behind, dtype=jnp.int32) - behind  # rank among real tokens
    rank = jnp.take_along_axis(documents.order, jnp.maximum(wanted, 0), axis=1)
    index = jnp.where(wanted >= 0, rank + behind, wanted + behind)
    return jnp.take_along_axis(padded, index[..., None], axis=1).astype(tail.dtype)


@jax.custom_vjp
def permute_rows(x: jax.Array, order: jax.Array, back: jax.Array) -> jax.Array:
    """`x [B, T, C]` with its rows in `order [B, T]`; `back` is the inverse permutation.

    The gradient is the gather by `back`: a scatter-add would be slow and, on a GPU, not
    deterministic.
    """
    return jnp.take_along_axis(x, order[..., None], axis=1)


def _permute_fwd(x: jax.Array, order: jax.Array, back: jax.Array) -> tuple[jax.Array, jax.Array]:
    return permute_rows(x, order, back), back


def _permute_bwd(back: jax.Array, dy: jax.Array) -> tuple[jax.Array, None, None]:
    return jnp.take_along_axis(dy, back[..., None], axis=1), None, None


permute_rows.defvjp(_permute_fwd, _permute_bwd)
