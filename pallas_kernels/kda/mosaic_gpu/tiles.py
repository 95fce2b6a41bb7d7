"""Tiles in registers and buffers in shared memory, in the layouts that all kernels here share.

A warpgroup holds a chunk as `[64, n]` in the layout of a wgmma accumulator: warp w owns rows 16 w
to 16 w + 15, a *block*, and of every block a thread owns rows r and r + 8 and columns 2 c, 2 c + 1
of each 8, where lane = 4 r + c. Everything within a block is therefore the affair of one warp
(`blocks`): shuffles and small products of registers, with no shared memory and no barrier. What
blocks tell each other goes through small tables (`exchange`).

Layouts: TILE `[64, n]`; ROW `[64]`, a value per token; COL `[n]`, a value per channel, which
every warp holds and which may differ from warp to warp where a function says so.
"""

import jax.experimental.pallas as pl
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
    as_bits,
    constant,
    equal,
    lane_id,
    paired,
    parts_of,
    registers_of,
    shaped_like,
    swizzled_at,
    warp_id,
    word,
)

F32, BF16, F16 = jnp.float32, jnp.bfloat16, jnp.float16
TILE = plgpu.Layout.WGMMA
ROW, COL = TILE.reduce(1), TILE.reduce(0)
CHUNK, BLOCK, WARPS = 64, 16, 4
LOG2E = 1.4426950408889634


def compiler_params() -> plgpu.CompilerParams:
    return plgpu.CompilerParams(
        lowering_semantics=plgpu.LoweringSemantics.Lane,
        approx_math=True,
        unsafe_no_auto_barriers=True,
    )


def transforms(width: int, swizzle: int):
    """How a wgmma operand lies in memory: tiles of 8 rows by `width` elements, swizzled."""
    tiling, turn = plgpu.TilingTransform, plgpu.SwizzleTransform
    return (tiling((8, width)), turn(swizzle))  # type: ignore[abstract]


def swizzled(shape: tuple[int, ...], dtype=BF16, swizzle: int = 128):
    """A shared-memory buffer that wgmma reads; `swizzle` in bytes along its last axis."""
    width = swizzle // jnp.dtype(dtype).itemsize
    return plgpu.SMEM(
        shape,
        dtype,
        transforms=transforms(width, swizzle),
    )


def by_token(shape: tuple[int, ...], *others):
    """A buffer of bf16 whose tiles, the last two axes, are copied from or to any token of an array.

    The kernel gets it as a tuple of aliases: as wgmma and loads see it, and as copies do, to whom
    the rows of a tile are one box (a copy through the first would have to start at a multiple of 8
    tokens), and then `others`, for whom it is only memory."""
    swizzle = 2 * shape[-1]
    plain = plgpu.SMEM(shape, BF16, transforms=transforms(shape[-1], swizzle)[1:])
    return plgpu.RefUnion(swizzled(shape, swizzle=swizzle), plain, *others)


def load(ref, layout=TILE):
    return plgpu.load(ref, layout=layout, optimized=False)


def cols(x, shape):
    """A value per channel to a tile."""
    return lax.broadcast_in_dim(x, shape, [1])


def rows(x, shape):
    """A value per token to a tile."""
    return lax.broadcast_in_dim(x, shape, [0])


def wide(x):
    """A TILE of bf16 in float32, by two instructions a pair where the compiler takes three."""

    @plgpu.inline_mgpu(
        arg_types=(TILE,), return_type=plgpu.ShapeDtypeStruct(x.shape, F32, layout=TILE)
    )
    def body(ctx, x):
        f32 = ir.F32Type.get()

        def pair(register):
            bits = as_bits(register)
            parts = arith.shli(bits, word(16)), arith.andi(bits, word(-(1 << 16)))
            return paired(*(mgpu.bitcast(part, f32) for part in parts))

        out = [pair(r) for r in x.registers.flat]
        like = fa.FragmentedArray.splat(constant(0.0), x.shape, layout=TILE.to_mgpu())
        return shaped_like(like, out)

    return body(x)


def zeros(shape, layout=TILE):
    return plgpu.layout_cast(jnp.zeros(shape, F32), layout)


def read(acc, in_flight: int = 0):
    """An accumulator once at most `in_flight` later products are unfinished. The barrier keeps
    arithmetic on it from moving above the wait."""
    return lax.optimization_barrier(plgpu.wgmma_accumulator_load(acc, wait_n=in_flight))


def product(shape, *pairs):
    """Sum of a @ b in float32, waited for."""

    def body(acc):
        for a, b in pairs:
            plgpu.wgmma(acc, a, b)
        return read(acc)

    return pl.run_scoped(body, plgpu.ACC(shape, F32))


def _special(x, instruction: str, layout):
    """One special-function instruction for every element."""

    @plgpu.inline_mgpu(
        arg_types=(layout,), return_type=plgpu.ShapeDtypeStruct(x.shape, F32, layout=layout)
    )
    def body(ctx, x):
        f32 = ir.F32Type.get()

        def one(value):
            return llvm.inline_asm(
                f32, [value], f"{instruction} $0, $1;", "=f,f", has_side_effects=False
            )

        def register(r):
            n = ir.VectorType(r.type).shape[0]

            def position(i):
                return ir.DenseI64ArrayAttr.get([i])

            parts = [
                one(vector.extract(r, dynamic_position=[], static_position=position(i)))
                for i in range(n)
            ]
            return paired(*parts) if n == 2 else vector.broadcast(r.type, parts[0])

        return shaped_like(x, np.vectorize(register, otypes=[object])(x.registers))

    return body(x)


def exp2(x, layout=TILE):
    """2^x, with results below float32's normal numbers flushed to 0: the tests and scalings that
    would keep them are a twentieth of the instructions of `prepare`."""
    return _special(x, "ex2.approx.ftz.f32", layout)


def exp2_anew(x, sign: float, shift: float, table):
    """2^(sign x + shift) of a TILE, computed where it stands: a zero, row 0 of a table of sums, is
    read and added, so that ptxas cannot keep the result of an equal one, and the registers that it
    takes, for later."""

    @plgpu.inline_mgpu(
        arg_types=(TILE, plgpu.RefType()),
        return_type=plgpu.ShapeDtypeStruct(x.shape, F32, layout=TILE),
    )
    def body(ctx, x, table):
        f32 = ir.F32Type.get()
        address = llvm.ptrtoint(ir.IntegerType.get_signless(32), mgpu.memref_ptr(table))
        nought = llvm.inline_asm(
            f32, [address], "ld.volatile.shared.f32 $0, [$1];", "=f,r", has_side_effects=True
        )
        shifted = arith.addf(constant(shift), nought)

        def one(value):
            value = arith.addf(shifted, value) if sign > 0 else arith.subf(shifted, value)
            return llvm.inline_asm(
                f32, [value], "ex2.approx.ftz.f32 $0, $1;", "=f,f", has_side_effects=False
            )

        return shaped_like(x, [paired(*map(one, parts_of(r))) for r in x.registers.flat])

    return body(x, table)


def linear(x, factor, start):
    """A TILE times a number plus a COL, by one instruction an element."""

    @plgpu.inline_mgpu(
        arg_types=(TILE, plgpu.Layout.WG_SPLAT(()), COL),
        return_type=plgpu.ShapeDtypeStruct(x.shape, F32, layout=TILE),
    )
    def body(ctx, x, factor, start):
        factor = vector.broadcast(x.registers.flat[0].type, factor.registers.flat[0])

        def one(register, column):
            product = arith.mulf(register, factor, fastmath=FMA)
            return arith.addf(product, column, fastmath=FMA)

        columns = start.registers.flat
        out = [[one(r, s) for r in pair] for pair, s in zip(registers_of(x), columns, strict=True)]
        return shaped_like(x, out)

    return body(x, factor, start)


def reciprocal(x, layout=TILE):
    return _special(x, "rcp.approx.ftz.f32", layout)


def by_warp(*choices):
    """Of four arrays of one shape, TILEs or COLs, warp w gets the w-th."""
    layouts = TILE if choices[0].ndim == 2 else COL
    distinct = list({id(c): c for c in choices}.values())
    order = [next(i for i, d in enumerate(distinct) if d is c) for c in choices]
    shape, dtype = choices[0].shape, choices[0].dtype

    @plgpu.inline_mgpu(
        arg_types=(layouts,) * len(distinct),
        return_type=plgpu.ShapeDtypeStruct(shape, dtype, layout=layouts),
    )
    def body(ctx, *arrays):
        warp = warp_id()
        out = arrays[order[3]].registers
        for w in (2, 1, 0):
            if order[w] == order[w + 1] and all(o == order[3] for o in order[w:]):
                continue
            here = equal(warp, word(w))

            def pick(a, b, here=here):
                return arith.select(here, a, b)

            out = np.vectorize(pick, otypes=[object])(arrays[order[w]].registers, out)
        return shaped_like(arrays[0], out)

    return body(*distinct)


def warpgroup_barrier() -> None:
    """What any thread of the warpgroup stored to shared memory before it is seen after it."""

    @plgpu.inline_mgpu()
    def body(ctx):
        mgpu.warpgroup_barrier()

    body()


def leave_if(condition) -> None:
    """Ends the program, all of whose threads agree. A guard around what follows would have ptxas
    hold on to more in its registers."""

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WG_SPLAT(()),))
    def body(ctx, condition):
        llvm.inline_asm(
            ir.Type.parse("!llvm.void"),
            [condition.registers.flat[0]],
            "@$0 exit;",
            "b",
            has_side_effects=True,
        )

    body(condition)


def buffer(width: int):
    """A buffer `[64, width]` of bf16, swizzled by its rows."""
    return plgpu.RefType(transforms(width, 2 * width))


def _transposed_places(x, ref):
    """For each register of a TILE, the pointers to its two elements in an f32 buffer `[n, 64]` in
    global memory that holds it transposed."""
    f32 = ir.F32Type.get()
    (stride, _), _ = ir.MemRefType(ref.type).get_strides_and_offset()
    row = arith.addi(
        arith.muli(warp_id(), word(BLOCK)), arith.andi(arith.shrui(lane_id(), word(2)), word(7))
    )
    column = arith.muli(arith.andi(lane_id(), word(3)), word(2))
    start = arith.addi(arith.muli(column, word(stride)), row)
    pointer = mgpu.getelementptr(mgpu.memref_ptr(ref), [start], f32)
    for j, pair in enumerate(registers_of(x)):
        for half, register in enumerate(pair):
            offsets = [(8 * j + e) * stride + 8 * half for e in (0, 1)]
            yield register, [mgpu.getelementptr(pointer, [word(o)], f32) for o in offsets]


def load_transposed(ref):
    """`[64, n]` f32, a TILE, from an f32 buffer `[n, 64]` in global memory."""
    shape = ref.shape[::-1]

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(),), return_type=plgpu.ShapeDtypeStruct(shape, F32, layout=TILE)
    )
    def body(ctx, ref):
        f32 = ir.F32Type.get()
        like = fa.FragmentedArray.splat(constant(0.0), shape, layout=TILE.to_mgpu())
        out = [
            paired(*(llvm.load(f32, pointer) for pointer in pointers))
            for _, pointers in _transposed_places(like, ref)
        ]
        return shaped_like(like, out)

    return body(ref)


def store_transposed(x, ref) -> None:
    """A TILE `[64, n]` of f32 to an f32 buffer `[n, 64]` in global memory."""

    @plgpu.inline_mgpu(arg_types=(TILE, plgpu.RefType()))
    def body(ctx, x, ref):
        for register, pointers in _transposed_places(x, ref):
            for part, pointer in zip(parts_of(register), pointers, strict=True):
                llvm.store(part, pointer)

    body(x, ref)


def keep_columns(x, keeps):
    """x, a TILE of bf16, with zeros in columns whose `keeps`, a COL of int16, has no bit set."""

    @plgpu.inline_mgpu(
        arg_types=(TILE, COL), return_type=plgpu.ShapeDtypeStruct(x.shape, x.dtype, layout=TILE)
    )
    def body(ctx, x, keeps):
        def kept(register, mask):
            return mgpu.bitcast(arith.andi(as_bits(register), as_bits(mask)), register.type)

        masks = keeps.registers.flat
        out = [[kept(r, m) for r in pair] for pair, m in zip(registers_of(x), masks, strict=True)]
        return shaped_like(x, out)

    return body(x, keeps)


def copy_out(buffer, box, target, count=None) -> None:
    """Starts to copy a committed tile to a token array, only `count` rows of it if that is given;
    `box` is `buffer` as copies see it (`by_token`)."""
    if count is None:
        plgpu.copy_smem_to_gmem(box, target)
        return
    plgpu.copy_smem_to_gmem(box, target, count == CHUNK)

    @pl.when(count < CHUNK)
    def _():
        copy_rows(buffer, target, count)


def copy_rows(source, target, count) -> None:
    """The first `count` rows of a bf16 buffer `[64, n]`, n 32 or 64, to global memory.

    `target` is `[64, n]` and may reach beyond what this chunk owns. One warpgroup; the buffer was
    written before a barrier."""
    row_bytes = 2 * source.shape[1]
    pieces = row_bytes // 16

    @plgpu.inline_mgpu(
        arg_types=(buffer(source.shape[1]), plgpu.RefType(), plgpu.Layout.WG_SPLAT(()))
    )
    def body(ctx, source, target, count):
        count = count.registers.flat[0]
        strides, _ = ir.MemRefType(target.type).get_strides_and_offset()
        i8, i64 = (ir.IntegerType.get_signless(n) for n in (8, 64))
        words = ir.VectorType.get((4,), ir.IntegerType.get_signless(32))
        start, end = mgpu.memref_ptr(source), mgpu.memref_ptr(target)
        thread = arith.andi(mgpu.thread_idx(), word(127))
        piece = arith.andi(thread, word(pieces - 1))
        for first in range(0, CHUNK, 128 // pieces):
            row = arith.addi(arith.divui(thread, word(pieces)), word(first))
            inside = swizzled_at(row, piece, row_bytes)
            value = llvm.load(words, mgpu.getelementptr(start, [inside], i8))
            offset = arith.addi(
                arith.muli(arith.extui(i64, row), mgpu.c(2 * strides[0], i64)),
                arith.extui(i64, arith.muli(piece, word(16))),
            )
            pointer = llvm.getelementptr(
                end.type, end, [offset], [-(2**31)], i8, llvm.GEPNoWrapFlags.none
            )
            with mgpu.when(arith.cmpi(arith.CmpIPredicate.slt, row, count)):
                llvm.store(value, pointer)

    body(source, target, count)
