"""Registers and lanes: the words of MLIR in which tiles, blocks and exchange are written.

All of these work inside `plgpu.inline_mgpu`, on values of one thread.
"""

import numpy as np
from jax.experimental.mosaic.gpu import fragmented_array as fa
from jax.experimental.mosaic.gpu import utils as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, nvvm, vector

# Lets the compiler contract a product and a sum into one instruction.
FMA = arith.FastMathFlags.contract


def word(x: int):
    return mgpu.c(x, ir.IntegerType.get_signless(32))


def constant(x: float):
    return mgpu.c(x, ir.F32Type.get())


def lane_id():
    return arith.andi(mgpu.thread_idx(), word(31))


def warp_id():
    return arith.andi(arith.shrui(mgpu.thread_idx(), word(5)), word(3))


def less(a, b):
    return arith.cmpi(arith.CmpIPredicate.ult, a, b)


def equal(a, b):
    return arith.cmpi(arith.CmpIPredicate.eq, a, b)


def parts_of(x):
    """The two elements of a register pair."""

    def position(i):
        return ir.DenseI64ArrayAttr.get([i])

    return [vector.extract(x, dynamic_position=[], static_position=position(i)) for i in (0, 1)]


def paired(a, b):
    out = llvm.mlir_undef(ir.VectorType.get((2,), a.type))
    out = llvm.insertelement(out, a, position=word(0))
    return llvm.insertelement(out, b, position=word(1))


def as_bits(x):
    """A pair of 16-bit elements as an i32."""
    return mgpu.bitcast(x, ir.IntegerType.get_signless(32))


def as_f16(a, b):
    """Two f32 as an i32 of f16."""
    i32 = ir.IntegerType.get_signless(32)
    return llvm.inline_asm(
        i32, [a, b], "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", has_side_effects=False
    )


def shuffle(x, lane, up: bool = False):
    """x of `lane`, or with `up` of the lane that many below; an i32 or an f32."""
    i32 = ir.IntegerType.get_signless(32)
    bits = x if x.type == i32 else mgpu.bitcast(x, i32)
    kind, clamp = (nvvm.ShflKind.up, 0) if up else (nvvm.ShflKind.idx, 31)
    out = nvvm.shfl_sync(word(-1), bits, lane, word(clamp), kind)
    return out if x.type == i32 else mgpu.bitcast(out, x.type)


def shuffle_down(x, distance: int):
    out = nvvm.shfl_sync(
        word(-1),
        mgpu.bitcast(x, ir.IntegerType.get_signless(32)),
        word(distance),
        word(31),
        nvvm.ShflKind.down,
    )
    return mgpu.bitcast(out, x.type)


def registers_of(x):
    """Registers of a tile: [group of 8 columns, row r or r + 8]."""
    return x.registers.reshape(-1, 2)


def shaped_like(x, registers, layout=None):
    registers = np.asarray(registers, dtype=object).reshape(x.registers.shape)
    return fa.FragmentedArray(_registers=registers, _layout=x.layout, _is_signed=x.is_signed)


def mma(acc, a, b, kind: str):
    """m16n8k16: acc is four f32, a four and b two i32 of bf16 or f16 pairs."""
    f32 = ir.F32Type.get()
    out = llvm.inline_asm(
        llvm.StructType.get_literal([f32] * 4),
        [*a, *b, *acc],
        f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 "
        "{$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};",
        "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f",
        has_side_effects=False,
    )
    return [llvm.extractvalue(f32, out, [i]) for i in range(4)]


def transposed(x):
    """An 8 x 8 matrix of 16-bit elements, one i32 a lane, transposed within the warp."""
    i32 = ir.IntegerType.get_signless(32)
    return llvm.inline_asm(
        i32, [x], "movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;", "=r,r", has_side_effects=False
    )


def by_warp_index(table):
    """table[w] in warp w, as an i32."""
    packed = sum(x << (4 * w) for w, x in enumerate(table))
    return arith.andi(arith.shrui(word(packed), arith.muli(warp_id(), word(4))), word(15))


def swizzled_at(row, piece, row_bytes: int):
    """Offset in bytes of a piece of 16 bytes."""
    turn = row if row_bytes == 128 else arith.shrui(row, word(1))
    place = arith.xori(piece, arith.andi(turn, word(row_bytes // 16 - 1)))
    return arith.addi(arith.muli(row, word(row_bytes)), arith.muli(place, word(16)))


def address(ref):
    return llvm.ptrtoint(ir.IntegerType.get_signless(32), mgpu.memref_ptr(ref))
