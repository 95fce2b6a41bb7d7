"""The short causal convolution before KDA: depthwise, a few taps, SiLU (KLR §3, K3R eq. 1).

A document never sees the tokens of another one, and padding counts as nothing: a token's
predecessors are the real tokens before it in its document, however much padding stands between.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from k3jax.layers.documents import Documents
from k3jax.parallel.context import last_tokens

type Streams = jax.Array | dict[str, jax.Array]  # one stream, or several by name


def short_conv(
    x: Streams,
    taps: Streams,
    documents: Documents,
    tail: Streams | None,
    axis: str | None = None,
) -> tuple[Streams, Streams]:
    """`y[t] = SiLU(sum_j taps[W-1-j] * x[t-j])` over the last W real tokens of a document.

    `x [B, T, C]`, `taps [W, C]` (the last one weighs the current token), `tail [B, W-1, C]` what
    came before the row: None or zeros where documents start; a row with another tail holds one
    document, which goes on. Returns `y [B, T, C]` and the next tail: the last W-1 real inputs.
    Products and their sum are taken in the dtype of `x`, as the official code does.

    Several streams are convolved at once, each with its taps and its tail. Inside a `shard_map`
    `axis` names the mesh axis that the row is split over, if it is: `x` and `documents` are the
    shard's, and both tails those of the whole row.
    """
    taps = jax.tree.map(lambda x, w: w.astype(x.dtype), x, taps)
    nothing = jax.tree.map(_nothing_before, x, taps)
    tail = nothing if tail is None else tail
    before = jax.tree.map(lambda x, t: t.astype(x.dtype), x, tail)
    if axis is None:
        padded = jax.tree.map(_joined, before, x)
        after = jax.tree.map(lambda p: _last(p, documents), padded)
    else:
        ends = jax.tree.map(lambda n, x: _last(_joined(n, x), documents), nothing, x)
        before, after = last_tokens(ends, documents.before.tokens, before, axis)
        padded = jax.tree.map(_joined, before, x)
    # The place in the row of the first real token.
    first = documents.before.here(axis).tokens[:, None]
    arguments = padded, taps, documents, first
    if documents.gaps is None:
        y = _gapless(*arguments)
    else:
        y = jax.lax.cond(documents.gaps, _with_gaps, _gapless, *arguments)
    return y, jax.tree.map(lambda a, t: a.astype(t.dtype), after, tail)


def _joined(before: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.concatenate([before, x], axis=1)


def _nothing_before(x: jax.Array, taps: jax.Array) -> jax.Array:
    return jnp.zeros((x.shape[0], taps.shape[0] - 1, x.shape[2]), x.dtype)


def _gapless(padded: Streams, taps: Streams, documents: Documents, first: jax.Array) -> Streams:
    """A row whose real tokens come first: predecessors are left neighbours."""
    positions, ids = documents.positions, documents.segment_ids
    return jax.tree.map(lambda x, w: _convolve(x, w, positions, ids, first), padded, taps)


def _with_gaps(padded: Streams, taps: Streams, documents: Documents, first: jax.Array) -> Streams:
    """Closes the gaps, convolves, and puts every token back where it stood."""
    order = documents.order
    back = jnp.argsort(order, axis=1)
    positions = jnp.take_along_axis(documents.positions, order, axis=1)
    ids = jnp.take_along_axis(documents.segment_ids, order, axis=1)

    def stream(x: jax.Array, taps: jax.Array) -> jax.Array:
        behind = taps.shape[0] - 1
        closed = permute_rows(x[:, behind:], order, back)
        y = _convolve(_joined(x[:, :behind], closed), taps, positions, ids, first)
        return permute_rows(y, back, order)

    return jax.tree.map(stream, padded, taps)


@jax.checkpoint  # the backward pass saves the inputs alone
def _convolve(
    padded: jax.Array,
    taps: jax.Array,
    positions: jax.Array,
    segment_ids: jax.Array,
    first: jax.Array,
) -> jax.Array:
    width, length = taps.shape[0], positions.shape[1]
    total = jnp.zeros_like(padded[:, width - 1 :])
    places = first + jnp.arange(length)
    for back in range(width):
        window = jax.lax.slice_in_dim(padded, width - 1 - back, width - 1 - back + length, axis=1)
        inside = (positions >= back) | (places < back)  # in the document, or in the row's tail
        total += jnp.where((inside & (segment_ids > 0))[..., None], window, 0) * taps[-1 - back]
    return jax.nn.silu(total)


def _last(padded: jax.Array, documents: Documents) -> jax.Array:
    """The last W-1 real inputs of `padded [B, W-1 + T, C]`, of which the first W-1 are real."""
    tokens = documents.order.shape[1]
    width = padded.shape[1] - tokens
    behind = jnp.broadcast_to(jnp.arange(width), (padded.shape[0], width))
    places = jnp.concatenate([behind, documents.order + width], axis=1)  # padding last
    last = documents.real.sum(axis=1, keepdims=True) + behind
    index = jnp.take_along_axis(places, last, axis=1)
    return jnp.take_along_axis(padded, index[..., None], axis=1)


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
