"""Prepare kernel: everything of a chunk that needs no state, one program per chunk and value head.

With G the cumulative log decay of the chunk, and K' the keys decayed by its inverse, never formed
(`tiles.py`):

    Qd = exp(G) Q     Kr = exp(G_C - G) K     P = tril(Q K'^T)     L = stril(exp(G) K K'^T)
    d = exp(G_C)      Kd = exp(G) K

What the state is asked for and given is the error E = V - Kd S - L beta E; the pseudo-values are
U = beta E. Forwards beta goes to the columns, backwards to the rows:

    forward     A = (I + L beta)^-1     W = A Kd          E0 = A V     P beta     beta Kr
    backward    A = (I + beta L)^-1     W = A beta Kd                  P          Kr

so that nothing is divided by beta, nor lost where it is small. The inverse comes from block
doubling: X <- X - X L_l X with the pairs of level l turns the inverses of blocks of 2^l tokens into
those of twice the size. It is as stable as substitution, right for collinear keys too, and no
product in it has more than one level.
"""

import triton
import triton.language as tl

from .tiles import (
    CHUNK,
    LEVELS,
    crossing,
    decays,
    gate_tile,
    halves,
    in_odd_block,
    largest,
    marks_of,
    mask_at,
    scaled,
    span_of,
    unit_of,
    within,
)


@triton.jit
def norm_of(x, row, real, HEADS: tl.constexpr, K: tl.constexpr, KP: tl.constexpr):
    """1 / sqrt(sum x^2 + 1e-6) of the rows of one head; x points at the head."""
    c = tl.arange(0, CHUNK)
    d = tl.arange(0, KP)
    place = x + row * (HEADS * K) + c[:, None] * (HEADS * K) + d[None, :]
    y = tl.load(place, mask=within(real, d, K, KP), other=0.0).to(tl.float32)
    return tl.rsqrt(tl.sum(y * y, axis=1) + 1e-6)


@triton.jit
def unit_lower_inverse(L, DTYPE: tl.constexpr, PRECISION: tl.constexpr):
    """(I + L)^-1 of a strictly lower triangular `[CHUNK, CHUNK]` L."""
    c = tl.arange(0, CHUNK)
    X = tl.where(c[:, None] == c[None, :], 1.0, 0.0) - tl.where(crossing(0), L, 0.0)
    for level in tl.range(1, LEVELS):
        off = tl.where(crossing(level), L, 0.0).to(DTYPE)
        x = X.to(DTYPE)
        right = tl.dot(off, x, input_precision=PRECISION)
        X -= tl.dot(x, right.to(DTYPE), input_precision=PRECISION)
    return X


@triton.jit
def prepare(
    q, k, values, gate, beta, parameters, masks, bounds, marks,
    T, NC,
    minus_w, qd, kr, p_t, decay, e0, inverse, norms, units,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    KP: tl.constexpr, VP: tl.constexpr, BK: tl.constexpr, COLUMNS: tl.constexpr,
    GW: tl.constexpr, FORM: tl.constexpr, LOWER: tl.constexpr, PER_ROW: tl.constexpr,
    L2NORM: tl.constexpr, SCALE: tl.constexpr, PACKED: tl.constexpr, MOVED: tl.constexpr,
    SCALED: tl.constexpr, BACKWARD: tl.constexpr, PAIR: tl.constexpr, SOLVE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Tokens as `kda` has them, except beta `[B, T, HV]`, activated, float32; values is v, or
    BACKWARD the cotangent of o; parameters `[P, HV, 2, K]`, a and the bias, with P = B if PER_ROW,
    else 1; bounds `[B, NC, 2]` if MOVED; marks `[B, T]` if PACKED.

    Results are per head and chunk, `[B, HV, NC, ...]`: minus_w, qd, kr `[CHUNK, KP]` and p_t,
    P transposed, `[CHUNK, CHUNK]` in the dtype of products, decay `[KP]` float32; forward e0
    `[VP, CHUNK]`; BACKWARD instead the inverse A `[CHUNK, CHUNK]` and the inverse norms
    `[2, CHUNK]` of q and k.
    units `[VP / COLUMNS]`: in which every tile of values is held in float16, if SCALED, as e0 is.
    PAIR, SOLVE: dtypes of the operands in products of pairs and in the inverse.
    """
    pid = tl.program_id(0)
    h = pid % HV
    n = (pid // HV) % NC
    b = pid // HV // NC
    start, stop = span_of(bounds, b, n, T, NC, MOVED)
    if start >= stop:
        return
    row = b.to(tl.int64) * T + start
    at = (b * HV + h).to(tl.int64) * NC + n
    real, rank = marks_of(marks, row, stop - start, PACKED)
    c = tl.arange(0, CHUNK)
    i = c[:, None]
    j = c[None, :]
    group: tl.constexpr = HV // H
    q += h // group * K
    k += h // group * K
    DTYPE: tl.constexpr = minus_w.dtype.element_ty

    rq = tl.full([CHUNK], 1.0, tl.float32)
    rk = tl.full([CHUNK], 1.0, tl.float32)
    if L2NORM:
        rq = norm_of(q, row, real, H, K, KP)
        rk = norm_of(k, row, real, H, K, KP)
    if BACKWARD:
        tl.store(norms + at * (2 * CHUNK) + c, rq)
        tl.store(norms + at * (2 * CHUNK) + CHUNK + c, rk)
    strength = tl.load(beta + (row + c) * HV + h, mask=real, other=0.0)

    # A document that began in the chunk sees no state from before it, and the state at the end
    # holds the keys of the last document alone.
    last = tl.max(rank, axis=0)
    # L below the diagonal, the transpose of P on and above it.
    pairs = tl.zeros([CHUNK, CHUNK], tl.float32)
    for slab in tl.range(0, KP, BK):
        d = slab + tl.arange(0, BK)
        mask = within(real, d, K, KP)
        place = row * (H * K) + c[:, None] * (H * K) + d[None, :]
        kn = (tl.load(k + place, mask=mask, other=0.0).to(tl.float32) * rk[:, None]).to(PAIR)
        qn = (tl.load(q + place, mask=mask, other=0.0).to(tl.float32) * rq[:, None]).to(PAIR)
        g, _, _ = gate_tile(
            gate, parameters, row, b, h, real, d, HV, K, KP, GW, FORM, LOWER, PER_ROW
        )
        high, low = halves(g)
        own = tl.sum(qn.to(tl.float32) * kn.to(tl.float32), axis=1)
        pairs += tl.where(i == j, own[:, None], 0.0)
        for level in tl.range(0, LEVELS):
            factor = decays(mask_at(masks, level), high, low)
            # A key meets the keys of the block before it, and the queries of the block after it.
            mixed = scaled(tl.where(in_odd_block(level), qn, kn), factor)
            met = tl.dot(scaled(kn, factor), tl.trans(mixed), input_precision=PRECISION)
            pairs += tl.where(crossing(level), met, 0.0)

        prefix = decays(mask_at(masks, LEVELS), high, low)
        suffix = decays(mask_at(masks, LEVELS + 1), high, low)
        if PACKED:
            prefix = tl.where((rank == 0)[:, None], prefix, 0.0)
            suffix = tl.where((rank == last)[:, None], suffix, 0.0)
        # The last row's prefix is the chunk's.
        place = at * KP + tl.broadcast_to(d[None, :], prefix.shape)
        tl.store(decay + place, prefix, mask=within(c == CHUNK - 1, d, KP, KP))
        if not BACKWARD:
            suffix *= strength[:, None]
        place = at * (CHUNK * KP) + c[:, None] * KP + d[None, :]
        # The place of -W holds Kd until A is known.
        tl.store(minus_w + place, scaled(kn, prefix))
        tl.store(qd + place, scaled(qn, prefix))
        tl.store(kr + place, scaled(kn, suffix))

    pairs = tl.where(rank[:, None] == rank[None, :], pairs, 0.0)
    square = at * (CHUNK * CHUNK) + i * CHUNK + j
    L = tl.where(i > j, pairs, 0.0)
    pairs = tl.where(i <= j, pairs, 0.0)
    if BACKWARD:
        tl.store(p_t + square, pairs.to(DTYPE))
        A = unit_lower_inverse(L * strength[:, None], SOLVE, PRECISION)
        tl.store(inverse + square, A.to(DTYPE))
        A *= strength[None, :]
    else:
        tl.store(p_t + square, (pairs * strength[:, None]).to(DTYPE))
        A = unit_lower_inverse(L * strength[None, :], SOLVE, PRECISION)

    minus = (-A).to(DTYPE)
    tl.debug_barrier()
    for slab in tl.static_range(0, KP, BK):
        d = slab + tl.arange(0, BK)
        place = at * (CHUNK * KP) + c[:, None] * KP + d[None, :]
        W = tl.dot(minus, tl.load(minus_w + place), input_precision=PRECISION)
        tl.debug_barrier()
        tl.store(minus_w + place, W.to(DTYPE))

    TILES: tl.constexpr = VP // COLUMNS
    minus = tl.trans(minus)
    for tile in tl.static_range(0, TILES):
        if SCALED or not BACKWARD:
            e = tile * COLUMNS + tl.arange(0, COLUMNS)
            place = values + (row * HV + h) * V + c[:, None] * (HV * V) + e[None, :]
            x = tl.load(place, mask=within(real, e, V, VP), other=0.0).to(tl.float32)
            if BACKWARD:
                x *= SCALE
            unit, small = unit_of(largest(x), SCALED)
            tl.store(units + at * TILES + tile, unit)
            if not BACKWARD:
                x = (-x * small).to(DTYPE)
                E = tl.dot(tl.trans(x), minus, input_precision=PRECISION)
                tl.store(e0 + at * (VP * CHUNK) + e[:, None] * CHUNK + c[None, :], E.to(DTYPE))
