"""(I + L)^-1 for strictly lower triangular L, by blocks.

The 8 x 8 blocks of the diagonal are inverted by elimination in float32 on the vector unit; blocks
of 8, 16 and 32 are then merged on the matrix unit:

    [[A, 0], [L21, B]]^-1 = [[A^-1, 0], [-B^-1 L21 A^-1, B^-1]]

Every intermediate is a block of an inverse, which the delta rule keeps small: a long Neumann
product of correlated keys, whose powers of L grow without bound, loses every digit. Inverted blocks
of size s stay *compact*, `[n, s, 128]`: all blocks of a pair side by side, each in the lanes of its
own columns, so that no step moves a value between lanes.
"""

import functools

import jax
import jax.numpy as jnp

from .tiles import CHUNK, NN, PAIR, Parts, above, apart, beside, dot, folded, iota, split


def inverse(L: jax.Array, operand: jnp.dtype) -> jax.Array:
    """(I + L)^-1 of pairs `[n, C, 128]` in float32; the merges multiply in dtype `operand`."""
    n = L.shape[0]
    A = _eliminate(_compact(L, 8, 0, 8))
    for size in (8, 16, 32):
        lane = iota((n, size, PAIR), 2)
        left = lane // size % 2 == 0
        below = jnp.where(left, _compact(L, 2 * size, size, size), 0.0)
        row, column = iota((PAIR, PAIR), 0), iota((PAIR, PAIR), 1)
        factor = A.astype(operand)
        own = row // size == column // size
        product = _side_by_side(below.astype(operand), _expand(factor, own)).astype(operand)
        crossing = row // (2 * size) == column // (2 * size)
        crossing &= (row // size % 2 == 1) & (column // size % 2 == 0)
        merged = _side_by_side(factor, _expand(product, crossing))
        A = above(jnp.where(left, A, 0.0), jnp.where(left, -merged, A))
    return A


def refined(L: jax.Array, A: jax.Array) -> Parts:
    """A better (I + L)^-1 from A, an approximation, in two parts, by one step of Newton's: with the
    residual R = I - (I + L) A of what A is in bfloat16, A + A R."""
    high = A.astype(jnp.bfloat16)
    identity = iota(L.shape[1:], 0) == iota(L.shape[1:], 1) % CHUNK
    rows = above(*split(jnp.where(identity, 1.0, L), "bfloat16"))
    R = jnp.where(identity, 1.0, 0.0) - folded(_diagonally(rows, apart(high)), CHUNK)
    low = _side_by_side(high, apart(R.astype(jnp.bfloat16)))
    return high, low.astype(jnp.bfloat16)


def _diagonally(rows: jax.Array, square: jax.Array) -> jax.Array:
    """`[n, r, 128] x [n, 128, 128]`, two at a time: rows beside each other against a diagonal of
    matrices, for rows so many that they cost more than the weights."""
    n, size, width = rows.shape
    if n % 2:
        return dot(rows, square, NN)
    rows = rows.reshape(n // 2, 2, size, width)
    square = square.reshape(n // 2, 2, width, width)
    zero = jnp.zeros_like(square[:, 0])
    weights = above(beside(square[:, 0], zero), beside(zero, square[:, 1]))
    both = dot(beside(rows[:, 0], rows[:, 1]), weights, NN)
    return jnp.stack([both[..., :width], both[..., width:]], axis=1).reshape(n, size, width)


def _side_by_side(rows: jax.Array, square: jax.Array) -> jax.Array:
    """`[n, s, 128] x [n, 128, 128]`, two at a time: rows above each other against matrices beside
    each other. What the rows of one make of the other is thrown away, and comes at no cost, while
    the matrix unit loads half as many weights, which is what it spends its time on here."""
    n, size, width = rows.shape
    if n % 2:
        return dot(rows, square, NN)
    rows = rows.reshape(n // 2, 2 * size, width)
    square = square.reshape(n // 2, 2, width, width)
    both = dot(rows, beside(square[:, 0], square[:, 1]), NN)
    own = (both[:, :size, :width], both[:, size:, width:])
    return jnp.stack(own, axis=1).reshape(n, size, width)


def _compact(L: jax.Array, stride: int, first: int, rows: int) -> jax.Array:
    """`[n, rows, 128]`: for lanes of columns b * stride ... of a head, the rows of L from
    b * stride + first on."""
    lane = iota((L.shape[0], rows, PAIR), 2) % CHUNK // stride

    def take(block: jax.Array, b: int) -> jax.Array:
        start = b * stride + first
        return jnp.where(lane == b, L[:, start : start + rows], block)

    return functools.reduce(take, range(1, CHUNK // stride), L[:, first : first + rows])


def _expand(compact: jax.Array, keep: jax.Array) -> jax.Array:
    """Compact blocks `[n, s, 128]` as a square `[n, 128, 128]`, zero outside of `keep`."""
    square = jnp.concatenate([compact] * (PAIR // compact.shape[1]), axis=1)
    return jnp.where(keep, square, jnp.zeros_like(square))


def _eliminate(L: jax.Array) -> jax.Array:
    """(I + L)^-1 of compact 8 x 8 blocks `[n, 8, 128]`, column by column in float32."""
    n = L.shape[0]
    lane = iota((n, 8, PAIR), 2)
    A = jnp.where(lane % 8 == iota((n, 8, PAIR), 1), 1.0, 0.0).astype(jnp.float32)
    flat = L.reshape(n * 8, PAIR)
    block = iota(flat.shape, 1) // 8 * 8
    for j in range(7):
        column = jnp.take_along_axis(flat, block + j, axis=1).reshape(n, 8, PAIR)
        A = A - column * A[:, j : j + 1]
    return A
