"""Blocks of 16 rows, each the affair of one warp: sums down the rows, products of its pairs. Tiles
are `[64, n]`, and what is said of a block is done for all four.
"""

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic.gpu import fragmented_array as fa
from jax.experimental.mosaic.gpu import utils as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from .registers import (
    FMA,
    address,
    as_bits,
    by_warp_index,
    constant,
    equal,
    lane_id,
    less,
    mma,
    paired,
    parts_of,
    registers_of,
    shaped_like,
    shuffle,
    shuffle_down,
    swizzled_at,
    transposed,
    warp_id,
    word,
)
from .tiles import BLOCK, CHUNK, COL, F32, ROW, TILE, buffer, exp2


def cumsum(x):
    """`[64, n]` f32: sums down the rows of every block, each row's own included. Row i depends on
    no later row."""

    @plgpu.inline_mgpu(
        arg_types=(TILE,), return_type=plgpu.ShapeDtypeStruct(x.shape, F32, layout=TILE)
    )
    def body(ctx, x):
        lane = lane_id()
        one, zero = constant(1.0), constant(0.0)
        steps = [(d, arith.select(less(lane, word(d)), zero, one)) for d in (4, 8, 16)]
        last = arith.ori(lane, word(28))
        out = []
        for low, high in registers_of(x):
            sums = []
            for half in (low, high):
                values = parts_of(half)
                for distance, keep in steps:
                    up = [shuffle(v, word(distance), up=True) for v in values]
                    values = [
                        arith.addf(v, arith.mulf(u, keep, fastmath=FMA), fastmath=FMA)
                        for v, u in zip(values, up, strict=True)
                    ]
                sums.append(values)
            total = [shuffle(v, last) for v in sums[0]]
            sums[1] = [arith.addf(v, t) for v, t in zip(sums[1], total, strict=True)]
            out += [paired(*sums[0]), paired(*sums[1])]
        return shaped_like(x, out)

    return body(x)


def moved_down(x):
    """`[64, n]` f32: at every row the one before it, at the first of a block 0."""

    @plgpu.inline_mgpu(
        arg_types=(TILE,), return_type=plgpu.ShapeDtypeStruct(x.shape, F32, layout=TILE)
    )
    def body(ctx, x):
        first, zero = less(lane_id(), word(4)), constant(0.0)
        before = arith.andi(arith.subi(lane_id(), word(4)), word(31))
        out = []
        for pair in registers_of(x):
            low, high = ([shuffle(v, before) for v in parts_of(half)] for half in pair)
            out.append(paired(*(arith.select(first, zero, v) for v in low)))
            out.append(paired(*(arith.select(first, a, b) for a, b in zip(low, high, strict=True))))
        return shaped_like(x, out)

    return body(x)


def suffix_sum(x):
    """`[64, n]` f32: sums up the rows of every block, each row's own included."""

    @plgpu.inline_mgpu(
        arg_types=(TILE,), return_type=plgpu.ShapeDtypeStruct(x.shape, F32, layout=TILE)
    )
    def body(ctx, x):
        lane = lane_id()
        one, zero = constant(1.0), constant(0.0)
        steps = [(d, arith.select(less(lane, word(32 - d)), one, zero)) for d in (4, 8, 16)]
        first = arith.andi(lane, word(3))
        out = []
        for low, high in registers_of(x):
            sums = []
            for half in (low, high):
                values = parts_of(half)
                for distance, keep in steps:
                    values = [
                        arith.addf(
                            v,
                            arith.mulf(shuffle_down(v, distance), keep, fastmath=FMA),
                            fastmath=FMA,
                        )
                        for v in values
                    ]
                sums.append(values)
            total = [shuffle(v, first) for v in sums[1]]
            sums[0] = [arith.addf(v, t) for v, t in zip(sums[0], total, strict=True)]
            out += [paired(*sums[0]), paired(*sums[1])]
        return shaped_like(x, out)

    return body(x)


def halfway(x, level):
    """`[64, n]` f32: at every row the one that ends the first half of its sub-block of
    2^(level + 1) rows; level in {0, 1, 2, 3}, static or not."""
    splat = plgpu.Layout.WG_SPLAT(())

    @plgpu.inline_mgpu(
        arg_types=(TILE, splat), return_type=plgpu.ShapeDtypeStruct(x.shape, F32, layout=TILE)
    )
    def body(ctx, x, level):
        level = level.registers.flat[0]
        # Row r of 8 is lane 4 r + c: clear the sub-block's bits and set its row 2^level - 1.
        size = arith.shli(word(1), level)
        inside = arith.andi(arith.subi(arith.shli(size, word(3)), word(4)), word(28))
        row = arith.shli(arith.subi(size, word(1)), word(2))
        source = arith.ori(arith.andi(lane_id(), arith.xori(inside, word(31))), row)
        top = equal(level, word(3))
        out = []
        for low, high in registers_of(x):
            high = arith.select(top, low, high)
            out += [paired(*(shuffle(v, source) for v in parts_of(half))) for half in (low, high)]
        return shaped_like(x, out)

    return body(x, jnp.int32(level))


def to_middle(within, level):
    """The decay between each token and the middle of its sub-block of 2^(level + 1) tokens, where
    `within` is the running sum of log decays."""
    return exp2(-jnp.abs(within - halfway(within, level)))


def of_level(near, level):
    """Of the pairs of every block `[64, 16]` bf16 those that join two halves of 2^level tokens."""
    r = jnp.bitwise_and(plgpu.broadcasted_iota(jnp.int32, near.shape, 0, layout=TILE), 15)
    apart = jnp.bitwise_xor(r, plgpu.broadcasted_iota(jnp.int32, near.shape, 1, layout=TILE))
    joins = lax.shift_right_logical(apart, level) == 1
    return jnp.where(joins, near.astype(F32), 0.0).astype(near.dtype)


def last_row(x):
    """COL, each warp its own: the last row of its block of a TILE."""
    n = x.shape[1]

    @plgpu.inline_mgpu(arg_types=(TILE,), return_type=plgpu.ShapeDtypeStruct((n,), F32, layout=COL))
    def body(ctx, x):
        last = arith.ori(lane_id(), word(28))
        out = [paired(*(shuffle(v, last) for v in parts_of(high))) for _, high in registers_of(x)]
        like = fa.FragmentedArray.splat(constant(0.0), (n,), layout=COL.to_mgpu())
        return shaped_like(like, out)

    return body(x)


def pairs(acc, a, b, size: int = BLOCK):
    """acc `[64, 16]` f32 plus a b^T of every block; a, b `[64, n]` bf16, n a multiple of 16.

    With size 8 or 4 only pairs of a row in the second and a column in the first half of one
    sub-block of 2 size tokens are added."""

    @plgpu.inline_mgpu(
        arg_types=(TILE, TILE, TILE),
        return_type=plgpu.ShapeDtypeStruct((CHUNK, BLOCK), F32, layout=TILE),
    )
    def body(ctx, acc, a, b):
        a, b = (np.vectorize(as_bits, otypes=[object])(registers_of(x)) for x in (a, b))
        sums = [[*parts_of(low), *parts_of(high)] for low, high in registers_of(acc)]
        none = word(0)
        if size == 4:
            second = arith.cmpi(arith.CmpIPredicate.uge, lane_id(), word(16))

            def pick(keep, x):
                return arith.select(second, *((x, none) if keep else (none, x)))

            a, b = (np.vectorize(lambda x, k=k: pick(k, x), otypes=[object])(x)
                    for k, x in ((True, a), (False, b)))  # fmt: skip
        for k in range(0, len(a), 2):
            low, high = (a[k, 0], a[k + 1, 0]), (a[k, 1], a[k + 1, 1])
            for n in (0, 1):
                if size == 8 and n == 1:
                    continue
                top = (none, none) if size == 8 or (size == 4 and n == 1) else low
                bottom = (none, none) if size == 4 and n == 0 else high
                left = (top[0], bottom[0], top[1], bottom[1])
                sums[n] = mma(sums[n], left, (b[k, n], b[k + 1, n]), "bf16")
        return shaped_like(acc, [paired(*half) for s in sums for half in (s[:2], s[2:])])

    return body(acc, a, b)


def times(acc, a, x, transpose: bool):
    """acc `[64, n]` f32 plus, of every block, a x or with `transpose` a^T x.

    a `[64, 16]` bf16, x `[64, n]` bf16: the rows of a block's x are contracted."""

    @plgpu.inline_mgpu(
        arg_types=(TILE, TILE, TILE),
        return_type=plgpu.ShapeDtypeStruct(acc.shape, F32, layout=TILE),
    )
    def body(ctx, acc, a, x):
        a, x = (np.vectorize(as_bits, otypes=[object])(registers_of(y)) for y in (a, x))
        if transpose:
            # Of the 2 x 2 blocks of 8, each transposed and the off-diagonal ones exchanged.
            left = (a[0, 0], a[0, 1], a[1, 0], a[1, 1])
            left = tuple(transposed(left[i]) for i in (0, 2, 1, 3))
        else:
            left = (a[0, 0], a[0, 1], a[1, 0], a[1, 1])
        out = []
        for (low, high), (top, bottom) in zip(registers_of(acc), x, strict=True):
            right = (transposed(top), transposed(bottom))
            s = mma([*parts_of(low), *parts_of(high)], left, right, "bf16")
            out += [paired(*s[:2]), paired(*s[2:])]
        return shaped_like(acc, out)

    return body(acc, a, x)


def _matrices(base, row, piece, row_bytes: int, transpose: bool):
    """Four 8 x 8 matrices from a buffer of 64 rows, swizzled by `row_bytes`; row and piece (of 16
    bytes) of each lane's address. Lanes 8 m to 8 m + 7 point at the rows of matrix m."""
    i32 = ir.IntegerType.get_signless(32)
    out = llvm.inline_asm(
        llvm.StructType.get_literal([i32] * 4),
        [arith.addi(base, swizzled_at(row, piece, row_bytes))],
        f"ldmatrix.sync.aligned.m8n8.x4{'.trans' if transpose else ''}.shared.b16 "
        "{$0,$1,$2,$3}, [$4];",
        "=r,=r,=r,=r,r,~{memory}",
        has_side_effects=True,
    )
    return [llvm.extractvalue(i32, out, [i]) for i in range(4)]


def shared_pairs(accs, rows, x, block: int):
    """Of several tiles: each of accs `[64, 16]` f32 plus its rows `[64, n]` bf16 times the
    transpose of a block of x `[64, n]` bf16 in shared memory."""
    compact = plgpu.ShapeDtypeStruct((CHUNK, BLOCK), F32, layout=TILE)
    width = x.shape[1]

    @plgpu.inline_mgpu(
        arg_types=((TILE,) * len(accs), (TILE,) * len(rows), buffer(width)),
        return_type=(compact,) * len(accs),
    )
    def body(ctx, accs, rows, x):
        lane, base = lane_id(), address(x)
        matrix = arith.shrui(lane, word(3))
        half, across = arith.shrui(matrix, word(1)), arith.andi(matrix, word(1))
        at = arith.addi(arith.muli(half, word(8)), arith.andi(lane, word(7)))
        at = arith.addi(at, word(BLOCK * block))
        lefts = [np.vectorize(as_bits, otypes=[object])(registers_of(x)) for x in rows]
        sums = [[[*parts_of(a), *parts_of(b)] for a, b in registers_of(acc)] for acc in accs]
        for k in range(0, width // 8, 2):
            right = _matrices(base, at, arith.addi(across, word(k)), 2 * width, False)
            for left, s in zip(lefts, sums, strict=True):
                operand = (left[k, 0], left[k, 1], left[k + 1, 0], left[k + 1, 1])
                for n in (0, 1):
                    s[n] = mma(s[n], operand, right[2 * n : 2 * n + 2], "bf16")
        return tuple(
            shaped_like(acc, [paired(*part) for half in s for part in (half[:2], half[2:])])
            for acc, s in zip(accs, sums, strict=True)
        )

    return body(tuple(accs), tuple(rows), x)


def shared_times(acc, pairs, x, block, of, transpose: bool = False):
    """acc `[64, n]` f32 plus, in warp w, a product of blocks of 16 from shared memory.

    pairs `[64, 64]`, x `[64, n]`: bf16. block[w] = (i, j) names the block of `pairs`, rows i and
    columns j, or is None: nothing is added. of[w] names the block of x's rows that it, or with
    `transpose` its transpose, multiplies from the left."""
    keep = sum((b is not None) << w for w, b in enumerate(block))
    i, j = ([0 if b is None else b[n] for b in block] for n in (0, 1))
    width = acc.shape[1]

    @plgpu.inline_mgpu(
        arg_types=(TILE, buffer(64), buffer(width)),
        return_type=plgpu.ShapeDtypeStruct(acc.shape, F32, layout=TILE),
    )
    def body(ctx, acc, pairs, x):
        lane = lane_id()
        matrix, row = arith.shrui(lane, word(3)), arith.andi(lane, word(7))
        low, high = arith.andi(matrix, word(1)), arith.shrui(matrix, word(1))
        down, across = (high, low) if transpose else (low, high)

        def eight(n):
            return arith.muli(n, word(8))

        def sixteen(table):
            return arith.muli(by_warp_index(table), word(16))

        at = arith.addi(sixteen(i), arith.addi(eight(down), row))
        piece = arith.addi(arith.muli(by_warp_index(j), word(2)), across)
        left = _matrices(address(pairs), at, piece, 128, transpose)
        if keep != 15:
            bit = arith.andi(arith.shrui(word(keep), warp_id()), word(1))
            live = equal(bit, word(1))
            left = [arith.select(live, a, word(0)) for a in left]
        base = address(x)
        at = arith.addi(sixteen(of), arith.addi(eight(low), row))
        out = []
        tile = registers_of(acc)
        for n in range(0, len(tile), 2):
            right = _matrices(base, at, arith.addi(high, word(n)), 2 * width, True)
            for half in (0, 1):
                top, bottom = tile[n + half]
                operands = right[2 * half : 2 * half + 2]
                s = mma([*parts_of(top), *parts_of(bottom)], left, operands, "bf16")
                out += [paired(*s[:2]), paired(*s[2:])]
        return shaped_like(acc, out)

    return body(acc, pairs, x)


def own(x):
    """`[64, 64]` to `[64, 16]`: in every block of rows its own columns."""

    @plgpu.inline_mgpu(
        arg_types=(TILE,),
        return_type=plgpu.ShapeDtypeStruct((CHUNK, BLOCK), x.dtype, layout=TILE),
    )
    def body(ctx, x):
        tile, warp = registers_of(x), warp_id()
        out = []
        for n in (0, 1):
            for h in (0, 1):
                value = tile[6 + n, h]
                for w in (2, 1, 0):
                    here = equal(warp, word(w))
                    value = arith.select(here, tile[2 * w + n, h], value)
                out.append(value)
        like = fa.FragmentedArray.splat(
            mgpu.c(0.0, x.mlir_dtype), (CHUNK, BLOCK), layout=TILE.to_mgpu()
        )
        return shaped_like(like, out)

    return body(x)


def diagonal(x):
    """`[64, 16]` f32 to ROW: the diagonal of every block."""

    @plgpu.inline_mgpu(
        arg_types=(TILE,), return_type=plgpu.ShapeDtypeStruct((CHUNK,), F32, layout=ROW)
    )
    def body(ctx, x):
        lane = lane_id()
        row = arith.shrui(lane, word(2))
        odd = equal(arith.andi(row, word(1)), word(1))
        source = arith.ori(arith.andi(lane, word(28)), arith.shrui(row, word(1)))
        registers = registers_of(x)
        out = []
        for pair in (registers[0, 0], registers[1, 1]):
            even_value, odd_value = parts_of(pair)
            out.append(shuffle(arith.select(odd, odd_value, even_value), source))
        vectors = [vector.broadcast(ir.VectorType.get((1,), ir.F32Type.get()), v) for v in out]
        shape = fa.FragmentedArray.splat(constant(0.0), (CHUNK,), layout=ROW.to_mgpu())
        return shaped_like(shape, vectors)

    return body(x)
