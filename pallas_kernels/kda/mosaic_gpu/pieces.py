"""Pieces: a long row of few heads is cut into stretches that the scans walk side by side.

A piece maps the state by S' = M S + N (`spans` has the algebra; it is exact). One pass of the scan
without outputs, `chain`, gives both: N from a state of zero, M from the identity with values of
zero. The states before the pieces follow one after another, and so do, backwards with M^T, the
gradients after them. The first piece starts from the state that is known, so its M is not needed,
and neither is the map of the last.
"""

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from . import reverse, tiles
from .chunks import Chunks
from .scan import REGISTERS, ROWS, Region
from .tiles import BF16, CHUNK, COL, F32, cols, load, read

# Multiprocessors of a Hopper card, each of which holds one program of a scan.
PROGRAMS = 132
# Chunks that a program must be spared, to pay for the maps and for what launches them.
SPARED = 64
MOST = 16
RING = 4


def count(rows: int, chunks: int, width: int) -> int:
    """Pieces of each of so many rows of heads, from shapes alone: as many as have programs for the
    pass of their maps; 1 where that does not pay."""
    parts = 2 * (width // ROWS)  # of N and M
    pieces = min(1 + PROGRAMS // (rows * parts), MOST)
    if pieces < 3:
        return 1  # two passes over halves take as long as one over the whole
    most = -(-chunks // pieces)
    # A step of `chain` takes about .6 of one with outputs.
    spared = chunks - 1.6 * most
    # With equal ones left over there may be fewer.
    return -(-chunks // most) if spared >= SPARED else 1


def states_before(c: Chunks, operands, initial, spans):
    """The state before each piece `[B, P, HV, K, V]`, and M^T of all but the last
    `[B, P - 1, HV, K, K]`, f32; operands and spans as `chain` takes them, initial
    `[B, 1, HV, K, V]` or None."""
    V, K = c.value_width, c.key_width
    shape = (c.batch, c.pieces - 1, c.value_heads)
    start = jnp.zeros((*shape, V, K), F32)
    if initial is not None:
        start = start.at[:, :1].set(jnp.swapaxes(initial, 3, 4))
    identity = jnp.broadcast_to(jnp.eye(K, dtype=F32), (*shape, K, K))
    end = chain(c)(*operands, jnp.concatenate([start, identity], axis=3), spans)
    n, maps = jnp.swapaxes(end[:, :, :, :V], 3, 4), end[:, :, :, V:]
    states = [jnp.zeros_like(n[:, 0]) if initial is None else initial[:, 0], n[:, 0]]
    for i in range(1, c.pieces - 1):
        states.append(n[:, i] + _product(states[-1], maps[:, i]))
    return jnp.stack(states, axis=1), maps


def gradients_after(c: Chunks, operands, maps, dfinal, spans):
    """The gradient of the state after each piece `[B, P, HV, K, V]`; operands (up to
    keeps) and spans as `reverse` takes them, maps as `states_before` gives them, dfinal of the row
    or None."""
    start = jnp.zeros((c.batch, c.pieces, c.value_heads, c.key_width, c.value_width), F32)
    if dfinal is not None:
        start = start.at[:, -1:].set(dfinal)
    (r,) = reverse.kernel(c, True, True, save=False)(*operands, start, spans)
    after = [start[:, -1], r[:, -1]]
    for i in range(c.pieces - 2, 0, -1):
        after.append(r[:, i] + _product(after[-1], jnp.swapaxes(maps[:, i], 2, 3)))
    return jnp.stack(after[::-1], axis=1)


def _product(state, map_t):
    """M S, `[B, HV, K, V]`."""
    return jnp.einsum("bhjv,bhjk->bhkv", state, map_t, precision=lax.Precision.HIGHEST)


def chain(c: Chunks):
    """The kernel: (-W, Kr, U0, decay, start, spans) to end.

    Args of the kernel: what `prepare` gives; start `[B, P - 1, HV, V + K, K]` f32, of which V rows
    see the values and K rows see none; spans as `scan` takes them.

    Returns of the kernel: end, of start's shape, after each piece but the last.
    """
    K, V = c.key_width, c.value_width
    parts = (V + K) // ROWS

    def body(w_r, kr_r, u0_r, d_r, start_r, spans_r, end_r, *refs):
        w_s, u0_s, kr_s, d_s, full, empty, done = refs
        program = lax.axis_index("program")
        part = lax.rem(program, parts)
        piece = Region(c, lax.div(program, parts), spans_r, c.pieces - 1)
        n = piece.count
        own = pl.ds(pl.multiple_of(part * ROWS, ROWS), ROWS)

        def fetch(i):
            slot = lax.rem(i, RING)
            barrier, at = full.at[slot], piece.begin + i
            chunk = pl.ds(at * CHUNK, CHUNK)
            values = pl.ds(lax.rem(part, V // ROWS) * ROWS, ROWS)
            plgpu.copy_gmem_to_smem(w_r.at[piece.out, chunk], w_s.at[slot], barrier)
            plgpu.copy_gmem_to_smem(u0_r.at[piece.out, chunk, values], u0_s.at[slot], barrier)
            plgpu.copy_gmem_to_smem(kr_r.at[piece.out, chunk], kr_s.at[slot], barrier)
            plgpu.copy_gmem_to_smem(d_r.at[piece.out, at], d_s.at[slot], barrier)

        def producer():
            plgpu.set_max_registers(REGISTERS[1], action="decrease")
            for i in range(RING):

                def first(i=i):
                    fetch(jnp.int32(i))

                pl.when(i < n)(first)

            def step(i, _):
                plgpu.barrier_wait(empty.at[lax.rem(i, RING)])
                fetch(i + RING)
                return ()

            lax.fori_loop(0, n - RING, step, ())

        def consume(s_acc, u_acc):
            def begin(i):
                slot = lax.rem(i, RING)
                plgpu.barrier_wait(full.at[slot])
                u0 = load(u0_s.at[slot].T).astype(F32)
                u_acc[...] = lax.optimization_barrier(jnp.where(part < V // ROWS, u0, 0.0))

            def look(state, i):
                slot = lax.rem(i, RING)
                plgpu.wgmma(u_acc, state.astype(BF16), w_s.at[slot].T)
                s_acc[...] = state * cols(load(d_s.at[slot], COL), (ROWS, K))
                return lax.optimization_barrier(read(u_acc).astype(BF16))

            def step(i, u16):
                slot = lax.rem(i, RING)
                plgpu.wgmma(s_acc, u16, kr_s.at[slot])
                begin(i + 1)
                state = read(s_acc)
                plgpu.barrier_arrive(empty.at[slot])
                return look(state, i + 1)

            begin(jnp.int32(0))
            u16 = look(load(start_r.at[piece.row, piece.slot, piece.head, own]), jnp.int32(0))
            u16 = lax.fori_loop(0, n - 1, step, u16)
            plgpu.wgmma(s_acc, u16, kr_s.at[lax.rem(n - 1, RING)])
            end_r.at[piece.row, piece.slot, piece.head, own][...] = read(s_acc)

        group = lax.axis_index("group")
        pl.when(group == 1)(producer)

        @pl.when(group < 1)
        def _():
            plgpu.set_max_registers(REGISTERS[0], action="increase")
            pl.run_scoped(consume, plgpu.ACC((ROWS, K), F32), plgpu.ACC((ROWS, CHUNK), F32))

        plgpu.barrier_arrive(done)
        plgpu.barrier_wait(done)

    shape = (c.batch, c.pieces - 1, c.value_heads, V + K, K)
    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(shape, F32),
        grid=(parts * (c.pieces - 1) * c.rows,),
        grid_names=("program",),
        num_threads=2,
        thread_name="group",
        scratch_types=(
            tiles.swizzled((RING, CHUNK, K)),
            tiles.swizzled((RING, CHUNK, ROWS)),
            tiles.swizzled((RING, CHUNK, K)),
            plgpu.SMEM((RING, K), F32),
            plgpu.Barrier(num_arrivals=4, num_barriers=RING),
            plgpu.Barrier(num_arrivals=1, num_barriers=RING),
            plgpu.Barrier(num_arrivals=2),
        ),
        compiler_params=tiles.compiler_params(),
        kernel_name="kda_chain",
    )
