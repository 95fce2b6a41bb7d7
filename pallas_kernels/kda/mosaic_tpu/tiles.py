"""Tiles of a chunk as the vector unit likes them: two heads side by side.

A head is a slice of lanes of `[T, H * K]`, which is what a projection writes, so nothing is
transposed on the way in or out. Two neighbouring heads of one chunk are a *pair*: their rows of
width W stand as `[C, 2W]`, and their C x C matrices, C = 64, as `[C, 128]`, which fills the 128
lanes of a register. All functions work on `[n, ...]`, n pairs at once: a product of one head waits
some 200 cycles for its result, and only other pairs can fill that time.
"""

import functools

import jax
import jax.numpy as jnp

CHUNK = 64
PAIR = 2 * CHUNK

# Arrays in the products' dtype that stand for their sum.
Parts = tuple[jax.Array, ...]

# Contracted axes of `dot` after the leading axis of pairs: rows x columns, rows x rows, ...
NN = (2, 1)
NT = (2, 2)
TN = (1, 1)


def dot(a: jax.Array, b: jax.Array, contract: tuple[int, int]) -> jax.Array:
    """Products `[n, ., .] x [n, ., .]` in float32: one pass of the matrix unit for bfloat16
    operands, full precision for float32 ones. The operands are cast by the caller, so that the
    interpreter multiplies what the chip does."""
    precision = None if a.dtype == jnp.bfloat16 else jax.lax.Precision.HIGHEST
    dimensions = (((contract[0],), (contract[1],)), ((0,), (0,)))
    return jax.lax.dot_general(
        a, b, dimensions, precision=precision, preferred_element_type=jnp.float32
    )


def split(x: jax.Array, operand: str) -> Parts:
    """float32 x as a sum of parts in the products' dtype: of two, which is all of it but 2^-17, in
    bfloat16."""
    if operand == "float32":
        return (x,)
    high = x.astype(jnp.bfloat16)
    return high, (x - high.astype(jnp.float32)).astype(jnp.bfloat16)


def folded(x: jax.Array, rows: int) -> jax.Array:
    """The sum of the blocks of `rows` rows that stand above each other in `[n, m * rows, .]`."""
    return functools.reduce(jnp.add, (x[:, i : i + rows] for i in range(0, x.shape[1], rows)))


def iota(shape: tuple[int, ...], axis: int) -> jax.Array:
    return jax.lax.broadcasted_iota(jnp.int32, shape, axis)


def cut(x: jax.Array, width: int, chunks: int) -> jax.Array:
    """`[chunks * C, heads * width]` to pairs `[chunks * heads / 2, C, 2 * width]`, chunk-major."""
    pairs = x.shape[-1] // (2 * width)
    return jnp.stack(
        [
            x[CHUNK * c : CHUNK * (c + 1), 2 * width * p : 2 * width * (p + 1)]
            for c in range(chunks)
            for p in range(pairs)
        ]
    )


def halves(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The two heads of pairs `[n, ., 2W]`."""
    width = x.shape[-1] // 2
    return x[..., :width], x[..., width:]


def beside(*parts: jax.Array) -> jax.Array:
    return jnp.concatenate(parts, axis=-1)


def above(*parts: jax.Array) -> jax.Array:
    return jnp.concatenate(parts, axis=-2)


def apart(x: jax.Array) -> jax.Array:
    """Pairs `[n, r, 2W]` as block diagonals `[n, 2r, 2W]`: one product then serves both heads."""
    a, b = halves(x)
    zero = jnp.zeros_like(a)
    return above(beside(a, zero), beside(zero, b))


def heads(x: jax.Array) -> jax.Array:
    """Pairs `[n, r, 2W]` as heads `[2n, r, W]`."""
    a, b = halves(x)
    return jnp.stack([a, b], axis=1).reshape(2 * x.shape[0], *a.shape[1:])


def pairs(x: jax.Array) -> jax.Array:
    """Back from `heads`."""
    x = x.reshape(x.shape[0] // 2, 2, *x.shape[1:])
    return beside(x[:, 0], x[:, 1])
