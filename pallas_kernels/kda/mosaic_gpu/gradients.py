"""Gradients of the inputs: all chunks side by side, from the states before and after each.

With dU and the gradient dS' of the state after the chunk (`reverse`), S before it and U (`scan`):

    dV = (A beta)^T dU        dP = tril(dO U^T)      dM = -stril(dV U^T)     (L = beta M)
    dQd = dO S^T              dKd = -dV S^T          dKr = U dS'^T
    dbeta = sum(dV U) / beta^2

and from these those of q, k and of the log decays (`decays`). Every factor of a pair is one of a
row, decayed from its block's start, or of a column, decayed to its block's end (`prepare`); what
lies between two blocks scales a sum that is carried from block to block, as in Horner's rule. The
gradient of a log decay is a sum over the rows at or after it of row factor times its gradient, less
column factor times its gradient: both sides use the same rounded factors, so that pairs on one side
of a token cancel exactly, and a pair i == j is left out. What a token leaves in the state after the
chunk counts for the later log decays alone, as a sum of its own: among saturated gates it is larger
than their gradients by many orders. A warpgroup takes 32 channels of keys and 32 of values.
"""

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from . import blocks, exchange, tiles
from .activate import FLOOR, SHIFT, gate_gradient, log_decay, strength_gradient
from .chunks import Chunks, Place
from .decays import of_log_decays
from .factors import Factors
from .masks import Masks
from .tiles import BF16, BLOCK, CHUNK, COL, F32, ROW, cols, load, rows, wide

WIDTH = 32
# Rows of the exchange between warpgroups, and of beta and the labels.
_QUERY, _KEY, _BETA, _OWN = range(4)
_STRENGTH, _LABEL = (3, 2), (3, 3)


def kernel(c: Chunks):
    """The kernel: (q, k, gate, beta, a, dt_bias, tables, labels, do, decay, A beta, U, dU, states,
    dstates) to (dq, dk, dv, dgate, dbeta, sums).

    Args of the kernel: as `prepare`, `scan` and `reverse` take and give them, save that labels are
    the bits of float32: they share a buffer with beta.

    Returns of the kernel: dq, dk `[B, T, HV, K]` (of every value head), dv `[B, T, HV, V]`, dgate
    `[B, T, HV, K]` bf16; dbeta `[B HV, NC 64]` f32, of the raw one; sums `[B HV, NC, 2, K]` f32:
    each chunk's share of the gradients of dt_bias and, channel by channel, of a.
    """
    D = c.key_width
    groups = D // WIDTH
    shift = SHIFT if c.bounded else 0.0
    square, compact, part = (CHUNK, CHUNK), (CHUNK, BLOCK), (CHUNK, WIDTH)

    def body(*refs):
        q_r, k_r, g_r, beta_r, a_r, dt_r, tables_r, labels_r = refs[:8]
        do_r, decay_r, inverse_r, u_r, du_r, states_r, dstates_r = refs[8:15]
        dq_r, dk_r, dv_r, dg_r, dbeta_r, sums_r = refs[15:21]
        (q_s, q_box), (k_s, k_box), (g_s, g_box), (values_s, values_box) = refs[21:25]
        (keys_s, keys_box), u_s, columns_s, states_s, dstates_s = refs[25:30]
        (pairs_s, inverse_s), tables_s, rows_s, channels_s = refs[30:34]
        raw_b, value_b, state_b, met_b = refs[34:]
        dt_s, through_s = (channels_s.at[i] for i in range(2))
        group = lax.axis_index("group")
        place = Place(c, lax.axis_index("chunk"), tables_r)
        tokens = pl.ds(place.first, CHUNK)
        block = pl.ds(place.chunk * CHUNK, CHUNK)
        own = pl.ds(pl.multiple_of(group * WIDTH, WIDTH), WIDTH)

        def meet():
            """All warpgroups: what any wrote is seen by the others."""
            plgpu.commit_smem()
            plgpu.barrier_arrive(met_b)
            plgpu.barrier_wait(met_b)

        def exchanged(row):
            total = load(rows_s.at[row, 0], ROW)
            for i in range(1, groups):
                total = total + load(rows_s.at[row, i], ROW)
            return total

        def token_labels(layout):
            return lax.bitcast_convert_type(load(rows_s.at[*_LABEL], layout), jnp.int32)

        def fetch():
            copy = plgpu.copy_gmem_to_smem
            for array, head, box in (
                (g_r, place.head, g_box),
                (k_r, place.key_head, k_box),
                (q_r, place.key_head, q_box),
            ):
                copy(array.at[place.row, tokens, head, own], box.at[group], raw_b)
            copy(do_r.at[place.row, tokens, place.head, own], values_box.at[group], value_b)
            copy(du_r.at[place.out, block, own], values_s.at[groups + group], value_b)
            copy(u_r.at[place.out, block, own], u_s.at[group], value_b)
            at = (place.out, place.chunk, slice(None), own)
            copy(states_r.at[at], states_s.at[group], state_b)
            copy(dstates_r.at[at], dstates_s.at[group], state_b)

            @pl.when(group == 0)
            def _():
                copy(beta_r.at[place.out, block], rows_s.at[*_STRENGTH], raw_b)
                if c.has_dt_bias:
                    copy(dt_r.at[place.head], dt_s, raw_b)
                if c.packed:
                    copy(labels_r.at[place.row, block], rows_s.at[*_LABEL], raw_b)
                copy(inverse_r.at[place.out, block], inverse_s, value_b)
                copy(decay_r.at[place.out, place.chunk], through_s, value_b)

        def send(box, array):
            """A finished tile, committed, to a token array; what is not all of the chunk's own
            is left to `send_rows`."""
            target = array.at[place.row, tokens, place.head, own]
            if c.packed:
                plgpu.copy_smem_to_gmem(box, target, place.count == CHUNK)
            else:
                plgpu.copy_smem_to_gmem(box, target)

        def send_rows(buffer, array):
            @pl.when(place.count < CHUNK)
            def _():
                target = array.at[place.row, tokens, place.head, own]
                tiles.copy_rows(buffer, target, place.count)

        masks = Masks(c, place, token_labels)

        def pairs_of_same_document(x):
            columns = cols(jnp.abs(token_labels(COL)), square)
            return jnp.where(rows(jnp.abs(token_labels(ROW)), square) == columns, x, 0.0)

        def of_same_document(x):
            """Zeros in rows of dO and dV whose document is not the one live before the chunk, and
            of U where it is not the one live after it: no concern of those states."""
            send_rows(values_s.at[groups + group], dv_r)
            meet()
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            labels = jnp.abs(token_labels(ROW))
            for buffer, label in (
                (values_s.at[group], place.entry),
                (values_s.at[groups + group], place.entry),
                (u_s.at[group], place.exit),
            ):
                buffer[...] = masks.rows_where(labels == label, wide(load(buffer))).astype(BF16)
            return x

        def rest_of_rows(x):
            for buffer, array in ((keys_s, dk_r), (q_s, dq_r), (g_s, dg_r)):
                send_rows(buffer.at[group], array)
            return x

        def chunk():
            fetch()
            a = a_r[place.head]

            def bias():
                return load(dt_s.at[own], COL) if c.has_dt_bias else None

            decays, sums = (tables_s.at[group, i] for i in range(2))
            decays[0] = tiles.zeros((WIDTH,), COL) + 1.0
            sums[0] = tiles.zeros((WIDTH,), COL)
            plgpu.barrier_wait(raw_b)
            masks.clear(q_s.at[group], k_s.at[group])
            q16 = load(q_s.at[group])
            if c.l2norm:
                for row, x in ((_QUERY, q16), (_KEY, load(k_s.at[group]))):
                    squares = blocks.pairs(tiles.zeros(compact), x, x)
                    rows_s.at[row, group][...] = blocks.diagonal(squares)
            g = log_decay(c, wide(load(g_s.at[group])), a, bias())
            if not c.bounded:
                g = jnp.maximum(g, FLOOR)
            within = blocks.cumsum(masks.tiles(g))
            exchange.store_decays(within, decays)

            # Values: dV, in the place of dU.
            plgpu.barrier_wait(value_b)
            if c.packed:
                masks.clear(values_s.at[group])
            mine = values_s.at[groups + group]
            dv = tiles.product(part, (load(inverse_s.T), mine))
            u = wide(load(u_s.at[group]))
            rows_s.at[_BETA, group][...] = jnp.sum(dv * u, axis=1)
            tiles.warpgroup_barrier()
            mine[...] = dv.astype(BF16)
            meet()
            send(values_box.at[groups + group], dv_r)

            # Pairs: warpgroup 0 takes P and warpgroup 1 M.
            @pl.when(group < 2)
            def _():
                factors = ((values_s.at[group * groups + j], u_s.at[j].T) for j in range(groups))
                x = tiles.product(square, *factors)
                x = x * (1.0 - 2.0 * group.astype(F32))
                rows_s.at[_OWN, group][...] = blocks.diagonal(blocks.own(x))
                i = plgpu.broadcasted_iota(jnp.int32, square, 0, layout=tiles.TILE)
                j = plgpu.broadcasted_iota(jnp.int32, square, 1, layout=tiles.TILE)
                x = masks.if_shared(pairs_of_same_document, jnp.where(i > j, x, 0.0))
                pairs_s.at[group][...] = x.astype(BF16)

            q_scale = plgpu.layout_cast(jnp.full((CHUNK,), 1.0, F32), ROW)
            k_scale = q_scale
            if c.l2norm:
                scales = [lax.rsqrt(exchanged(x) + 1e-6) for x in (_QUERY, _KEY)]
                q_scale, k_scale = masks.vectors(scales)
            f = Factors(c, k_s.at[group], q16, k_scale, q_scale, within, shift, decays, sums)
            key_tile, query_tile, column_tile = (x.at[group] for x in (keys_s, q_s, columns_s))
            key_tile[...] = (f.key() * f.seen()).astype(BF16)
            query_tile[...] = (f.query() * f.seen()).astype(BF16)
            column_tile[...] = (f.key() * f.to_end()).astype(BF16)
            masks.if_shared(of_same_document)
            meet()

            own_pair = load(rows_s.at[_OWN, 0], ROW)

            plgpu.barrier_wait(state_b)

            def with_state(values, state):
                """All of the values times this group's channels of a state."""
                factors = (
                    (values.at[j], state.at[group, pl.ds(j * WIDTH, WIDTH)]) for j in range(groups)
                )
                return tiles.product(part, *factors)

            def row_gradient(pairs, from_state):
                """That of a row factor, from the state and then from earlier blocks: on its way
                the sum decays as the state would."""
                x = from_state
                for block, scale in ((0, (0, 1, 1, 1)), (1, (0, 0, 2, 2)), (2, (0, 0, 0, 3))):
                    x = x * cols(f.decay(scale), part)
                    places = tuple((w, block) if w > block else None for w in range(4))
                    x = blocks.shared_times(x, pairs, column_tile, places, (block,) * 4)
                return x * 2.0**-shift

            def column_gradient():
                """That of a column factor, from later blocks."""
                x = tiles.zeros(part)
                for block, scale in ((3, (3, 3, 0, 0)), (2, (2, 0, 0, 0)), (1, None)):
                    places = tuple((block, w) if w < block else None for w in range(4))
                    x = from_columns(x, places, (block,) * 4)
                    if scale is not None:
                        x = x * cols(f.decay(scale), part)
                return x * 2.0**-shift

            def outgoing():
                """That of a column factor, from the state after the chunk."""
                return with_state(u_s, dstates_s) * cols(f.after(), part)

            def from_columns(x, places, of):
                for pairs, tile in ((delta_pairs, key_tile), (read_pairs, query_tile)):
                    x = blocks.shared_times(x, pairs, tile, places, of, transpose=True)
                return x

            read_pairs, delta_pairs = pairs_s.at[0], pairs_s.at[1]

            def near(pairs):
                return blocks.own(load(pairs))

            # Keys as rows.
            dk = row_gradient(
                delta_pairs, -with_state(values_s.at[pl.ds(groups, groups)], states_s)
            )
            tiles.warpgroup_barrier()
            if c.bounded:
                dk = blocks.times(dk, near(delta_pairs), (f.key() * f.back()).astype(BF16), False)
            tiles.warpgroup_barrier()
            # Settled: as a product that waits to be fused with the next sum it would keep both
            # of its factors in registers.
            dlog = jnp.maximum(wide(load(key_tile)) * dk, -3e38)
            dk = dk * f.seen() + f.times_query(own_pair)

            # Keys as columns: of the state after the chunk, of later blocks, of their own.
            tiles.warpgroup_barrier()
            dk = dk + outgoing() * f.to_end()
            tiles.warpgroup_barrier()
            x = column_gradient()
            tiles.warpgroup_barrier()
            dlog = dlog - wide(load(column_tile)) * x
            dk = dk + x * f.to_end()
            tiles.warpgroup_barrier()
            if c.bounded:
                x = from_columns(tiles.zeros(part), tuple((w, w) for w in range(4)), (0, 1, 2, 3))
                tiles.warpgroup_barrier()
                dlog = dlog - wide((f.key() * f.back()).astype(BF16)) * x
                dk = dk + x * f.back()
            else:
                near_read, near_delta = near(read_pairs), near(delta_pairs)

                def by_halves(level, carry):
                    dk, dlog = carry
                    e = blocks.to_middle(within, level)
                    x16 = (f.key() * e).astype(BF16)
                    joined = blocks.of_level(near_delta, level)
                    x = blocks.times(tiles.zeros(part), joined, x16, False)
                    dlog = dlog + wide(x16) * x
                    dk = dk + x * e
                    x = blocks.times(tiles.zeros(part), joined, x16, True)
                    y16 = (f.query() * e).astype(BF16)
                    x = blocks.times(x, blocks.of_level(near_read, level), y16, True)
                    return dk + x * e, dlog - wide(x16) * x

                dk, dlog = lax.fori_loop(0, 4, by_halves, (dk, dlog))

            def finish(row, d, factor, unit, scale, times):
                """From the gradient of a vector times `scale`, one over its norm, and times
                `times`, that of the vector: only what is at right angles to it passes."""
                if not c.l2norm:
                    return masks.tiles(d * times)
                if not c.bounded:
                    d, factor = d * times, unit
                rows_s.at[row, group][...] = jnp.sum(factor() * d, axis=1)
                meet()
                if c.bounded:
                    return d * rows(scale * times, part) - unit(exchanged(row) * scale * scale)
                return (d - unit() * rows(exchanged(row), part)) * rows(scale, part)

            dk = finish(_KEY, dk, f.key, f.key, k_scale, 1.0)
            tiles.warpgroup_barrier()
            key_tile[...] = dk.astype(BF16)
            plgpu.commit_smem()
            send(keys_box.at[group], dk_r)

            # Queries.
            dq = row_gradient(read_pairs, with_state(values_s, states_s))
            if c.bounded:
                dq = blocks.times(dq, near(read_pairs), (f.key() * f.back()).astype(BF16), False)
            dlog = dlog + wide(load(query_tile)) * dq
            dq = dq * f.seen() + f.times_key(own_pair)
            if not c.bounded:
                near_read = near(read_pairs)

                def by_halves(level, carry):
                    dq, dlog = carry
                    e = blocks.to_middle(within, level)
                    x16 = (f.key() * e).astype(BF16)
                    joined = blocks.of_level(near_read, level)
                    x = blocks.times(tiles.zeros(part), joined, x16, False)
                    y16 = (f.query() * e).astype(BF16)
                    return dq + x * e, dlog + wide(y16) * x

                dq, dlog = lax.fori_loop(0, 4, by_halves, (dq, dlog))
            dq = finish(_QUERY, dq, f.query, f.unit_query, q_scale, c.scale)
            tiles.warpgroup_barrier()
            query_tile[...] = dq.astype(BF16)
            plgpu.commit_smem()
            send(q_box.at[group], dq_r)

            # Log decays.
            leaves = wide(load(column_tile)) * outgoing()
            states = (states_s.at[group], dstates_s.at[group])
            through = load(through_s.at[own], COL)
            dlog = of_log_decays(c, dlog, leaves, states, through, sums)
            draw, da = gate_gradient(c, dlog, wide(load(g_s.at[group])), a, bias())
            draw, da = masks.tiles((draw, da))
            tiles.warpgroup_barrier()
            exchange.store_column_sums(draw, decays)
            if da is not None:
                exchange.store_column_sums(da, sums)
            tiles.warpgroup_barrier()
            target = sums_r.at[place.out, place.chunk, slice(None), own]
            exchange.store_totals(tables_s.at[group], target)
            g_s.at[group][...] = draw.astype(BF16)
            plgpu.commit_smem()
            send(g_box.at[group], dg_r)

            raw = load(rows_s.at[*_STRENGTH], ROW)
            dbeta = strength_gradient(c, exchanged(_BETA), raw, ROW)
            dbeta_r[place.out, block] = masks.vectors(dbeta)
            masks.if_shared(rest_of_rows)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        if c.packed:
            tiles.leave_if(place.count < 0)
        chunk()

    token = jax.ShapeDtypeStruct((c.batch, c.held, c.value_heads, D), BF16)
    shape = (groups, CHUNK, WIDTH)
    return plgpu.kernel(
        body,
        out_type=(
            token,
            token,
            token,
            token,
            jax.ShapeDtypeStruct((c.rows, c.length), F32),
            jax.ShapeDtypeStruct((c.rows, c.chunks, 2, D), F32),
        ),
        grid=(c.batch * c.chunks * c.value_heads,),
        grid_names=("chunk",),
        num_threads=groups,
        thread_name="group",
        scratch_types=(
            *(tiles.by_token(shape) for _ in range(3)),
            tiles.by_token((2 * groups, CHUNK, WIDTH)),
            tiles.by_token(shape),
            *(tiles.swizzled(shape, swizzle=2 * WIDTH) for _ in range(2)),
            *(tiles.swizzled((groups, D, WIDTH), swizzle=2 * WIDTH) for _ in range(2)),
            # A beta has been read where the pairs are written.
            plgpu.RefUnion(tiles.swizzled((2, CHUNK, CHUNK)), tiles.swizzled((CHUNK, CHUNK))),
            plgpu.SMEM((groups, 2, exchange.END_ROWS, WIDTH), F32),
            plgpu.SMEM((4, 4, CHUNK), F32),
            plgpu.SMEM((2, D), F32),
            plgpu.Barrier(num_arrivals=3 * groups + 1 + c.has_dt_bias + c.packed),
            plgpu.Barrier(num_arrivals=3 * groups + 2),
            plgpu.Barrier(num_arrivals=2 * groups),
            plgpu.Barrier(num_arrivals=groups),
        ),
        compiler_params=tiles.compiler_params(),
        kernel_name=f"kda_gradients_{'bounded' if c.bounded else 'exact'}",
    )
