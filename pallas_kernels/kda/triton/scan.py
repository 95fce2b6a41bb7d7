"""Scan kernels: the state, forwards, and its gradient, backwards, chunk by chunk.

One program holds BV columns of one head's state, transposed, `[BV, KP]` in float32: products with
the state then read it from registers. Programs split heads, columns, and the groups of chunks that
share a state (a document each, where documents have states).

    forward    E = E0 - W S     O = Qd S + P beta E           S <- diag(d) S + (beta Kr)^T E
    reverse    dU = P^T dO + Kr dS                            dS <- diag(d) dS + Qd^T dO - W^T dU

If SCALED, operands are float16, which has three bits more than bfloat16 but no range: the state
and all that is multiplied with it are held in a unit, a power of two, that follows the state's
largest entry and the largest values. The entry is that of a chunk earlier, to be off the serial
chain, so the values of two chunks count. With normalised keys and beta <= 2 the norm of a column of
the state grows by no more than what is written, 2 x 64 values a chunk: it stays below 300 times the
largest of the three, and an error below 550 times, of which float16 holds 2,000.
"""

import triton
import triton.language as tl

from .tiles import CHUNK, largest, marks_of, span_of, unit_of


@triton.jit
def program(NC, groups, VT: tl.constexpr, HV: tl.constexpr, G: tl.constexpr, MOVED: tl.constexpr):
    """Which tile of columns, head, group of chunks and row; and the group's chunks."""
    pid = tl.program_id(0)
    tile = pid % VT
    h = (pid // VT) % HV
    group = (pid // VT // HV) % G
    b = pid // VT // HV // G
    first = 0
    end = NC
    if MOVED:
        place = groups + b * (G + 1) + group
        first = tl.load(place)
        end = tl.load(place + 1)
    return tile, h, group, b, first, end


@triton.jit
def state_at(states, b, group, h, d, e, N, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
             MOVED: tl.constexpr):  # fmt: skip
    """Pointers to a slot's state `[N, HV, K, V]` of a row, transposed, and their mask: slot n of
    group n + 1 where documents own slots, else slot 0 of the one group."""
    slot = group
    owned = group == 0
    if MOVED:
        slot = group - 1
        owned = (slot >= 0) & (slot < N)
    slot = tl.where(owned, slot, 0)
    place = ((b.to(tl.int64) * N + slot) * HV + h) * (K * V)
    mask = (d < K)[None, :] & (e < V)[:, None] & owned
    return states + place + d[None, :] * V + e[:, None], mask


@triton.jit
def scan(
    minus_w, qd, kr, p_t, decay, e0, units, initial, bounds, groups,
    T, NC, N,
    o, final, states, errors, scales,
    HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, KP: tl.constexpr, VP: tl.constexpr,
    BV: tl.constexpr, G: tl.constexpr, SCALE: tl.constexpr, MOVED: tl.constexpr,
    HAS_INITIAL: tl.constexpr, HAS_FINAL: tl.constexpr, SAVE: tl.constexpr,
    SCALED: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Prepared chunks as `prepare` leaves them; initial, final `[B, N, HV, K, V]` float32; groups
    `[B, G + 1]`. o is `[B, T, HV, V]`. SAVE: the state before every chunk, states
    `[B, HV, NC, VP, KP]`, and E, errors `[B, HV, NC, VP, CHUNK]`, in units scales
    `[B, HV, NC, VP / BV]`.
    """
    VT: tl.constexpr = VP // BV
    tile, h, group, b, first, end = program(NC, groups, VT, HV, G, MOVED)
    c = tl.arange(0, CHUNK)
    d = tl.arange(0, KP)
    e = tile * BV + tl.arange(0, BV)
    DTYPE: tl.constexpr = minus_w.dtype.element_ty
    S = tl.zeros([BV, KP], tl.float32)
    size = 0.0
    if HAS_INITIAL:
        slot, owned = state_at(initial, b, group, h, d, e, N, HV, K, V, MOVED)
        S = tl.load(slot, mask=owned, other=0.0)
        if SCALED:
            size = largest(S)
    head = (b * HV + h).to(tl.int64) * NC
    tall = c[:, None] * KP + d[None, :]
    wide = e[:, None] * CHUNK + c[None, :]
    unit = 1.0
    own = 1.0
    reach = 0.0
    if SCALED:
        reach = tl.load(units + (head + first) * VT + tile, mask=first < end, other=0.0)
    for n in tl.range(first, end, num_stages=STAGES):
        at = head + n
        w_n = tl.load(minus_w + at * (CHUNK * KP) + tall)
        e0_n = tl.load(e0 + at * (VP * CHUNK) + wide)
        qd_n = tl.load(qd + at * (CHUNK * KP) + tall)
        kr_n = tl.load(kr + at * (CHUNK * KP) + tall)
        p_n = tl.load(p_t + at * (CHUNK * CHUNK) + c[:, None] * CHUNK + c[None, :])
        decay_n = tl.load(decay + at * KP + d)
        start, stop = span_of(bounds, b, n, T, NC, MOVED)
        ratio = 1.0
        if SCALED:
            # Units of values are 1/16 to 1/32 of the largest.
            new, small = unit_of(tl.maximum(size * unit, 32.0 * reach), SCALED)
            own = tl.load(units + at * VT + tile)
            following = tl.load(units + (at + 1) * VT + tile, mask=n + 1 < end, other=0.0)
            reach = tl.maximum(own, following)
            own *= small
            ratio = unit * small
            size = largest(S) * ratio
            unit = new
        s = (S * ratio).to(DTYPE)
        if SAVE:
            tl.store(states + at * (VP * KP) + e[:, None] * KP + d[None, :], s)
            tl.store(scales + at * VT + tile, unit)
        E = e0_n.to(tl.float32) * own
        E = tl.dot(s, tl.trans(w_n), acc=E, input_precision=PRECISION)
        out = tl.dot(s, tl.trans(qd_n), input_precision=PRECISION)
        err = E.to(DTYPE)
        if SAVE:
            tl.store(errors + at * (VP * CHUNK) + wide, err)
        S = tl.dot(err, kr_n, acc=S * (decay_n * ratio)[None, :], input_precision=PRECISION)
        out = tl.dot(err, p_n, acc=out, input_precision=PRECISION)
        row = b.to(tl.int64) * T + start
        mask = (start + c < stop)[None, :] & (e < V)[:, None]
        place = o + (row * HV + h) * V + c[None, :] * (HV * V) + e[:, None]
        tl.store(place, (out * (unit * SCALE)).to(o.dtype.element_ty), mask=mask)
    if HAS_FINAL:
        slot, owned = state_at(final, b, group, h, d, e, N, HV, K, V, MOVED)
        tl.store(slot, S * unit, mask=owned)


@triton.jit
def reverse_scan(
    minus_w, qd, kr, p_t, decay, do, units, dfinal, bounds, groups, marks,
    T, NC, N,
    dinitial, dstates, dvalues, scales,
    HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, KP: tl.constexpr, VP: tl.constexpr,
    BV: tl.constexpr, G: tl.constexpr, SCALE: tl.constexpr, PACKED: tl.constexpr,
    MOVED: tl.constexpr, HAS_INITIAL: tl.constexpr, HAS_FINAL: tl.constexpr,
    SCALED: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """do `[B, T, HV, V]`; dfinal, dinitial `[B, N, HV, K, V]` float32. Leaves the gradient of the
    state after every chunk, dstates `[B, HV, NC, VP, KP]`, and that of U from O and the state,
    dvalues `[B, HV, NC, VP, CHUNK]`, in units scales `[B, HV, NC, VP / BV]`.
    """
    VT: tl.constexpr = VP // BV
    tile, h, group, b, first, end = program(NC, groups, VT, HV, G, MOVED)
    c = tl.arange(0, CHUNK)
    d = tl.arange(0, KP)
    e = tile * BV + tl.arange(0, BV)
    DTYPE: tl.constexpr = minus_w.dtype.element_ty
    dS = tl.zeros([BV, KP], tl.float32)
    size = 0.0
    if HAS_FINAL:
        slot, owned = state_at(dfinal, b, group, h, d, e, N, HV, K, V, MOVED)
        dS = tl.load(slot, mask=owned, other=0.0)
        if SCALED:
            size = largest(dS)
    head = (b * HV + h).to(tl.int64) * NC
    tall = c[:, None] * KP + d[None, :]
    unit = 1.0
    reach = 0.0
    if SCALED:
        reach = tl.load(units + (head + end - 1) * VT + tile, mask=first < end, other=0.0)
    for step in tl.range(0, end - first, num_stages=STAGES):
        n = end - 1 - step
        at = head + n
        start, stop = span_of(bounds, b, n, T, NC, MOVED)
        row = b.to(tl.int64) * T + start
        real, _ = marks_of(marks, row, stop - start, PACKED)
        place = do + (row * HV + h) * V + c[None, :] * (HV * V) + e[:, None]
        do_n = tl.load(place, mask=real[None, :] & (e < V)[:, None], other=0.0)
        p_n = tl.load(p_t + at * (CHUNK * CHUNK) + c[:, None] * CHUNK + c[None, :])
        kr_n = tl.load(kr + at * (CHUNK * KP) + tall)
        qd_n = tl.load(qd + at * (CHUNK * KP) + tall)
        w_n = tl.load(minus_w + at * (CHUNK * KP) + tall)
        decay_n = tl.load(decay + at * KP + d)
        ratio = 1.0
        small = 1.0
        if SCALED:
            new, small = unit_of(tl.maximum(size * unit, 32.0 * reach), SCALED)
            own = tl.load(units + at * VT + tile)
            following = tl.load(units + (at - 1) * VT + tile, mask=n > first, other=0.0)
            reach = tl.maximum(own, following)
            ratio = unit * small
            size = largest(dS) * ratio
            unit = new
        g = (do_n.to(tl.float32) * (small * SCALE)).to(DTYPE)
        ds = (dS * ratio).to(DTYPE)
        tl.store(dstates + at * (VP * KP) + e[:, None] * KP + d[None, :], ds)
        tl.store(scales + at * VT + tile, unit)
        dU = tl.dot(g, tl.trans(p_n), input_precision=PRECISION)
        dU = tl.dot(ds, tl.trans(kr_n), acc=dU, input_precision=PRECISION)
        du = dU.to(DTYPE)
        tl.store(dvalues + at * (VP * CHUNK) + e[:, None] * CHUNK + c[None, :], du)
        dS = tl.dot(g, qd_n, acc=dS * (decay_n * ratio)[None, :], input_precision=PRECISION)
        dS = tl.dot(du, w_n, acc=dS, input_precision=PRECISION)
    if HAS_INITIAL:
        slot, owned = state_at(dinitial, b, group, h, d, e, N, HV, K, V, MOVED)
        tl.store(slot, dS * unit, mask=owned)
