"""Grouped matmul in plain JAX: a loop over row blocks of one static size, each of one group.

A group of n rows takes ceil(n / c) blocks of c rows, so at most `1 + G c / N` times the ideal
multiplications are done, no weight is copied, and no step gathers or scatters single rows. The last
block of a group runs past its end: what it writes there is overwritten by the next group, whose
blocks come later. The loop runs over the blocks in use only, which reverse-mode differentiation
cannot follow, so the gradients are a loop of their own.
"""

import functools

import jax
import jax.numpy as jnp

from ..vma import vary_together
from .spec import Inputs, Spec


def refuses(spec: Spec, platform: str) -> str | None:
    """Takes every call."""
    return None


def run(spec: Spec, inputs: Inputs) -> jax.Array:
    return _grouped_matmul(block_size(spec.rows, spec.groups), *inputs)


def block_size(rows: int, groups: int) -> int:
    """Rows per block: the power of two below half a mean group, in 16 .. 512.

    Smaller blocks waste fewer multiplications and reread the weights more often.
    """
    half = max(rows // (2 * groups), 1)
    return min(max(1 << (half.bit_length() - 1), 16), 512)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _grouped_matmul(
    block: int, rows: jax.Array, weights: jax.Array, group_sizes: jax.Array
) -> jax.Array:
    used, group, first, _ = _blocks(block, rows.shape[0], group_sizes)
    padded = _pad(rows, block)

    def multiply(b: jax.Array, out: jax.Array) -> jax.Array:
        product = _dot(_rows_at(padded, first[b], block), weights[group[b]], ((1,), (0,)))
        return _write(out, product, first[b])

    out = _zeros((padded.shape[0], weights.shape[2]), rows.dtype, rows)
    return _live_rows(jax.lax.fori_loop(0, used, multiply, out), rows.shape[0], group_sizes)


def _forward(block, rows, weights, group_sizes):
    return _grouped_matmul(block, rows, weights, group_sizes), (rows, weights, group_sizes)


def _backward(block, residuals, cotangent):
    rows, weights, group_sizes = residuals
    used, group, first, stop = _blocks(block, rows.shape[0], group_sizes)
    padded, padded_cotangent = _pad(rows, block), _pad(cotangent, block)

    def multiply(b: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        d_rows, d_weights = carry
        # Rows past the group's end are another group's: they must not enter its weight gradient.
        mine = (first[b] + jnp.arange(block) < stop[b])[:, None]
        x = jnp.where(mine, _rows_at(padded, first[b], block), 0)
        ct = jnp.where(mine, _rows_at(padded_cotangent, first[b], block), 0)
        d_rows = _write(d_rows, _dot(ct, weights[group[b]], ((1,), (1,))), first[b])
        return d_rows, d_weights.at[group[b]].add(_dot(x, ct, ((0,), (0,))))

    d_weights = _zeros(weights.shape, _accumulator(weights.dtype), weights)
    carry = jnp.zeros_like(padded), d_weights
    d_rows, d_weights = jax.lax.fori_loop(0, used, multiply, carry)
    d_rows = _live_rows(d_rows, rows.shape[0], group_sizes)
    return d_rows, d_weights.astype(weights.dtype), None


_grouped_matmul.defvjp(_forward, _backward)


def _blocks(
    block: int, rows: int, group_sizes: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """The number of blocks in use; per block its group, its first row, and its group's end."""
    ends = jnp.cumsum(group_sizes)
    counts = -(-group_sizes // block)
    last = jnp.cumsum(counts)
    index = jnp.arange(rows // block + group_sizes.shape[0], dtype=jnp.int32)
    group = jnp.searchsorted(last, index, side="right").astype(jnp.int32)
    group = jnp.minimum(group, group_sizes.shape[0] - 1)
    offset = (index - (last - counts)[group]) * block
    return last[-1], group, (ends - group_sizes)[group] + offset, ends[group]


def _pad(x: jax.Array, block: int) -> jax.Array:
    """Room behind the last row for a block that begins there."""
    return jnp.pad(x, ((0, block), (0, 0)))


def _rows_at(x: jax.Array, first: jax.Array, block: int) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(x, first, block)


def _write(out: jax.Array, product: jax.Array, first: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_slice_in_dim(out, product.astype(out.dtype), first, 0)


def _live_rows(out: jax.Array, rows: int, group_sizes: jax.Array) -> jax.Array:
    """The first `rows` rows, zero past the last group."""
    return jnp.where((jnp.arange(rows) < group_sizes.sum())[:, None], out[:rows], 0)


def _accumulator(dtype: jnp.dtype) -> jnp.dtype:
    return jnp.promote_types(dtype, jnp.float32)


def _dot(a: jax.Array, b: jax.Array, contract: tuple[tuple[int], tuple[int]]) -> jax.Array:
    """A product over one axis of each side, accumulated in at least float32."""
    wide = _accumulator(a.dtype)
    precision = None if a.dtype.itemsize < 4 else jax.lax.Precision.HIGHEST
    return jax.lax.dot_general(
        a, b, (contract, ((), ())), precision=precision, preferred_element_type=wide
    )


def _zeros(shape: tuple[int, ...], dtype: jnp.dtype, like: jax.Array) -> jax.Array:
    """Zeros that vary over the manual mesh axes that `like` varies over, as a loop's carry must."""
    return vary_together((jnp.zeros(shape, dtype), like))[0]
