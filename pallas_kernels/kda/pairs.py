"""What a chunk needs of its own tokens: products of causal pairs, and the decays to its two ends.

With g the log decay of a token and C tokens in a chunk, the chunkwise form asks for

    M[i, j] = sum_d rows[i, d] cols[j, d] exp(g[j+1, d] + ... + g[i, d])        for j < i

The exponent of a pair is at most 0, but that of either factor of a naive split may be anything:
anchoring a whole chunk at one token overflows at 88 nats. `halving` splits by halves instead:
a block of 2s tokens is two blocks of s, whose own pairs are known, and the pairs that cross its
middle, where the row's factor decays from the middle up to i and the column's from j up to the
middle. Both are sums of log decays, never differences, so every factor is at most 1 for any gate,
a reset (`RESET`) is an exact zero, nothing cancels, and the anchor of a pair lies at or before its
row: an edit of later tokens changes no bit of an earlier row. Doubling s from 1 to C / 2 costs one
exponential per token and channel each time and no product above the diagonal.

The same holds for gradients: each factor's own gradient flows to the log decays that it sums over,
and a pair i == j has none.
"""

import functools

import jax
import jax.numpy as jnp

HIGHEST = jax.lax.Precision.HIGHEST
# A log decay that forgets everything. Finite, and C of them still are in float32.
RESET = -1e30


def einsum(subscripts: str, *operands: jax.Array) -> jax.Array:
    """A contraction in the full precision of its operands (no TF32, no single bfloat16 pass)."""
    return jnp.einsum(subscripts, *operands, precision=HIGHEST)


def halving(
    rows: jax.Array, cols: jax.Array, g: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Decayed products of the pairs j < i, for R sets of rows that share their columns.

    Args:
      rows: `[..., C, R, K]`; C is a power of two.
      cols: `[..., C, K]`.
      g: log decay `[..., C, K]`, <= 0.

    Returns:
      `[..., C, R, C]`, strictly lower triangular in its two axes of tokens;
      prefix `[..., C, K]`: log decay from the chunk's start up to and with each token;
      suffix `[..., C, K]`: from after each token to the chunk's end;
      total `[..., K]`: of the chunk.
    """
    *lead, chunk, sets, width = rows.shape
    axis = len(lead)
    # Blocks of one token: [..., blocks, size, width].
    prefix, suffix = g[..., None, :], jnp.zeros((*g.shape[:-1], 1, width), g.dtype)
    total = g
    products = jnp.zeros((*lead, chunk, 1, sets, 1), cols.dtype)
    size = 1
    while size < chunk:
        count = chunk // (2 * size)
        left, _ = _halves(cols.reshape(*lead, 2 * count, size, width), axis)
        _, right = _halves(rows.reshape(*lead, 2 * count, size, sets, width), axis)
        prefixes, suffixes = _halves(prefix, axis), _halves(suffix, axis)
        totals, blocks = _halves(total, axis), _halves(products, axis)

        left = left * jnp.exp(suffixes[0])
        right = right * jnp.exp(prefixes[1])[..., None, :]
        right = right.reshape(*lead, count, size * sets, width)
        crossing = einsum("...id,...jd->...ij", right, left).reshape(blocks[0].shape)
        upper = jnp.concatenate([blocks[0], jnp.zeros_like(crossing)], axis=-1)
        lower = jnp.concatenate([crossing, blocks[1]], axis=-1)
        products = jnp.concatenate([upper, lower], axis=-3)

        prefix = jnp.concatenate([prefixes[0], prefixes[1] + totals[0][..., None, :]], axis=-2)
        suffix = jnp.concatenate([suffixes[0] + totals[1][..., None, :], suffixes[1]], axis=-2)
        total = totals[0] + totals[1]
        size *= 2
    block = functools.partial(jax.lax.index_in_dim, index=0, axis=axis, keepdims=False)
    return block(products), block(prefix), block(suffix), block(total)


def _halves(x: jax.Array, axis: int) -> tuple[jax.Array, jax.Array]:
    """The even and the odd ones of the blocks along an axis: first and second halves."""
    x = x.reshape(*x.shape[:axis], x.shape[axis] // 2, 2, *x.shape[axis + 1 :])
    first, second = (jax.lax.index_in_dim(x, n, axis + 1, keepdims=False) for n in (0, 1))
    return first, second
