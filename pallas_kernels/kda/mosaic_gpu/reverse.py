"""Reverse: the gradient of the state back through the chunks of a row.

    dU = P^T dO + Kr dS'      dS = exp(G_C) dS' + Qd^T dO - W^T dU

with dS' the gradient of the state after a chunk and dS of the one before. As in `scan` the state's
gradient is kept transposed in accumulators, left operands come from registers, a program takes a
region, and one warpgroup fetches. A slot of the ring holds all of a chunk, and is free once W's
product is done.
"""

import functools

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from . import tiles
from .chunks import Chunks
from .scan import REGISTERS, ROWS, Region, warpgroups
from .tiles import BF16, CHUNK, COL, F32, cols, load, read


def kernel(c: Chunks, has_final: bool, needs_initial: bool, save: bool = True):
    """The kernel: (-W, Kr, Qd, P, decay, do, keeps, dfinal, spans) to (dU, dstates, dinitial), or
    to (dinitial,) unless `save`.

    Args of the kernel: what `prepare` gives; do `[B, T, HV, V]` bf16; dfinal `[B, S, HV, K, V]`
    f32, read only with `has_final`; keeps and spans as `regions` has them.

    Returns of the kernel: dU `[B HV, NC 64, V]` bf16; the gradient of the state after every chunk,
    `[B HV, NC, V, K]` bf16; that of the initial states `[B, S, HV, K, V]` f32, written only with
    `needs_initial`.
    """
    K, V = c.key_width, c.value_width
    groups = warpgroups(c)
    width = ROWS * groups
    parts = V // width
    ring = 2 if groups == 2 else 3

    def body(w_r, kr_r, qd_r, p_r, d_r, do_r, keeps_r, dfinal_r, spans_r, *refs):
        du_r, states_r = refs[:2] if save else (None, None)
        dinitial_r, refs = refs[2 * save], refs[2 * save + 1 :]
        w_s, kr_s, qd_s, p_s, d_s, keeps_s, (do_s, do_box) = refs[:7]
        states_s, du_s = refs[7:9] if save else (None, None)
        full, empty, done = refs[-3:]
        group = lax.axis_index("group")
        program = lax.axis_index("program")
        part = lax.rem(program, parts)
        region = Region(c, lax.div(program, parts), spans_r)
        n = region.count

        def fetch(i):
            """The i-th chunk from the end."""
            slot = lax.rem(i, ring)
            at = n - 1 - i
            barrier = full.at[slot]
            chunk = pl.ds((region.begin + at) * CHUNK, CHUNK)
            for source, target in ((w_r, w_s), (kr_r, kr_s), (qd_r, qd_s), (p_r, p_s)):
                plgpu.copy_gmem_to_smem(source.at[region.out, chunk], target.at[slot], barrier)
            plgpu.copy_gmem_to_smem(d_r.at[region.out, region.begin + at], d_s.at[slot], barrier)
            if c.packed:
                plgpu.copy_gmem_to_smem(keeps_r.at[region.row, chunk], keeps_s.at[slot], barrier)
            tokens = pl.ds(region.first + at * CHUNK, CHUNK)
            for g in range(groups):
                own = pl.ds((part * groups + g) * ROWS, ROWS)
                source = do_r.at[region.row, tokens, region.head, own]
                plgpu.copy_gmem_to_smem(source, do_box.at[slot * groups + g], barrier)

        def producer():
            plgpu.set_max_registers(REGISTERS[1], action="decrease")
            for i in range(ring):
                pl.when(i < n)(functools.partial(fetch, jnp.int32(i)))

            def step(i, _):
                plgpu.barrier_wait(empty.at[lax.rem(i, ring)])
                fetch(i + ring)
                return ()

            lax.fori_loop(0, n - ring, step, ())

        def consume(s_acc, u_acc):
            values = pl.ds((part * groups + group) * ROWS, ROWS)

            def outputs(i):
                """dO^T to registers: before any product that would be in flight meanwhile."""
                slot = lax.rem(i, ring)
                plgpu.barrier_wait(full.at[slot])
                do = load(do_s.at[slot * groups + group].T)
                if c.packed:  # whatever stands at padding
                    do = tiles.keep_columns(do, load(keeps_s.at[slot], COL))
                return lax.optimization_barrier(do)

            def begin(do, i):
                u_acc[...] = tiles.zeros((ROWS, CHUNK))
                plgpu.wgmma(u_acc, do, p_s.at[lax.rem(i, ring)])

            def look(state, i):
                """Issues Kr; returns dU^T in bf16."""
                slot = lax.rem(i, ring)
                state16 = state.astype(BF16)
                plgpu.wgmma(u_acc, state16, kr_s.at[slot].T)
                if save:
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                    states_s.at[group][...] = state16
                s_acc[...] = state * cols(load(d_s.at[slot], COL), (ROWS, K))
                du16 = lax.optimization_barrier(read(u_acc).astype(BF16))
                if save:
                    du_s.at[group].T[...] = du16
                return du16

            def update(carry, i):
                do, du16 = carry
                slot = lax.rem(i, ring)
                plgpu.wgmma(s_acc, do, qd_s.at[slot])
                plgpu.wgmma(s_acc, du16, w_s.at[slot])
                if not save:
                    return
                plgpu.commit_smem()
                at = region.begin + n - 1 - i
                plgpu.copy_smem_to_gmem(
                    states_s.at[group], states_r.at[region.out, at, values], commit_group=False
                )
                chunk = pl.ds(at * CHUNK, CHUNK)
                plgpu.copy_smem_to_gmem(du_s.at[group], du_r.at[region.out, chunk, values])

            def step(i, carry):
                do = outputs(i + 1)
                update(carry, i)
                begin(do, i + 1)
                state = read(s_acc, 1)
                plgpu.barrier_arrive(empty.at[lax.rem(i, ring)])
                return do, look(state, i + 1)

            do = outputs(jnp.int32(0))
            begin(do, jnp.int32(0))
            state = tiles.zeros((ROWS, K))
            if has_final:
                state = region.state(dfinal_r, values)
            carry = do, look(state, jnp.int32(0))
            carry = lax.fori_loop(0, n - 1, step, carry)
            update(carry, n - 1 + jnp.int32(0))
            state = read(s_acc)
            if needs_initial:
                region.put_state(dinitial_r, values, state)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        pl.when(group == groups)(producer)

        @pl.when(group < groups)
        def _():
            plgpu.set_max_registers(REGISTERS[0], action="increase")
            pl.run_scoped(consume, plgpu.ACC((ROWS, K), F32), plgpu.ACC((ROWS, CHUNK), F32))

        plgpu.barrier_arrive(done)
        plgpu.barrier_wait(done)

    out = [jax.ShapeDtypeStruct((c.batch, c.slots, c.value_heads, K, V), F32)]
    kept = []
    if save:
        out = [
            jax.ShapeDtypeStruct((c.rows, c.length, V), BF16),
            jax.ShapeDtypeStruct((c.rows, c.chunks, V, K), BF16),
            *out,
        ]
        kept = [tiles.swizzled((groups, ROWS, K)), tiles.swizzled((groups, CHUNK, ROWS))]
    return plgpu.kernel(
        body,
        out_type=tuple(out),
        grid=(parts * c.regions * c.rows,),
        grid_names=("program",),
        num_threads=groups + 1,
        thread_name="group",
        scratch_types=(
            *(tiles.swizzled((ring, CHUNK, K)) for _ in range(3)),
            tiles.swizzled((ring, CHUNK, CHUNK)),
            plgpu.SMEM((ring, K), F32),
            plgpu.SMEM((ring, CHUNK), jnp.int16),
            tiles.by_token((ring * groups, CHUNK, ROWS)),
            *kept,
            plgpu.Barrier(num_arrivals=5 + c.packed + groups, num_barriers=ring),
            plgpu.Barrier(num_arrivals=groups, num_barriers=ring),
            plgpu.Barrier(num_arrivals=groups + 1),
        ),
        compiler_params=tiles.compiler_params(),
        kernel_name="kda_reverse" if save else "kda_reverse_chain",
    )
