"""What the kernels share: where a chunk's tokens are, their decays, and masks of pairs.

Log decays are held in base 2. As in `pairs.py`, pairs j < i of a chunk are split by halves: with
l the highest bit in which i and j differ, the pair belongs to level l, i lies in an odd block of
2^l tokens and j in the even block before it. The row's factor decays from the middle between the
two up to i, the column's from j up to the middle, so that one factor per token and level serves
both roles (`level_sums`), is at most 1 for any gate and depends on no token after its row.
"""

import triton
import triton.language as tl

# exp2 of it is 0 beside anything that float32 adds it to; more of it would only cost the digits of
# the sums that it is part of.
FORGET = tl.constexpr(-128.0)
LOG2E = tl.constexpr(1.4426950408889634)
CHUNK = tl.constexpr(64)
LEVELS = tl.constexpr(6)


@triton.jit
def span_of(bounds, b, n, T, NC, MOVED: tl.constexpr):
    """First token of chunk n of row b, and the one after its last."""
    if MOVED:
        place = bounds + (b * NC + n) * 2
        start = tl.load(place)
        stop = tl.load(place + 1)
    else:
        start = n * CHUNK
        stop = tl.minimum(start + CHUNK, T)
    return start, stop


@triton.jit
def marks_of(marks, row, tokens, PACKED: tl.constexpr):
    """Which places hold a real token, and how many documents began in the chunk up to each.

    row: the place of the chunk's first token in `marks`; tokens: how many the chunk has.
    """
    c = tl.arange(0, CHUNK)
    real = c < tokens
    rank = tl.zeros([CHUNK], tl.int32)
    if PACKED:
        mark = tl.load(marks + row + c, mask=real, other=0).to(tl.int32)
        rank = tl.cumsum(mark >> 1, axis=0)
        real = (mark & 1) == 1
    return real, rank


@triton.jit
def within(rows, columns, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """The mask of a tile of rows whose padded columns hold nothing."""
    mask = rows[:, None] & (columns >= 0)[None, :]
    if WIDTH != PADDED:
        mask = mask & (columns < WIDTH)[None, :]
    return mask


@triton.jit
def softplus(x):
    """log(1 + exp x) that keeps its relative accuracy for negative x."""
    e = tl.exp(-tl.abs(x))
    u = 1.0 + e
    log1p = tl.where(u == 1.0, e, tl.log(u) * (e / tl.where(u == 1.0, 1.0, u - 1.0)))
    return tl.maximum(x, 0.0) + log1p


@triton.jit
def sigmoid(x):
    """1 / (1 + exp(-x)); a reciprocal root costs less than a division."""
    root = tl.rsqrt(1.0 + tl.exp2(-LOG2E * x))
    return root * root


@triton.jit
def sigmoid_slope(x):
    """The derivative of `sigmoid`, right where it saturates too."""
    e = tl.exp2(-LOG2E * tl.abs(x))
    root = tl.rsqrt(1.0 + e)
    return e * (root * root) * (root * root)


@triton.jit
def log2_decay(x, a, FORM: tl.constexpr, LOWER: tl.constexpr):
    """Log decay, base 2, of a raw gate x (its bias added): `gates.log_decay`."""
    if FORM == "bounded":
        g = (LOWER * LOG2E) * sigmoid(a * x)
    elif FORM == "softplus":
        g = -LOG2E * a * softplus(x)
    else:
        g = LOG2E * x
    return tl.maximum(g, FORGET)


@triton.jit
def gate_tile(
    gate, parameters, row, b, h, real, d, HV: tl.constexpr, K: tl.constexpr, KP: tl.constexpr,
    GW: tl.constexpr, FORM: tl.constexpr, LOWER: tl.constexpr, PER_ROW: tl.constexpr,
):  # fmt: skip
    """A tile `[CHUNK, len(d)]` of a chunk's gates.

    Returns: the log decay, base 2, 0 where there is no token; the gate with its bias; and a.
    """
    c = tl.arange(0, CHUNK)
    mask = within(real, d, K, KP)
    x = tl.zeros([CHUNK, d.shape[0]], tl.float32)
    scale = 1.0
    if GW == 1:
        one = tl.load(gate + (row + c) * HV + h, mask=real, other=0.0).to(tl.float32)
        x = tl.where(mask, one[:, None], 0.0)
    elif GW > 1:
        place = gate + (row * HV + h) * K + c[:, None] * (HV * K) + d[None, :]
        x = tl.load(place, mask=mask, other=0.0).to(tl.float32)
    if FORM == "bounded" or FORM == "softplus":
        head = h
        if PER_ROW:
            head = b * HV + h
        scale = tl.load(parameters + head * (2 * K))
        x += tl.load(parameters + head * (2 * K) + K + d, mask=d < K, other=0.0)[None, :]
    g = log2_decay(x, scale, FORM, LOWER)
    return tl.where(mask, g, 0.0), x, scale


@triton.jit
def largest(x):
    """The largest magnitude in a tile."""
    return tl.max(tl.max(tl.abs(x), axis=1), axis=0)


@triton.jit
def reciprocal(unit, SCALED: tl.constexpr):
    """1 / unit of a power of two, to the bit."""
    inverse = 1.0
    if SCALED:
        inverse = (0x7F000000 - unit.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)
    return inverse


@triton.jit
def unit_of(x, SCALED: tl.constexpr):
    """The power of two in which float16 holds values up to x >= 0 in size, which is 16 to 32 of
    them; 1 where operands are not SCALED. Returns it and its inverse."""
    unit = 1.0
    if SCALED:
        bits = (0.0625 * x).to(tl.int32, bitcast=True) & 0x7F800000
        bits = tl.minimum(tl.maximum(bits, 0x10000000), 0x70000000)
        unit = bits.to(tl.float32, bitcast=True)
    return unit, reciprocal(unit, SCALED)


@triton.jit
def halves(g):
    """g as the sum of two float16, 22 bits of it."""
    high = g.to(tl.float16)
    return high, (g - high.to(tl.float32)).to(tl.float16)


@triton.jit
def scaled(x, factor):
    """x times a factor in [0, 1], in x's dtype: float16 has bits to spare, bfloat16 has none."""
    if x.dtype == tl.float16:
        y = x * factor.to(tl.float16)
    else:
        y = (x.to(tl.float32) * factor).to(x.dtype)
    return y


@triton.jit
def mask_at(masks, level):
    """One of the matrices of `operation.masks`, `[CHUNK, CHUNK]`."""
    c = tl.arange(0, CHUNK)
    return tl.load(masks + level * (CHUNK * CHUNK) + c[:, None] * CHUNK + c[None, :])


@triton.jit
def decays(mask, high, low):
    """exp2 of sum_j mask[i, j] g[j], of which each product is exact."""
    return tl.exp2(tl.dot(mask, low, acc=tl.dot(mask, high)))


@triton.jit
def gathered(turned, x, PRECISION: tl.constexpr):
    """sum_j turned[i, j] x[j]: from the gradient of such sums to that of g. Products of half
    precision see 16 bits of x, whatever its range."""
    DTYPE: tl.constexpr = turned.dtype
    high = x.to(DTYPE)
    total = tl.dot(turned, high, input_precision=PRECISION)
    if high.dtype != tl.float32:
        total = tl.dot(turned, (x - high.to(tl.float32)).to(DTYPE), acc=total)
    return total


@triton.jit
def crossing(level):
    """`[CHUNK, CHUNK]`: the pairs of a level, in both orders."""
    block = tl.arange(0, CHUNK) >> level
    return (block[:, None] ^ 1) == block[None, :]


@triton.jit
def in_odd_block(level):
    """`[CHUNK, 1]`: the tokens that are the later ones of their level's pairs."""
    return (((tl.arange(0, CHUNK) >> level) & 1) == 1)[:, None]
