"""Prepare: everything in a chunk that needs no state, all chunks of all rows side by side.

One warpgroup takes a chunk of one value head, from raw inputs to the operands of the scan

    W = A beta Kd     U0 = A beta V     Kr = exp(G_C - G) K     Qd = exp(G) Q     P = tril(Q Kd'^T)

with A = (I + L)^-1 (`chunked` has the algebra). Only pairs of tokens need care, since their decay
exp(G_i - G_j) splits into two factors. Blocks of 16 tokens are anchored one by one:

    off the diagonal  the row's factor decays from its block's start and the column's to its block's
                      end, what lies between scales the row's: nothing exceeds 1, for any gate;
    on the diagonal   `bounded`: both factors anchored at the block's start, shifted so that
                      neither exceeds 2^58 while a token decays by at most 5 nats;
                      otherwise: pairs split by halves as in `pairs.halving`, one product for each
                      of 8, 4, 2 and 1 tokens, no exponent above 0.

All anchors lie at or before the pair's row, so later tokens change no bit of an earlier one.
Exponents are in base 2. Channels come in slabs of 32, which the loop keeps rolled: unrolled, the
instructions do not fit their cache.
"""

import functools

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from . import blocks, exchange, inverse, tiles
from .activate import FLOOR, SHIFT, log_decay, write_strength
from .chunks import Chunks, Place
from .masks import Masks
from .tiles import BF16, BLOCK, CHUNK, COL, F16, F32, ROW, cols, load, rows, wide

SLAB = 32
# Two to each multiprocessor of a Hopper card.
PROGRAMS = 264
# Halves of 2^level tokens, and the sum that their pairs go to: those of 2 and 1 are masked.
HALVES = ((3, 0), (2, 0), (1, 1), (0, 2))


def slab(s):
    return pl.ds(pl.multiple_of(s * SLAB, SLAB), SLAB)


def kernel(c: Chunks, with_inverse: bool):
    """The kernel: (q, k, v, gate, beta, a, dt_bias, tables, labels, used) to (-W, Kr, Qd, U0, P,
    decay) and, with `with_inverse`, A beta.

    Args of the kernel:
      q, k `[B, T, H, K]`, v `[B, T, HV, V]`, gate `[B, T, HV, K]` bf16, as the caller holds them.
      beta `[B HV, NC 64]` f32, raw; a `[HV]` f32, exp(A_log); dt_bias `[HV, K]` f32.
      tables `[B, 5, NC]` int32 (`regions.Tables.chunks`); labels `[B, NC 64]` int32, negative at
        padding; used `[1]`: chunks that any row has. Beta and labels come by place and not by
        token: their copies have to start at a multiple of 16 bytes.

    Returns of the kernel: `[B HV, NC 64, K or V or 64]` bf16; decay `[B HV, NC, K]` f32.
    """
    K, V = c.key_width, c.value_width
    slabs = K // SLAB
    shift = SHIFT if c.bounded else 0.0
    tile = (CHUNK, SLAB)
    compact = (CHUNK, BLOCK)
    # None without a chunk: it would end while what it fetched is still on its way.
    programs = min(PROGRAMS, c.rows * c.least)

    def body(q_r, k_r, v_r, g_r, beta_r, a_r, dt_r, tables_r, labels_r, used_r, *refs):
        outs, refs = refs[: 6 + with_inverse], refs[6 + with_inverse :]
        w_r, kr_r, qd_r, u0_r, p_r, d_r = outs[:6]
        (q_s, q_box), (k_s, k_box), (v_s, v_box), (g_s, g_box), (c_s, (p_s, a_s)) = refs[:5]
        kd_s, x16_s, x32_s, y32_s = refs[5:9]
        decays_s, channels_s, betas_s, own_s, every_labels_s, gate_b, qk_b, v_b = refs[9:]
        dt_s, decay_s = (channels_s.at[i] for i in range(2))
        program = lax.axis_index("program")
        items = c.rows * (used_r[0] if c.packed else c.chunks)

        def item(turn):
            return program + turn * programs

        def by_token(box):
            return box.transpose((1, 0, 2))

        def fetch(array, place, head, box, barrier):
            tokens = pl.ds(place.first, CHUNK)
            plgpu.copy_gmem_to_smem(array.at[place.row, tokens, head], by_token(box), barrier)

        def fetch_gate(place):
            fetch(g_r, place, place.head, g_box, gate_b)
            if c.has_dt_bias:
                plgpu.copy_gmem_to_smem(dt_r.at[place.head], dt_s, gate_b)

        def fetch_keys(place, slot):
            fetch(k_r, place, place.key_head, k_box, qk_b)
            fetch(q_r, place, place.key_head, q_box, qk_b)
            block = pl.ds(place.chunk * CHUNK, CHUNK)
            plgpu.copy_gmem_to_smem(beta_r.at[place.out, block], betas_s.at[slot], qk_b)
            if c.packed:
                plgpu.copy_gmem_to_smem(
                    labels_r.at[place.row, block], every_labels_s.at[slot], qk_b
                )

        def send(box, array, place):
            block = pl.ds(place.chunk * CHUNK, CHUNK)
            plgpu.copy_smem_to_gmem(by_token(box), array.at[place.out, block])

        def norms():
            """ROWs: 1 / |q| times the scale, and 1 / |k|; for exact gates q k, scaled by both, is
            left in a buffer.

            They come from products of a block with itself: of exact terms, summed in float32."""
            q_scale = plgpu.layout_cast(jnp.full((CHUNK,), c.scale, F32), ROW)
            if c.bounded and not c.l2norm:
                return q_scale, None

            def step(s, sums):
                q, k = (load(ref.at[s]) for ref in (q_s, k_s))
                operands = ((q, q), (k, k), (q, k))
                return tuple(blocks.pairs(x, *y) for x, y in zip(sums, operands, strict=False))

            blank = (tiles.zeros(compact),) * (2 if c.bounded else 3)
            sums = [blocks.diagonal(x) for x in lax.fori_loop(0, slabs, step, blank)]
            k_scale = None
            if c.l2norm:
                q_scale = q_scale * lax.rsqrt(sums[0] + 1e-6)
                k_scale = lax.rsqrt(sums[1] + 1e-6)
            if not c.bounded:
                own = sums[2] * q_scale
                if c.l2norm:
                    own = own * k_scale
                own_s[...] = own
            return q_scale, k_scale

        def chunk(turn, _):
            """One of this program's chunks; what the next one needs is fetched as soon as its
            buffers are free."""
            place = Place(c, item(turn), tables_r)
            block = pl.ds(place.chunk * CHUNK, CHUNK)
            slot = jnp.bitwise_and(turn, 1)
            beta_s, labels_s = betas_s.at[slot], every_labels_s.at[slot]

            def before_next(fetch):
                following = item(turn + 1)
                pl.when(following < items)(lambda: fetch(Place(c, following, tables_r)))

            masks = Masks(c, place, lambda layout: load(labels_s, layout))

            def of_same_document(x):
                """Kd, Qd, Kr and the decay, without rows of documents other than the one live
                before, or after, the chunk."""
                kd, qd, kr, total = x
                labels = jnp.abs(load(labels_s, ROW))
                kd, qd = (masks.rows_where(labels == place.entry, y) for y in (kd, qd))
                kr = masks.rows_where(labels == place.exit, kr)
                return kd, qd, kr, jnp.where(place.entry == place.exit, total, 0.0)

            def pairs_of_same_document(parts):
                near, far = parts
                label_rows = rows(jnp.abs(load(labels_s, ROW)), compact)
                labels = [
                    jnp.abs(load(labels_s.at[pl.ds(i * BLOCK, BLOCK)], COL)) for i in range(4)
                ]
                *same, own = (
                    label_rows == cols(x, compact) for x in (*labels[:3], tiles.by_warp(*labels))
                )
                near = [jnp.where(own, x, 0.0) for x in near]
                far = [[jnp.where(s, x, 0.0) for s, x in zip(same, y, strict=True)] for y in far]
                return near, far

            a = a_r[place.head]

            for i in range(2):
                decays_s[i, 0] = tiles.zeros((SLAB,), COL) + 1.0
            plgpu.barrier_wait(qk_b)
            masks.clear(*(ref.at[i] for ref in (q_s, k_s) for i in range(slabs)))
            q_scale, k_scale = norms()
            # What the chunk before left in shared memory is on its way.
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            fetch(v_r, place, place.head, v_box, v_b)
            plgpu.barrier_wait(gate_b)

            def step(s, carry):
                near_l, near_p, far = carry
                channels = slab(s)
                dt = load(dt_s.at[channels], COL) if c.has_dt_bias else None
                g = log_decay(c, wide(load(g_s.at[s])), a, dt)
                if not c.bounded:
                    g = jnp.maximum(g, FLOOR)
                within = blocks.cumsum(masks.tiles(g))
                table = decays_s.at[lax.rem(s, 2)]
                exchange.store_decays(within, table)
                k = wide(load(k_s.at[s]))
                q = wide(load(q_s.at[s])) * rows(q_scale, tile)
                if c.l2norm:
                    k = k * rows(k_scale, tile)
                tiles.warpgroup_barrier()
                decay = functools.partial(exchange.load_row, table, n=SLAB)
                own = decay((1, 2, 3, 4))
                after = decay((2, 3, 4, 0)) * decay((3, 4, 0, 0)) * decay((4, 0, 0, 0))
                from_1 = decay((0, 0, 0, 3))
                from_0 = from_1 * decay((0, 0, 2, 2))
                before = from_0 * decay((0, 1, 1, 1))

                if c.bounded:
                    seen = tiles.exp2(within + shift)
                    k_seen, q_seen = k * seen, q * seen
                    k_back = k * tiles.exp2(-shift - within)
                    k_near, q_near = k_seen.astype(BF16), q_seen.astype(BF16)
                    back = k_back.astype(BF16)
                    near_l = (blocks.pairs(near_l[0], k_near, back),)
                    near_p = (blocks.pairs(near_p[0], q_near, back),)
                    k_end = k_back * cols(own * 2.0**shift, tile)
                else:
                    seen = tiles.exp2(within)
                    k_seen, q_seen = k * seen, q * seen
                    k_near, q_near = k_seen.astype(BF16), q_seen.astype(BF16)
                    k_end = k * tiles.exp2(cols(blocks.last_row(within), tile) - within)
                    sums_l, sums_p = list(near_l), list(near_p)
                    for level, i in HALVES:
                        e = blocks.to_middle(within, level)
                        x, y = (k * e).astype(BF16), (q * e).astype(BF16)
                        sums_l[i] = blocks.pairs(sums_l[i], x, x, 2**level)
                        sums_p[i] = blocks.pairs(sums_p[i], y, x, 2**level)
                    near_l, near_p = tuple(sums_l), tuple(sums_p)

                to_start = cols(before * 2.0**-shift, tile)
                # In warp 0 nothing lies before: its block and those after it are the chunk.
                of_state = (
                    k_seen * -to_start,
                    q_seen * to_start,
                    k_end * cols(after, tile),
                    own * after,
                )
                kd, qd, kr, total = masks.if_shared(of_same_document, of_state)
                kd_s[:, channels] = kd.astype(BF16)
                q_s.at[s][...] = qd.astype(BF16)
                k_s.at[s][...] = kr.astype(BF16)
                columns = c_s.at[lax.rem(s, 2)]
                columns[...] = k_end.astype(BF16)
                exchange.store_first_warp(total, decay_s.at[channels])
                tiles.warpgroup_barrier()
                added = []
                for i, scale in enumerate((from_0, from_1)):
                    decayed = [(x * cols(scale, tile)).astype(BF16) for x in (k_seen, q_seen)]
                    added.append(blocks.shared_pairs(far[i], decayed, columns, i))
                added.append(blocks.shared_pairs(far[2], (k_near, q_near), columns, 2))
                return near_l, near_p, tuple(added)

            blank = tuple(tiles.zeros(compact) for _ in range(1 if c.bounded else 3))
            none = ((tiles.zeros(compact),) * 2,) * 3
            near_l, near_p, far = lax.fori_loop(0, slabs, step, (blank, blank, none))
            plgpu.commit_smem()
            send(k_box, kr_r, place)
            send(q_box, qd_r, place)
            plgpu.copy_smem_to_gmem(decay_s, d_r.at[place.out, place.chunk])
            before_next(fetch_gate)

            r = jnp.bitwise_and(
                plgpu.broadcasted_iota(jnp.int32, compact, 0, layout=tiles.TILE), 15
            )
            j = plgpu.broadcasted_iota(jnp.int32, compact, 1, layout=tiles.TILE)
            if c.bounded:
                near_l = jnp.where(r > j, near_l[0], 0.0)
                near_p = jnp.where(r >= j, near_p[0], 0.0)
            else:
                near_l, near_p = (by_halves(r, j, x) for x in (near_l, near_p))
                near_p = jnp.where(r == j, rows(load(own_s, ROW), compact), near_p)
            far = [[x * 2.0**-shift for x in y] for y in zip(*far, strict=True)]
            parts = [near_l, near_p], far
            (near_l, near_p), (far_l, far_p) = masks.if_shared(pairs_of_same_document, parts)

            nothing = tiles.zeros(compact)
            read = jnp.concatenate(
                [
                    tiles.by_warp(*(nothing,) * i, near_p, *(far_p[i],) * (3 - i))
                    if i < 3
                    else tiles.by_warp(nothing, nothing, nothing, near_p)
                    for i in range(4)
                ],
                axis=1,
            )
            p_s[...] = read.astype(BF16)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(p_s, p_r.at[place.out, block])
            plgpu.wait_smem_to_gmem(2, wait_read_only=True)
            before_next(lambda place: fetch_keys(place, 1 - slot))

            betas = [write_strength(c, load(beta_s, x), x) for x in (ROW, COL)]
            beta, beta_cols = masks.vectors(betas, [ROW, COL])
            strength = rows(beta, compact)
            A = inverse.of_chunk(
                near_l * strength, [x * strength for x in far_l], x16_s, x32_s, y32_s
            )
            A = (A * cols(beta_cols, (CHUNK, CHUNK))).astype(BF16)
            if with_inverse:
                a_s[...] = A
            plgpu.barrier_wait(v_b)
            if c.packed:
                masks.clear(*(v_s.at[i] for i in range(V // CHUNK)))
            if with_inverse or c.packed:
                plgpu.commit_smem()
            if with_inverse:
                plgpu.copy_smem_to_gmem(a_s, outs[6].at[place.out, block])

            def finish(w_acc, *u_accs):
                plgpu.wgmma(w_acc, A, kd_s)
                for i, u_acc in enumerate(u_accs):
                    plgpu.wgmma(u_acc, A, v_s.at[i])
                w = tiles.read(w_acc, len(u_accs)).astype(BF16)
                u = [tiles.read(u_acc).astype(BF16) for u_acc in u_accs]
                tiles.warpgroup_barrier()
                kd_s[...] = w
                for n, part in enumerate(u):
                    v_s[n] = part
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(kd_s, w_r.at[place.out, block])
                send(v_box, u0_r, place)

            u_accs = (plgpu.ACC((CHUNK, CHUNK), F32) for _ in range(V // CHUNK))
            pl.run_scoped(finish, plgpu.ACC((CHUNK, K), F32), *u_accs)
            return ()

        first = Place(c, item(0), tables_r)
        fetch_gate(first)
        fetch_keys(first, 0)
        count = lax.div(items - program + programs - 1, jnp.int32(programs))
        lax.fori_loop(0, count, chunk, ())
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def shape(*sizes):
        return jax.ShapeDtypeStruct((c.rows, c.length, *sizes), BF16)

    decay = jax.ShapeDtypeStruct((c.rows, c.chunks, K), F32)
    in_slabs, in_halves = (slabs, SLAB), (V // CHUNK, CHUNK)
    outs = [shape(K), shape(*in_slabs), shape(*in_slabs), shape(*in_halves), shape(CHUNK), decay]
    by_slabs = functools.partial(tiles.swizzled, swizzle=2 * SLAB)
    square = tiles.swizzled((CHUNK, CHUNK))
    call = plgpu.kernel(
        body,
        out_type=(*outs, *([shape(CHUNK)] * with_inverse)),
        grid=(programs,),
        grid_names=("program",),
        scratch_types=(
            tiles.by_token((slabs, CHUNK, SLAB)),
            tiles.by_token((slabs, CHUNK, SLAB)),
            tiles.by_token((V // CHUNK, CHUNK, CHUNK)),
            tiles.by_token((slabs, CHUNK, SLAB)),
            plgpu.RefUnion(by_slabs((2, CHUNK, SLAB)), (square, square)),
            by_slabs((CHUNK, K)),
            tiles.swizzled((CHUNK, BLOCK), F16, 2 * BLOCK),
            tiles.swizzled((CHUNK, 2 * BLOCK), F16, 4 * BLOCK),
            tiles.swizzled((CHUNK, 2 * BLOCK), F16, 4 * BLOCK),
            plgpu.SMEM((2, exchange.END_ROWS, SLAB), F32),
            plgpu.SMEM((2, K), F32),
            plgpu.SMEM((2, CHUNK), F32),
            plgpu.SMEM((CHUNK,), F32),
            plgpu.SMEM((2, CHUNK), jnp.int32),
            plgpu.Barrier(num_arrivals=1 + c.has_dt_bias),
            plgpu.Barrier(num_arrivals=3 + c.packed),
            plgpu.Barrier(num_arrivals=1),
        ),
        compiler_params=tiles.compiler_params(),
        kernel_name=f"kda_prepare_{'bounded' if c.bounded else 'exact'}",
    )

    def run(q, k, v, gate, *others):
        """With the channels of token arrays as the kernel copies them: a tile of every slab, or
        half, at once."""

        def parted(x, parts):
            return x.reshape(*x.shape[:-1], *parts)

        q, k, gate = (parted(x, in_slabs) for x in (q, k, gate))
        w, kr, qd, u0, *rest = call(q, k, parted(v, in_halves), gate, *others)
        return w, *(x.reshape(c.rows, c.length, -1) for x in (kr, qd, u0)), *rest

    return run


def by_halves(r, j, sums):
    """The pairs j < r of a block, from the sums that `HALVES` names."""
    apart = jnp.bitwise_xor(r, j)
    pairs = jnp.where((r > j) & (apart < 4), jnp.where(apart < 2, sums[2], sums[1]), sums[0])
    return jnp.where(r > j, pairs, 0.0)
