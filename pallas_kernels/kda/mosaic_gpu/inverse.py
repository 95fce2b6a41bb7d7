"""The inverse of a chunk's I + L: blocks of 16 by their warps, then two merges."""

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jaxlib.mlir.dialects import arith

from . import tiles
from .registers import (
    as_f16,
    constant,
    equal,
    lane_id,
    mma,
    paired,
    parts_of,
    registers_of,
    shaped_like,
    transposed,
    word,
)
from .tiles import BLOCK, CHUNK, F16, F32, TILE


def of_blocks(x):
    """`[64, 16]` f32, strictly lower triangular blocks D: (I + D)^-1 of every block.

    Doubling, exact as block substitution is: of the inverse X of the diagonal sub-blocks of s and
    the part D' of D between the halves of the sub-blocks of 2 s, X - X D' X is the inverse of
    those. Operands are float16 (the entries are of order one), sums float32."""

    @plgpu.inline_mgpu(
        arg_types=(TILE,), return_type=plgpu.ShapeDtypeStruct((CHUNK, BLOCK), F32, layout=TILE)
    )
    def body(ctx, x):
        lane = lane_id()
        row = arith.shrui(lane, word(2))
        column = arith.muli(arith.andi(lane, word(3)), word(2))
        one, zero = constant(1.0), constant(0.0)
        # Element (n, h, e): row `row` + 8 h, column `column` + 8 n + e.
        places = [(n, h, e) for n in (0, 1) for h in (0, 1) for e in (0, 1)]
        d = {}
        for n, h in ((n, h) for n in (0, 1) for h in (0, 1)):
            for e, value in enumerate(parts_of(registers_of(x)[n, h])):
                d[n, h, e] = value

        def at(n, h, e):
            r = arith.addi(row, word(8 * h))
            return r, arith.addi(column, word(8 * n + e))

        def between(level, n, h, e):
            """Whether a place joins two sub-blocks of 2^level that form one of twice that."""
            if n != h:
                return None if level == 3 else False
            if level == 3:
                return False
            differ = arith.shrui(arith.xori(*at(n, h, e)), word(level))
            return equal(differ, word(1))

        def masked(level):
            out = {}
            for p in places:
                inside = between(level, *p)
                if inside is None:
                    out[p] = d[p]
                elif inside is False:
                    out[p] = zero
                else:
                    out[p] = arith.select(inside, d[p], zero)
            return out

        def packed(v):
            return {(n, h): as_f16(v[n, h, 0], v[n, h, 1]) for n in (0, 1) for h in (0, 1)}

        def times(left, right):
            """left @ right of packed tiles."""
            turned = {key: transposed(value) for key, value in right.items()}
            a = (left[0, 0], left[0, 1], left[1, 0], left[1, 1])
            out = {}
            for n in (0, 1):
                s = mma([zero] * 4, a, (turned[n, 0], turned[n, 1]), "f16")
                for i, (h, e) in enumerate(((0, 0), (0, 1), (1, 0), (1, 1))):
                    out[n, h, e] = s[i]
            return out

        first = masked(0)
        inverse = {}
        for p in places:
            unit = zero if p[0] != p[1] else arith.select(equal(*at(*p)), one, zero)
            inverse[p] = arith.subf(unit, first[p])
        for level in (1, 2, 3):
            half = packed(inverse)
            change = times(half, packed(times(packed(masked(level)), half)))
            inverse = {p: arith.subf(inverse[p], change[p]) for p in places}
        out = [paired(inverse[n, h, 0], inverse[n, h, 1]) for n in (0, 1) for h in (0, 1)]
        return shaped_like(x, out)

    return body(x)


def product(a, b):
    """`[64, 16]` f32 each: a b of every block, with float16 operands."""

    @plgpu.inline_mgpu(
        arg_types=(TILE, TILE),
        return_type=plgpu.ShapeDtypeStruct((CHUNK, BLOCK), F32, layout=TILE),
    )
    def body(ctx, a, b):
        def half(x):
            return np.vectorize(lambda p: as_f16(*parts_of(p)), otypes=[object])(registers_of(x))

        left, right = half(a), half(b)
        left = (left[0, 0], left[0, 1], left[1, 0], left[1, 1])
        zero = constant(0.0)
        out = []
        for n in (0, 1):
            turned = (transposed(right[n, 0]), transposed(right[n, 1]))
            s = mma([zero] * 4, left, turned, "f16")
            out += [paired(*s[:2]), paired(*s[2:])]
        return shaped_like(a, out)

    return body(a, b)


def of_chunk(near, far, x16_s, x32_s, y32_s):
    """(I + L)^-1 `[64, 64]` f32, from L's diagonal blocks `near` and `far[i]`, the columns of
    block i in the rows of later blocks, all `[64, 16]`; other rows of `far` may hold anything.

    Blocks of 16 are inverted by their warps; then 16 to 32 and 32 to 64, by -X_2 L_21 X_1."""
    compact, wide = (CHUNK, BLOCK), (CHUNK, 2 * BLOCK)
    nothing = tiles.zeros(compact)
    X = of_blocks(near)
    x16_s[...] = X.astype(F16)
    plgpu.commit_smem()
    Y = tiles.product(
        compact,
        (tiles.by_warp(nothing, far[0], nothing, nothing).astype(F16), x16_s.at[pl.ds(0, BLOCK)]),
        (tiles.by_warp(nothing, nothing, nothing, far[2]).astype(F16), x16_s.at[pl.ds(32, BLOCK)]),
    )
    low = -product(X, Y)
    X = jnp.concatenate(
        [tiles.by_warp(X, low, X, low), tiles.by_warp(nothing, X, nothing, X)], axis=1
    )
    X16 = X.astype(F16)
    x32_s[...] = X16
    plgpu.commit_smem()
    below = jnp.concatenate(
        [tiles.by_warp(nothing, nothing, x, x) for x in (far[0], far[1])], axis=1
    )
    Y = tiles.product(wide, (below.astype(F16), x32_s.at[pl.ds(0, 32)]))
    y32_s[...] = Y.astype(F16)
    plgpu.commit_smem()
    Z = -tiles.product(wide, (X16, y32_s.at[pl.ds(32, 32)]))
    nothing = tiles.zeros(wide)
    return jnp.concatenate(
        [tiles.by_warp(X, X, Z, Z), tiles.by_warp(nothing, nothing, X, X)], axis=1
    )
