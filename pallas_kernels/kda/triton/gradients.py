"""Gradients of the tokens, one program per chunk, head and slab of channels; no state is carried.

`value_gradients` needs no keys. With dR = A^T dU, the gradient of every pseudo-value U = beta E
with all that follows from it in the chunk:

    dV = beta dR    dbeta = dR . E    d(K K'^T) = -stril(dV U^T)    dP = tril(dO U^T)

and the products of q and k with their own gradients, which are those of O and V, U with theirs: o
is linear in q, while k reads V - E from the state and writes k U^T, hence

    q . dq = O . dO          k . dk = 2 U . dR - V . dV

With these the gradient of an L2 norm needs no sum over channels, and `key_gradients` may split
them. It takes the pairs apart by levels as `prepare` does; every factor's gradient goes to the log
decays that it sums, so nothing cancels and a pair i == j has none.
"""

import triton
import triton.language as tl

from .tiles import (
    CHUNK,
    LEVELS,
    crossing,
    decays,
    gate_tile,
    gathered,
    halves,
    in_odd_block,
    largest,
    marks_of,
    mask_at,
    reciprocal,
    scaled,
    sigmoid,
    sigmoid_slope,
    softplus,
    span_of,
    unit_of,
    within,
)


@triton.jit
def value_gradients(
    v, do, o, beta, inverse, errors, scales, dvalues, dscales, bounds, marks,
    T, NC,
    dv, dbeta, dpairs, pair_units, products, sides,
    HV: tl.constexpr, V: tl.constexpr, VP: tl.constexpr, BV: tl.constexpr,
    COLUMNS: tl.constexpr, SCALE: tl.constexpr, PACKED: tl.constexpr,
    MOVED: tl.constexpr, SCALED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """v, do, o, dv `[B, T, HV, V]`; beta, dbeta `[B, T, HV]` float32; the rest as the other kernels
    leave it. Per chunk, for `key_gradients`: dpairs `[CHUNK, CHUNK]` in a unit pair_units `[1]`,
    the gradients of the pairs k k below the diagonal and of q k, transposed, above it; products
    `[3, CHUNK]` float32, q . dq, k . dk and the gradient of the pairs q k on the diagonal; sides
    `[2, CHUNK, VP]`, scale dO and dV in the units of dvalues.
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
    inside = c < stop - start
    DTYPE: tl.constexpr = inverse.dtype.element_ty
    A = tl.load(inverse + at * (CHUNK * CHUNK) + i * CHUNK + j)
    strength = tl.load(beta + (row + c) * HV + h, mask=real, other=0.0)

    KK = tl.zeros([CHUNK, CHUNK], tl.float32)
    QK = tl.zeros([CHUNK, CHUNK], tl.float32)
    used = tl.zeros([CHUNK], tl.float32)
    given = tl.zeros([CHUNK], tl.float32)
    answered = tl.zeros([CHUNK], tl.float32)
    SLABS: tl.constexpr = VP // BV
    for slab in tl.range(0, SLABS):
        e = slab * BV + tl.arange(0, BV)
        tile = at * (VP // COLUMNS) + slab * BV // COLUMNS
        scale = tl.load(scales + tile)
        dscale = tl.load(dscales + tile)
        dsmall = reciprocal(dscale, SCALED)
        both = scale * dscale
        wide = at * (VP * CHUNK) + e[:, None] * CHUNK + c[None, :]
        place = (row * HV + h) * V + c[:, None] * (HV * V) + e[None, :]
        side = sides + at * (2 * CHUNK * VP) + c[:, None] * VP + e[None, :]
        mask = within(real, e, V, VP)
        E = tl.load(errors + wide)
        dR = tl.trans(tl.dot(tl.load(dvalues + wide), A, input_precision=PRECISION))
        used += tl.sum(dR * tl.trans(E).to(tl.float32), axis=1) * both
        dV = dR * strength[:, None]
        low = dV.to(DTYPE)
        tl.store(side + CHUNK * VP, low)
        KK -= tl.dot(low, E, input_precision=PRECISION) * both
        dV *= dscale
        given += tl.sum(dV * tl.load(v + place, mask=mask, other=0.0).to(tl.float32), axis=1)
        dV = tl.where(mask, dV, 0.0).to(dv.dtype.element_ty)
        tl.store(dv + place, dV, mask=within(inside, e, V, VP))
        g = tl.load(do + place, mask=mask, other=0.0).to(tl.float32)
        y = tl.load(o + place, mask=mask, other=0.0).to(tl.float32)
        answered += tl.sum(y * g, axis=1)
        low = (g * (dsmall * SCALE)).to(DTYPE)
        tl.store(side, low)
        QK += tl.dot(tl.trans(E), tl.trans(low), input_precision=PRECISION) * both

    QK *= strength[:, None]
    products += at * (3 * CHUNK) + c
    tl.store(products, answered)
    tl.store(products + CHUNK, 2.0 * strength * used - given)
    tl.store(products + 2 * CHUNK, tl.sum(tl.where(i == j, QK, 0.0), axis=1))
    pairs = tl.where(i > j, KK * strength[None, :], QK)
    pairs = tl.where((rank[:, None] == rank[None, :]) & (i != j), pairs, 0.0)
    # The two may differ in size: float16 holds both best near its upper end.
    unit, small = unit_of(largest(pairs) * 2.0**-10, SCALED)
    tl.store(dpairs + at * (CHUNK * CHUNK) + i * CHUNK + j, (pairs * small).to(DTYPE))
    tl.store(pair_units + at, unit)
    tl.store(dbeta + (row + c) * HV + h, tl.where(real, used, 0.0), mask=inside)


@triton.jit
def key_gradients(
    q, k, gate, beta, parameters, decay, sides, errors, states, scales, dstates, dscales,
    dpairs, pair_units, products, norms, masks, turned, bounds, marks,
    T, NC,
    dq, dk, dgate, da, dbias,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    KP: tl.constexpr, VP: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, COLUMNS: tl.constexpr,
    GW: tl.constexpr, FORM: tl.constexpr, LOWER: tl.constexpr, PER_ROW: tl.constexpr,
    L2NORM: tl.constexpr, PACKED: tl.constexpr, MOVED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """What the other kernels leave, to dq, dk `[B, T, HV, K]` (per value head), dgate
    `[B, T, HV, K]` (where GW == 1 `[B, T, HV, KP / BK]`, per slab), and, per chunk, the gradients
    of a and bias, da and dbias `[B, NC, HV, K]` float32.
    """
    SLABS: tl.constexpr = KP // BK
    pid = tl.program_id(0)
    slab = pid % SLABS
    h = (pid // SLABS) % HV
    n = (pid // SLABS // HV) % NC
    b = pid // SLABS // HV // NC
    d = slab * BK + tl.arange(0, BK)
    c = tl.arange(0, CHUNK)
    i = c[:, None]
    j = c[None, :]
    start, stop = span_of(bounds, b, n, T, NC, MOVED)
    parameter = ((b.to(tl.int64) * NC + n) * HV + h) * K + d
    if start >= stop:
        if FORM == "bounded" or FORM == "softplus":
            tl.store(da + parameter, tl.zeros([BK], tl.float32), mask=d < K)
            tl.store(dbias + parameter, tl.zeros([BK], tl.float32), mask=d < K)
        return
    row = b.to(tl.int64) * T + start
    at = (b * HV + h).to(tl.int64) * NC + n
    real, rank = marks_of(marks, row, stop - start, PACKED)
    inside = c < stop - start
    DTYPE: tl.constexpr = dpairs.dtype.element_ty
    group: tl.constexpr = HV // H

    # Gradients of Qd, -Kd, Kr / beta and of the chunk's decay.
    dQ = tl.zeros([CHUNK, BK], tl.float32)
    dK = tl.zeros([CHUNK, BK], tl.float32)
    dR = tl.zeros([CHUNK, BK], tl.float32)
    kept = tl.zeros([BV, BK], tl.float32)
    VSLABS: tl.constexpr = VP // BV
    for part in tl.range(0, VSLABS):
        e = part * BV + tl.arange(0, BV)
        of = at * (VP // COLUMNS) + part * BV // COLUMNS
        both = tl.load(scales + of) * tl.load(dscales + of)
        state = at * (VP * KP) + e[:, None] * KP + d[None, :]
        side = sides + at * (2 * CHUNK * VP) + c[:, None] * VP + e[None, :]
        S = tl.load(states + state)
        dS = tl.load(dstates + state)
        dQ += tl.dot(tl.load(side), S, input_precision=PRECISION) * both
        dK += tl.dot(tl.load(side + CHUNK * VP), S, input_precision=PRECISION) * both
        E = tl.load(errors + at * (VP * CHUNK) + e[:, None] * CHUNK + c[None, :])
        dR += tl.dot(tl.trans(E), dS, input_precision=PRECISION) * both
        kept += S.to(tl.float32) * dS.to(tl.float32) * both
    dtotal = tl.sum(kept, axis=0) * tl.load(decay + at * KP + d)

    mask = within(real, d, K, KP)
    place = row * (H * K) + h // group * K + c[:, None] * (H * K) + d[None, :]
    rq = tl.load(norms + at * (2 * CHUNK) + c)
    rk = tl.load(norms + at * (2 * CHUNK) + CHUNK + c)
    qn = tl.load(q + place, mask=mask, other=0.0).to(tl.float32) * rq[:, None]
    kn = tl.load(k + place, mask=mask, other=0.0).to(tl.float32) * rk[:, None]
    g, _, _ = gate_tile(gate, parameters, row, b, h, real, d, HV, K, KP, GW, FORM, LOWER, PER_ROW)
    high, low = halves(g)
    strength = tl.load(beta + (row + c) * HV + h, mask=real, other=0.0)
    prefix = decays(mask_at(masks, LEVELS), high, low)
    suffix = decays(mask_at(masks, LEVELS + 1), high, low)
    if PACKED:
        last = tl.max(rank, axis=0)
        prefix = tl.where((rank == 0)[:, None], prefix, 0.0)
        suffix = tl.where((rank == last)[:, None], suffix, 0.0)
    dQ *= prefix
    dK *= -prefix
    dR *= suffix * strength[:, None]
    dG = dtotal[None, :] + gathered(mask_at(turned, LEVELS), qn * dQ + kn * dK, PRECISION)
    dG += gathered(mask_at(turned, LEVELS + 1), kn * dR, PRECISION)
    own = tl.load(products + at * (3 * CHUNK) + 2 * CHUNK + c)[:, None]
    dQ += own * kn
    dK += own * qn + dR

    pairs = tl.load(dpairs + at * (CHUNK * CHUNK) + i * CHUNK + j)
    unit = tl.load(pair_units + at)
    qn = qn.to(DTYPE)
    kn = kn.to(DTYPE)
    for level in tl.range(0, LEVELS):
        factor = decays(mask_at(masks, level), high, low)
        odd = in_odd_block(level)
        mixed = tl.where(odd, qn, kn)
        met = tl.where(crossing(level), pairs, 0.0)
        x = tl.dot(met, scaled(mixed, factor), input_precision=PRECISION)
        y = tl.dot(tl.trans(met), scaled(kn, factor), input_precision=PRECISION)
        factor *= unit
        x *= factor
        y *= factor
        dQ += tl.where(odd, y, 0.0)
        dK += x + tl.where(odd, 0.0, y)
        x = kn.to(tl.float32) * x + mixed.to(tl.float32) * y
        dG += gathered(mask_at(turned, level), x, PRECISION)

    # Tokens and gates are read again, from what the caches hold, rather than kept through the loop;
    # the barrier keeps the compiler from merging the two.
    tl.debug_barrier()
    # From the log decay to the raw gate.
    if GW > 0:
        _, raw, slope = gate_tile(
            gate, parameters, row, b, h, real, d, HV, K, KP, GW, FORM, LOWER, PER_ROW
        )
        dG = tl.where(mask, dG, 0.0)
        if FORM == "bounded":
            dz = dG * LOWER * sigmoid_slope(slope * raw)
            tl.store(da + parameter, tl.sum(dz * raw, axis=0), mask=d < K)
            dG = dz * slope
            tl.store(dbias + parameter, tl.sum(dG, axis=0), mask=d < K)
        elif FORM == "softplus":
            tl.store(da + parameter, -tl.sum(dG * softplus(raw), axis=0), mask=d < K)
            dG = -dG * slope * sigmoid(raw)
            tl.store(dbias + parameter, tl.sum(dG, axis=0), mask=d < K)
        TYPE: tl.constexpr = dgate.dtype.element_ty
        if GW == 1:
            place = ((row + c) * HV + h) * SLABS + slab
            tl.store(dgate + place, tl.sum(dG, axis=1), mask=inside)
        else:
            place = (row * HV + h) * K + c[:, None] * (HV * K) + d[None, :]
            tl.store(dgate + place, dG.to(TYPE), mask=within(inside, d, K, KP))

    if L2NORM:
        place = row * (H * K) + h // group * K + c[:, None] * (H * K) + d[None, :]
        qn = tl.load(q + place, mask=mask, other=0.0).to(tl.float32) * rq[:, None]
        kn = tl.load(k + place, mask=mask, other=0.0).to(tl.float32) * rk[:, None]
        dQ = rq[:, None] * (dQ - qn * tl.load(products + at * (3 * CHUNK) + c)[:, None])
        dK = rk[:, None] * (dK - kn * tl.load(products + at * (3 * CHUNK) + CHUNK + c)[:, None])
    place = (row * HV + h) * K + c[:, None] * (HV * K) + d[None, :]
    store = within(inside, d, K, KP)
    tl.store(dq + place, tl.where(mask, dQ, 0.0).to(dq.dtype.element_ty), mask=store)
    tl.store(dk + place, tl.where(mask, dK, 0.0).to(dk.dtype.element_ty), mask=store)
