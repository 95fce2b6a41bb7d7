"""What blocks tell each other: a row of numbers per channel each, in a table in shared memory.

A table is a plain float32 buffer `[5, n]`: rows 1 to 4 are the blocks', row 0 is what a warp reads
where there is no such block. Between writing and reading lies a barrier of the warpgroup.
"""

import jax.experimental.pallas.mosaic_gpu as plgpu
from jax.experimental.mosaic.gpu import fragmented_array as fa
from jax.experimental.mosaic.gpu import utils as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from .registers import (
    by_warp_index,
    constant,
    equal,
    lane_id,
    less,
    paired,
    parts_of,
    registers_of,
    shaped_like,
    warp_id,
    word,
)
from .tiles import COL, F32, TILE, load

# A table of what blocks tell each other: rows 1 to 4 are the blocks', row 0 is neutral.
END_ROWS = 5


def _column_offsets(ref, row):
    """Pointer to the first columns of this lane in a row of a plain f32 `[m, n]` buffer."""
    strides, _ = ir.MemRefType(ref.type).get_strides_and_offset()
    column = arith.muli(arith.andi(lane_id(), word(3)), word(2))
    offset = arith.addi(arith.muli(row, word(strides[0])), column)
    return mgpu.getelementptr(mgpu.memref_ptr(ref), [offset], ir.F32Type.get())


def store_decays(x, ref) -> None:
    """2^ of the last row of every block of a TILE, the decay of the block where x is the running
    sum of log decays, to rows 1 to 4 of a table (plain, f32)."""

    @plgpu.inline_mgpu(arg_types=(TILE, plgpu.RefType()))
    def body(ctx, x, ref):
        f32 = ir.F32Type.get()
        pointer = _column_offsets(ref, arith.addi(warp_id(), word(1)))

        def power(v):
            return llvm.inline_asm(
                f32, [v], "ex2.approx.ftz.f32 $0, $1;", "=f,f", has_side_effects=False
            )

        values = [paired(*map(power, parts_of(high))) for _, high in registers_of(x)]
        with mgpu.when(arith.cmpi(arith.CmpIPredicate.uge, lane_id(), word(28))):
            for j, value in enumerate(values):
                llvm.store(value, mgpu.getelementptr(pointer, [word(8 * j)], f32))

    body(x, ref)


def store_firsts(x, ref) -> None:
    """The first row of every block of a TILE to rows 1 to 4 of a table."""

    @plgpu.inline_mgpu(arg_types=(TILE, plgpu.RefType()))
    def body(ctx, x, ref):
        f32 = ir.F32Type.get()
        pointer = _column_offsets(ref, arith.addi(warp_id(), word(1)))
        with mgpu.when(less(lane_id(), word(4))):
            for j, (low, _) in enumerate(registers_of(x)):
                llvm.store(low, mgpu.getelementptr(pointer, [word(8 * j)], f32))

    body(x, ref)


def store_lasts(x, ref) -> None:
    """The last row of every block of a TILE to rows 1 to 4 of a table."""

    @plgpu.inline_mgpu(arg_types=(TILE, plgpu.RefType()))
    def body(ctx, x, ref):
        f32 = ir.F32Type.get()
        pointer = _column_offsets(ref, arith.addi(warp_id(), word(1)))
        with mgpu.when(arith.cmpi(arith.CmpIPredicate.uge, lane_id(), word(28))):
            for j, (_, high) in enumerate(registers_of(x)):
                llvm.store(high, mgpu.getelementptr(pointer, [word(8 * j)], f32))

    body(x, ref)


def store_column_sums(x, ref) -> None:
    """Sums down the rows of every block of a TILE `[64, 32]` to rows 1 to 4 of a table.

    The eight lanes of a column pair hold eight values each: three times a lane keeps half of them,
    and adds what another lane has of those. So lane 4 r + c ends with the r-th."""

    @plgpu.inline_mgpu(arg_types=(TILE, plgpu.RefType()))
    def body(ctx, x, ref):
        f32 = ir.F32Type.get()
        row = arith.shrui(lane_id(), word(2))
        values = []
        for low, high in registers_of(x):
            values += [arith.addf(*v) for v in zip(parts_of(low), parts_of(high), strict=True)]
        for bit in (4, 2, 1):
            upper = equal(arith.andi(row, word(bit)), word(bit))
            halves = list(zip(values[: len(values) // 2], values[len(values) // 2 :], strict=True))
            sent = [mgpu.shfl_bfly(arith.select(upper, a, b), 4 * bit) for a, b in halves]
            kept = [arith.select(upper, b, a) for a, b in halves]
            values = [arith.addf(k, s) for k, s in zip(kept, sent, strict=True)]
        (total,) = values
        # The r-th value is of columns 8 (r / 2) + 2 c + r % 2.
        odd = arith.andi(row, word(1))
        column = arith.addi(arith.muli(arith.subi(row, odd), word(4)), odd)
        column = arith.addi(column, arith.muli(arith.andi(lane_id(), word(3)), word(2)))
        strides, _ = ir.MemRefType(ref.type).get_strides_and_offset()
        at = arith.addi(arith.muli(arith.addi(warp_id(), word(1)), word(strides[0])), column)
        llvm.store(total, mgpu.getelementptr(mgpu.memref_ptr(ref), [at], f32))

    body(x, ref)


def store_totals(tables, ref) -> None:
    """The sums of rows 1 to 4 of two tables of 32 columns to a plain f32 `[2, 32]`."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType()))
    def body(ctx, tables, ref):
        f32 = ir.F32Type.get()
        (table, row, _), _ = ir.MemRefType(tables.type).get_strides_and_offset()
        (line, _), _ = ir.MemRefType(ref.type).get_strides_and_offset()
        with mgpu.when(less(warp_id(), word(2))):
            start = arith.addi(arith.muli(warp_id(), word(table)), lane_id())
            values = []
            for i in range(1, END_ROWS):
                offset = arith.addi(start, word(i * row))
                pointer = mgpu.getelementptr(mgpu.memref_ptr(tables), [offset], f32)
                values.append(llvm.load(f32, pointer))
            total = arith.addf(arith.addf(values[0], values[1]), arith.addf(values[2], values[3]))
            at = arith.addi(arith.muli(warp_id(), word(line)), lane_id())
            llvm.store(total, mgpu.getelementptr(mgpu.memref_ptr(ref), [at], f32))

    body(tables, ref)


def load_row(ref, table: tuple[int, int, int, int], n: int):
    """COL: row `table[w]` of a table in warp w."""

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(),), return_type=plgpu.ShapeDtypeStruct((n,), F32, layout=COL)
    )
    def body(ctx, ref):
        f32 = ir.F32Type.get()
        pointer = _column_offsets(ref, by_warp_index(table))
        pair = ir.VectorType.get((2,), f32)
        out = [
            llvm.load(pair, mgpu.getelementptr(pointer, [word(8 * j)], f32)) for j in range(n // 8)
        ]
        like = fa.FragmentedArray.splat(constant(0.0), (n,), layout=COL.to_mgpu())
        return shaped_like(like, out)

    return body(ref)


def total(ref):
    """COL: the sum of rows 1 to 4 of a table."""
    out = load(ref.at[1], COL)
    for i in (2, 3, 4):
        out = out + load(ref.at[i], COL)
    return out


def store_first_warp(x, ref) -> None:
    """A COL as warp 0 has it to a plain f32 `[n]`."""

    @plgpu.inline_mgpu(arg_types=(COL, plgpu.RefType()))
    def body(ctx, x, ref):
        f32 = ir.F32Type.get()
        column = arith.muli(arith.andi(lane_id(), word(3)), word(2))
        pointer = mgpu.getelementptr(mgpu.memref_ptr(ref), [column], f32)
        first = arith.andi(equal(warp_id(), word(0)), less(lane_id(), word(4)))
        with mgpu.when(first):
            for j, value in enumerate(x.registers.flat):
                llvm.store(value, mgpu.getelementptr(pointer, [word(8 * j)], f32))

    body(x, ref)
