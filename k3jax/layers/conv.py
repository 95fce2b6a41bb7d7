"""The short causal convolution before KDA: depthwise, a few taps, SiLU (KLR §3, K3R eq. 1).

A document never sees the tokens of another one, and padding counts as nothing: a token's
predecessors are the real tokens before it in its document, however much padding stands between.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from k3jax.layers.documents import Documents

type Streams = jax.Array | dict[str, jax.Array]  # one stream, or several by name


def short_conv(
    x: Streams, taps: Streams, documents: Documents, tail: Streams | None
) -> tuple[Streams, Streams]:
    """`y[t] = SiLU(sum_j taps[W-1-j] * x[t-j])` over the last W real tokens of a document.

    `x [B, T, C]`, `taps [W, C]` (the last one weighs the current token), `tail [B, W-1, C]` what
    came before the row: None or zeros where documents start; a row with another tail holds one
    document, which goes on. Returns `y [B, T, C]` and the next tail: the last W-1 real inputs.
    Products and their sum are taken in the dtype of `x`, as the official code does.

    Several streams are convolved at once, each with its taps and its tail.
    """
    if tail is None:
        tail = jax.tree.map(_nothing_before, x, taps)
    padded = jax.tree.map(lambda x, t: jnp.concatenate([t.astype(x.dtype), x], axis=1), x, tail)
    taps = jax.tree.map(lambda x, w: w.astype(x.dtype), x, taps)
    y = jax.lax.cond(documents.gaps, _with_gaps, _gapless, padded, taps, documents)
    after = jax.tree.map(lambda t, p: _next_tail(p, t, documents), tail, padded)
    return jax.tree.map(jax.nn.silu, y), after


def _nothing_before(x: jax.Array, taps: jax.Array) -> jax.Array:
    return jnp.zeros((x.shape[0], taps.shape[0] - 1, x.shape[2]), x.dtype)


def _gapless(padded: Streams, taps: Streams, documents: Documents) -> Streams:
    """A row whose real tokens come first: predecessors are left neighbours."""
    positions, ids = documents.positions, documents.segment_ids
    return jax.tree.map(lambda x, w: _convolve(x, w, positions, ids), padded, taps)


def _with_gaps(padded: Streams, taps: Streams, documents: Documents) -> Streams:
    """Closes the gaps, convolves, and puts every token back where it stood."""
    order = documents.order
    back = jnp.argsort(order, axis=1)
    positions = jnp.take_along_axis(documents.positions, order, axis=1)
    ids = jnp.take_along_axis(documents.segment_ids, order, axis=1)

    def stream(x: jax.Array, taps: jax.Array) -> jax.Array:
        behind = taps.shape[0] - 1
        closed = permute_rows(x[:, behind:], order, back)
        y = _convolve(jnp.concatenate([x[:, :behind], closed], axis=1), taps, positions, ids)
        return permute_rows(y, back, order)

    return jax.tree.map(stream, padded, taps)


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
    behind = jnp.broadcast_to(jnp.arange(tail.shape[1]), tail.shape[:2])
    places = jnp.concatenate([behind, documents.order + tail.shape[1]], axis=1)  # padding last
    last = documents.real.sum(axis=1, keepdims=True) + behind
    index = jnp.take_along_axis(places, last, axis=1)
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
