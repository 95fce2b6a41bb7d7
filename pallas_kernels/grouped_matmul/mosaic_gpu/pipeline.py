"""What both Hopper kernels share: a program per multiprocessor that works through tiles of the
output, one warpgroup that fetches and two that multiply, and how a tile leaves.

A program takes its first tile by its number and every further one from a counter in global memory,
since tiles differ: the contraction of a weight's gradient is as long as its group. The fetching
warpgroup draws the tile, tells the others through a ring of two, and goes on to fetch its operands
into a ring of stages while they still multiply the tile before. Each of the two owns 64 rows of
the output tile, reads its left operand and the common right one from shared memory, and stores its
rows on its own, so that one multiplies while the other stores.
"""

import dataclasses

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic.gpu import utils as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from ...kda.mosaic_gpu import tiles
from ...kda.mosaic_gpu.registers import address, word

ROWS = 64  # of an output tile, that a warpgroup owns
GROUPS = 2  # warpgroups that multiply
STEP = 64  # of the contraction, that a stage holds: 128 bytes, a row of the widest swizzle
PANEL = 64  # columns that leave in one copy
# Registers of a thread that computes, and of one that only fetches.
REGISTERS = (240, 24)
_SHARED = 227 * 1024


@dataclasses.dataclass(frozen=True)
class Tile:
    """columns: of an output tile, at most 256. stages: steps of operands that are in flight.
    panels: those that a warpgroup holds on their way out."""

    columns: int
    stages: int
    panels: int

    @property
    def shape(self) -> tuple[int, int]:
        return GROUPS * ROWS, self.columns


def tile_of(columns: int) -> Tile:
    """The tile of an output so wide: as many stages as fit beside two panels a warpgroup."""
    columns = min(columns, 256)
    panels = min(columns // PANEL, 2)
    left = _SHARED - 1024 - GROUPS * ROWS * 2 * PANEL * panels
    return Tile(columns, min(left // (2 * STEP * (GROUPS * ROWS + columns)), 6), panels)


def cores() -> int:
    """Multiprocessors of the device that the current call is compiled for."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is not None and getattr(device, "num_cores", None):
        return device.num_cores
    return getattr(jax.local_devices()[0], "core_count", None) or 132


def kernel(tile: Tile, fetch, multiply, count, *, scratch, out_type, name: str):
    """The kernel of a body in three parts, each a function of the references that the kernel has.

    Args:
      count: `(refs) -> int`, the number of tiles.
      fetch: `(refs, tile index) -> (steps, copy)`: how many steps the tile takes, and
        `copy(step, slot, barrier)`, which makes two copies into a slot of the ring.
      multiply: `(refs, tile index, group) -> (steps, prepare, operands, rows, target)`:
        `prepare(step, slot)` is called before and `operands(slot)` gives the operands of a step's
        product; of this warpgroup's 64 rows `rows` are stored, and panel p in `target(p)`.
      scratch: buffers of the ring, one slot a stage, and whatever `prepare` needs.
    """

    def body(*given):
        *refs, (panels_s, boxes_s), drawn_s, full, empty, told, heard, done = given
        group = lax.axis_index("group")
        program = lax.axis_index("program")
        counter = pl.get_global(plgpu.SemaphoreType.REGULAR)
        programs = lax.axis_size("program")
        total = count(refs)
        # What both loops carry: a tile, its number among the program's, and the steps before it.
        begin = (program, jnp.int32(0), jnp.int32(0))

        def more(carry):
            return carry[0] < total

        def producer():
            plgpu.set_max_registers(REGISTERS[1], action="decrease")

            def one(carry):
                index, number, position = carry
                steps, copy = fetch(refs, index)

                def step(i, position):
                    slot = lax.rem(position, tile.stages)

                    @pl.when(position >= tile.stages)
                    def _():
                        plgpu.barrier_wait(empty.at[slot])

                    copy(i, slot, full.at[slot])
                    return position + 1

                position = lax.fori_loop(0, steps, step, position)
                slot = lax.rem(number, 2)

                @pl.when(number >= 2)
                def _():
                    plgpu.barrier_wait(heard.at[slot])

                draw(counter, drawn_s, slot)
                plgpu.barrier_arrive(told.at[slot])
                return drawn_s[slot] + programs, number + 1, position

            lax.while_loop(more, one, begin)

        def consumer():
            plgpu.set_max_registers(REGISTERS[0], action="increase")

            def one(carry):
                index, number, position = carry
                steps, prepare, operands, rows, target = multiply(refs, index, group)

                def compute():
                    acc = pl.run_scoped(
                        lambda acc: products(acc, steps, position, prepare, operands),
                        plgpu.ACC((ROWS, tile.columns), jnp.float32),
                    )
                    store(acc, panels_s.at[group], boxes_s.at[group], rows, target)

                def idle():
                    """This warpgroup has no rows: the other one has the multipliers to itself."""

                    def step(i, position):
                        slot = lax.rem(position, tile.stages)
                        plgpu.barrier_wait(full.at[slot])
                        plgpu.barrier_arrive(empty.at[slot])
                        return position + 1

                    lax.fori_loop(0, steps, step, position)

                pl.when(rows > 0)(compute)
                pl.when(rows <= 0)(idle)
                position = position + steps
                slot = lax.rem(number, 2)
                plgpu.barrier_wait(told.at[slot])
                index = drawn_s[slot] + programs
                plgpu.barrier_arrive(heard.at[slot])
                return index, number + 1, position

            lax.while_loop(more, one, begin)
            plgpu.wait_smem_to_gmem(0)

        def products(acc, steps, position, prepare, operands):
            """The sum of all steps. A slot is free once the next step's product has been issued."""

            def free(i):
                plgpu.barrier_arrive(empty.at[lax.rem(position + i, tile.stages)])

            def step(i, _):
                slot = lax.rem(position + i, tile.stages)
                plgpu.barrier_wait(full.at[slot])
                prepare(i, slot)
                plgpu.wgmma(acc, *operands(slot))
                plgpu.wgmma_wait(1)
                pl.when(i > 0)(lambda: free(i - 1))
                return ()

            lax.fori_loop(0, steps, step, ())
            out = tiles.read(acc)
            pl.when(steps > 0)(lambda: free(steps - 1))
            return out

        pl.when(group == GROUPS)(producer)
        pl.when(group < GROUPS)(consumer)
        plgpu.barrier_arrive(done)
        plgpu.barrier_wait(done)

    dtype = out_type.dtype

    def store(acc, panels_s, boxes_s, rows, target):
        """This warpgroup's rows, a few panels at a time."""
        for first in range(0, tile.columns // PANEL, tile.panels):
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            chosen = range(first, min(first + tile.panels, tile.columns // PANEL))
            for p in chosen:
                columns = acc[:, p * PANEL : (p + 1) * PANEL]
                panels_s.at[p - first][...] = columns.astype(dtype)
            plgpu.commit_smem()
            for p in chosen:
                box, inside = target(p)
                whole = jnp.logical_and(rows >= ROWS, inside)
                plgpu.copy_smem_to_gmem(boxes_s.at[p - first], box, whole, commit_group=False)
            plgpu.commit_smem_to_gmem_group()

            @pl.when(jnp.logical_and(rows > 0, rows < ROWS))
            def _(chosen=chosen, first=first):
                for p in chosen:
                    box, inside = target(p)

                    @pl.when(inside)
                    def _(p=p, box=box):
                        tiles.copy_rows(panels_s.at[p - first], box, rows)

    return plgpu.kernel(
        body,
        out_type=out_type,
        grid=(cores(),),
        grid_names=("program",),
        num_threads=GROUPS + 1,
        thread_name="group",
        scratch_types=(
            *scratch,
            by_row((GROUPS, tile.panels, ROWS, PANEL), dtype),
            plgpu.SMEM((2,), jnp.int32),
            plgpu.Barrier(num_arrivals=2, num_barriers=tile.stages),
            plgpu.Barrier(num_arrivals=GROUPS, num_barriers=tile.stages),
            plgpu.Barrier(num_arrivals=1, num_barriers=2),
            plgpu.Barrier(num_arrivals=GROUPS, num_barriers=2),
            plgpu.Barrier(num_arrivals=GROUPS + 1),
        ),
        compiler_params=tiles.compiler_params(),
        kernel_name=name,
    )


def by_row(shape: tuple[int, ...], dtype):
    """A buffer whose tiles, of 64 columns, are copied from or to any row of an array: as wgmma and
    stores see it, and as copies do."""
    plain = plgpu.SMEM(shape, dtype, transforms=tiles.transforms(PANEL, 128)[1:])
    return plgpu.RefUnion(tiles.swizzled(shape, dtype), plain)


def draw(counter, drawn_s, slot) -> None:
    """drawn_s[slot] = counter++, for the whole warpgroup."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(), plgpu.Layout.WG_SPLAT(())))
    def body(ctx, counter, drawn, slot):
        i32 = ir.IntegerType.get_signless(32)
        first = arith.cmpi(
            arith.CmpIPredicate.eq, arith.andi(mgpu.thread_idx(), word(127)), word(0)
        )
        with mgpu.when(first):
            value = llvm.inline_asm(
                i32,
                [mgpu.memref_ptr(counter), word(1)],
                "atom.global.add.u32 $0, [$1], $2;",
                "=r,l,r",
                has_side_effects=True,
            )
            place = arith.addi(address(drawn), arith.muli(slot.registers.flat[0], word(4)))
            llvm.inline_asm(
                ir.Type.parse("!llvm.void"),
                [place, value],
                "st.shared.u32 [$0], $1;",
                "r,r",
                has_side_effects=True,
            )
        mgpu.warpgroup_barrier()

    body(counter, drawn_s, slot)


def zero_rows(buffer, width: int, panel, panels: int, low, high) -> None:
    """Zeros in the rows of a buffer `[64, width]`, swizzled by 128 bytes, that are not in
    low .. high - 1, in so many panels of 64 columns from `panel` on; by one warpgroup, half a row
    a thread."""

    @plgpu.inline_mgpu(
        arg_types=(
            plgpu.RefType(tiles.transforms(PANEL, 128)),
            *[plgpu.Layout.WG_SPLAT(())] * 3,
        )
    )
    def body(ctx, buffer, panel, low, high):
        panel, low, high = (x.registers.flat[0] for x in (panel, low, high))
        thread = arith.andi(mgpu.thread_idx(), word(127))
        row = arith.shrui(thread, word(1))
        # Tiles of 8 rows by 64 columns, row-major; a row of a tile is 128 bytes.
        tile = arith.addi(arith.muli(arith.shrui(row, word(3)), word(width // PANEL)), panel)
        offset = arith.addi(
            arith.muli(tile, word(1024)), arith.muli(arith.andi(row, word(7)), word(128))
        )
        offset = arith.addi(offset, arith.muli(arith.andi(thread, word(1)), word(64)))
        start = arith.addi(address(buffer), offset)
        before, after = arith.CmpIPredicate.slt, arith.CmpIPredicate.sge
        outside = arith.ori(arith.cmpi(before, row, low), arith.cmpi(after, row, high))
        with mgpu.when(outside):
            for piece in range(4 * panels):
                at = 1024 * (piece // 4) + 16 * (piece % 4)
                llvm.inline_asm(
                    ir.Type.parse("!llvm.void"),
                    [arith.addi(start, word(at)), word(0)],
                    "st.shared.v4.u32 [$0], {$1, $1, $1, $1};",
                    "r,r",
                    has_side_effects=True,
                )

    body(buffer, jnp.int32(panel), low, high)
