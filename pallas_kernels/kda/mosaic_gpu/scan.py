"""Scan: the state goes through the chunks of a row, and every chunk reads its outputs from it.

    U = U0 - W S     O = Qd S + P U     S <- exp(G_C) S + Kr^T U

The state is kept transposed, S^T `[V, K]`, in the accumulators of wgmma: 64 of its rows to a
warpgroup. The left operands of all four products (S^T and U^T in bf16) then come from registers
and the state never touches shared memory; O^T is transposed on its way out. One more warpgroup
does nothing but fetch, into two rings: A {W, U0, Qd, decay}, free once the state has been read,
and B {Kr, P}. A program takes one *region*: a whole row, or what a state slot owns of a packed one.

The order of a step keeps the tensor cores busy and ptxas from serialising them: every accumulator
is read in the iteration that issued its last product, and only Qd's product is in flight over the
back edge.
"""

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from . import tiles
from .chunks import Chunks
from .tiles import BF16, CHUNK, COL, F32, cols, load, read

ROWS = 64
# Registers of a thread that computes, and of one that only fetches.
REGISTERS = (240, 24)


def warpgroups(c: Chunks) -> int:
    """Warpgroups of 64 state rows that share a program: both where that still fills the card."""
    return 2 if c.value_width == 2 * ROWS and c.rows * c.regions >= 96 else 1


class Region:
    """What a program walks over: row `out` of the prepared arrays, chunks `begin` to
    `begin + count`. There is at least one: a guard against none would cost the registers that the
    products need, and a chunk without tokens leaves the state as it is. Programs may take the first
    few `regions` only."""

    def __init__(self, c: Chunks, index, spans_r, regions: int | None = None):
        regions = c.regions if regions is None else regions
        region = lax.rem(index, regions)
        out = lax.div(index, regions)
        self.out = out
        self.row = lax.div(out, c.value_heads)
        self.head = lax.rem(out, c.value_heads)
        self.slot = region
        if c.packed or c.pieces > 1:
            self.begin, self.count, self.first, self.tokens = (
                spans_r[self.row, i, region] for i in range(4)
            )
        else:
            self.begin, self.count, self.first, self.tokens = 0, c.chunks, 0, c.tokens
        self.regions = regions

    def state(self, states, values):
        """S^T as a TILE: these values of the region's slot of states `[B, S, HV, K, V]` f32, or
        zeros if it has none: the region of documents without states is the last."""
        slots = states.shape[1]
        slot = jnp.minimum(self.slot, slots - 1)
        state = tiles.load_transposed(states.at[self.row, slot, self.head, slice(None), values])
        return state if slots == self.regions else jnp.where(self.slot < slots, state, 0.0)

    def put_state(self, states, values, state):
        """Back from `state`."""
        slots = states.shape[1]

        def put():
            target = states.at[self.row, self.slot, self.head, slice(None), values]
            tiles.store_transposed(state, target)

        if slots == self.regions:
            put()
        else:
            pl.when(self.slot < slots)(put)


def kernel(c: Chunks, has_initial: bool, return_final: bool, save: bool):
    """The kernel: (-W, Kr, Qd, U0, P, decay, initial, spans) to (o, final) and, with
    `save`, the states before every chunk and U.

    Args of the kernel: what `prepare` gives; initial `[B, S, HV, K, V]` f32, read only with
    `has_initial`; spans `[B, 4, R]` int32 as `regions` has them. There are S slots of states to R
    regions, or one less.

    Returns of the kernel: o `[B, T, HV, V]` bf16; final `[B, S, HV, K, V]` f32, written only with
    `return_final`; states `[B HV, NC, V, K]` bf16; U
    `[B HV, NC 64, V]` bf16.
    """
    K, V = c.key_width, c.value_width
    groups = warpgroups(c)
    width = ROWS * groups
    parts = V // width
    ring_a, ring_b = (2, 2) if save and groups == 2 else (3, 2)

    def body(w_r, kr_r, qd_r, u0_r, p_r, d_r, initial_r, spans_r, *refs):
        o_r, final_r = refs[:2]
        states_r, u_r = refs[2:4] if save else (None, None)
        refs = refs[2 + 2 * save :]
        w_s, u0_s, qd_s, d_s, kr_s, p_s, (o_s, o_box) = refs[:7]
        states_s, u_s = refs[7:9] if save else (None, None)
        full_a, full_b, empty_a, empty_b, done = refs[-5:]
        group = lax.axis_index("group")
        program = lax.axis_index("program")
        part = lax.rem(program, parts)
        region = Region(c, lax.div(program, parts), spans_r)
        n = region.count

        def fetch_a(i, slot):
            barrier, at = full_a.at[slot], region.begin + i
            chunk = pl.ds(at * CHUNK, CHUNK)
            own = pl.ds(part * width, width)
            plgpu.copy_gmem_to_smem(w_r.at[region.out, chunk], w_s.at[slot], barrier)
            plgpu.copy_gmem_to_smem(u0_r.at[region.out, chunk, own], u0_s.at[slot], barrier)
            plgpu.copy_gmem_to_smem(qd_r.at[region.out, chunk], qd_s.at[slot], barrier)
            plgpu.copy_gmem_to_smem(d_r.at[region.out, at], d_s.at[slot], barrier)

        def fetch_b(i, slot):
            barrier, chunk = full_b.at[slot], pl.ds((region.begin + i) * CHUNK, CHUNK)
            plgpu.copy_gmem_to_smem(kr_r.at[region.out, chunk], kr_s.at[slot], barrier)
            plgpu.copy_gmem_to_smem(p_r.at[region.out, chunk], p_s.at[slot], barrier)

        def producer():
            plgpu.set_max_registers(REGISTERS[1], action="decrease")
            for i in range(max(ring_a, ring_b)):

                def first(i=i):
                    if i < ring_a:
                        fetch_a(i, i)
                    if i < ring_b:
                        fetch_b(i, i)

                pl.when(i < n)(first)

            def step(i, _):
                @pl.when(i + ring_a < n)
                def next_a():
                    plgpu.barrier_wait(empty_a.at[lax.rem(i, ring_a)])
                    fetch_a(i + ring_a, lax.rem(i, ring_a))

                @pl.when(i + ring_b < n)
                def next_b():
                    plgpu.barrier_wait(empty_b.at[lax.rem(i, ring_b)])
                    fetch_b(i + ring_b, lax.rem(i, ring_b))

                return ()

            lax.fori_loop(0, n - min(ring_a, ring_b), step, ())

        def consume(s_acc, u_acc, o_acc):
            own = pl.ds(pl.multiple_of(group * ROWS, ROWS), ROWS)
            values = pl.ds((part * groups + group) * ROWS, ROWS)
            state_shape = (ROWS, K)

            def begin(i):
                """U0 and the decay to registers, in the shadow of the state's update."""
                slot = lax.rem(i, ring_a)
                plgpu.barrier_wait(full_a.at[slot])
                u0 = load(u0_s.at[slot, :, own].T).astype(F32)
                u_acc[...] = lax.optimization_barrier(u0)

            def look(state, i, tail):
                """Issues W and Qd of chunk i; returns U^T in bf16. `tail`: chunk i - 1 is open."""
                slot = lax.rem(i, ring_a)
                state16 = state.astype(BF16)
                plgpu.wgmma(u_acc, state16, w_s.at[slot].T)
                if tail:
                    o16 = lax.optimization_barrier(read(o_acc, 1).astype(BF16))
                o_acc[...] = tiles.zeros((ROWS, CHUNK))
                plgpu.wgmma(o_acc, state16, qd_s.at[slot].T)
                if tail or save:
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                if tail:
                    plgpu.barrier_arrive(empty_b.at[lax.rem(i + ring_b - 1, ring_b)])
                    o_s.at[group].T[...] = o16
                if save:
                    states_s.at[group][...] = state16
                s_acc[...] = state * cols(load(d_s.at[slot], COL), state_shape)
                # Pinned: the compiler would carry the float32 accumulator instead.
                u16 = lax.optimization_barrier(read(u_acc, 1 if tail else 0).astype(BF16))
                if save:
                    u_s.at[group].T[...] = u16
                return u16

            def update(u16, i):
                slot = lax.rem(i, ring_b)
                plgpu.barrier_wait(full_b.at[slot])
                plgpu.wgmma(s_acc, u16, kr_s.at[slot])
                plgpu.wgmma(o_acc, u16, p_s.at[slot].T)

            def output(i):
                tokens = pl.ds(region.first + i * CHUNK, CHUNK)
                return o_r.at[region.row, tokens, region.head, values]

            def store(i):
                """Chunk i's state and U, chunk i - 1's outputs."""
                plgpu.commit_smem()
                if save:
                    at = region.begin + i
                    chunk = pl.ds(at * CHUNK, CHUNK)
                    target = states_r.at[region.out, at, values]
                    plgpu.copy_smem_to_gmem(states_s.at[group], target, commit_group=False)
                    target = u_r.at[region.out, chunk, values]
                    plgpu.copy_smem_to_gmem(u_s.at[group], target, commit_group=False)
                before = jnp.maximum(i - 1, 0)
                plgpu.copy_smem_to_gmem(o_box.at[group], output(before), i >= 1, commit_group=False)
                plgpu.commit_smem_to_gmem_group()

            def step(i, u16):
                update(u16, i)
                store(i)
                begin(i + 1)
                state = read(s_acc, 1)
                plgpu.barrier_arrive(empty_a.at[lax.rem(i, ring_a)])
                return look(state, i + 1, True)

            begin(jnp.int32(0))
            state = tiles.zeros(state_shape)
            if has_initial:
                state = region.state(initial_r, values)
            u16 = look(state, jnp.int32(0), False)
            u16 = lax.fori_loop(0, n - 1, step, u16)
            last = n - 1 + jnp.int32(0)
            update(u16, last)
            store(last)
            o16 = read(o_acc).astype(BF16)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

            o_s.at[group].T[...] = o16
            plgpu.commit_smem()
            # The chunk's box may reach into the next region's tokens.
            count = region.tokens - last * CHUNK if c.packed else None
            tiles.copy_out(o_s.at[group], o_box.at[group], output(last), count)
            if return_final:
                region.put_state(final_r, values, read(s_acc))
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        pl.when(group == groups)(producer)

        @pl.when(group < groups)
        def _():
            plgpu.set_max_registers(REGISTERS[0], action="increase")
            pl.run_scoped(
                consume,
                plgpu.ACC((ROWS, K), F32),
                plgpu.ACC((ROWS, CHUNK), F32),
                plgpu.ACC((ROWS, CHUNK), F32),
            )

        plgpu.barrier_arrive(done)
        plgpu.barrier_wait(done)

    states = jax.ShapeDtypeStruct((c.batch, c.slots, c.value_heads, K, V), F32)
    out = [jax.ShapeDtypeStruct((c.batch, c.held, c.value_heads, V), BF16), states]
    scratch = [
        tiles.swizzled((ring_a, CHUNK, K)),
        tiles.swizzled((ring_a, CHUNK, width)),
        tiles.swizzled((ring_a, CHUNK, K)),
        plgpu.SMEM((ring_a, K), F32),
        tiles.swizzled((ring_b, CHUNK, K)),
        tiles.swizzled((ring_b, CHUNK, CHUNK)),
        tiles.by_token((groups, CHUNK, ROWS)),
    ]
    if save:
        out += [
            jax.ShapeDtypeStruct((c.rows, c.chunks, V, K), BF16),
            jax.ShapeDtypeStruct((c.rows, c.length, V), BF16),
        ]
        scratch += [
            tiles.swizzled((groups, ROWS, K)),
            tiles.swizzled((groups, CHUNK, ROWS)),
        ]
    return plgpu.kernel(
        body,
        out_type=tuple(out),
        grid=(parts * c.regions * c.rows,),
        grid_names=("program",),
        num_threads=groups + 1,
        thread_name="group",
        scratch_types=(
            *scratch,
            plgpu.Barrier(num_arrivals=4, num_barriers=ring_a),
            plgpu.Barrier(num_arrivals=2, num_barriers=ring_b),
            plgpu.Barrier(num_arrivals=groups, num_barriers=ring_a),
            plgpu.Barrier(num_arrivals=groups, num_barriers=ring_b),
            plgpu.Barrier(num_arrivals=groups + 1),
        ),
        compiler_params=tiles.compiler_params(),
        kernel_name="kda_scan_saving" if save else "kda_scan",
    )
