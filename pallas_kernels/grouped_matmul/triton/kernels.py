"""The Triton kernels: rows times the matrix of their group, and the gradient of the matrices."""

import triton
import triton.language as tl


@triton.jit
def by_rows(
    rows, weights, table, used, tiles, groups,
    out,
    K: tl.constexpr, M: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr, TRANSPOSED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """rows `[N, K]`, weights `[G, K, M]`, or `[G, M, K]` if TRANSPOSED; table `[3, tiles]`, used
    `[1]` of `schedule`; out `[N, M]`."""
    ACROSS: tl.constexpr = (M + COLUMNS - 1) // COLUMNS
    tile = tl.program_id(0) // ACROSS
    if tile < tl.load(used):
        group = tl.load(table + tile)
        row = tl.load(table + tiles + tile) + tl.arange(0, ROWS)
        inside = row < tl.load(table + 2 * tiles + tile)
        column = (tl.program_id(0) % ACROSS) * COLUMNS + tl.arange(0, COLUMNS)
        kept = column < M
        k = tl.arange(0, DEPTH)
        # The rows past the last group have no matrix, and take no step.
        real = group < groups
        matrix = weights + tl.where(real, group, 0).to(tl.int64) * (K * M)
        left = rows + row.to(tl.int64)[:, None] * K + k[None, :]
        if TRANSPOSED:
            right = matrix + column[None, :] * K + k[:, None]
        else:
            right = matrix + k[:, None] * M + column[None, :]
        acc = tl.zeros([ROWS, COLUMNS], tl.float32)
        for first in range(0, tl.where(real, K, 0), DEPTH):
            if K % DEPTH == 0:
                a = tl.load(left, mask=inside[:, None], other=0.0)
                b = tl.load(right, mask=kept[None, :], other=0.0)
            else:
                part = k < K - first
                a = tl.load(left, mask=inside[:, None] & part[None, :], other=0.0)
                b = tl.load(right, mask=kept[None, :] & part[:, None], other=0.0)
            acc = tl.dot(a, b, acc=acc, input_precision=PRECISION)
            left += DEPTH
            if TRANSPOSED:
                right += DEPTH
            else:
                right += DEPTH * M
        place = out + row.to(tl.int64)[:, None] * M + column[None, :]
        tl.store(place, acc.to(out.dtype.element_ty), mask=inside[:, None] & kept[None, :])


@triton.jit
def by_group(
    rows, cotangent, bounds,
    out,
    K: tl.constexpr, M: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """rows `[N, K]`, cotangent `[N, M]`, bounds `[G + 1]` of `schedule`; out `[G, K, M]`."""
    DOWN: tl.constexpr = (K + ROWS - 1) // ROWS
    ACROSS: tl.constexpr = (M + COLUMNS - 1) // COLUMNS
    tile = tl.program_id(0) // ACROSS
    group = tile // DOWN
    channel = (tile % DOWN) * ROWS + tl.arange(0, ROWS)
    column = (tl.program_id(0) % ACROSS) * COLUMNS + tl.arange(0, COLUMNS)
    start = tl.load(bounds + group)
    stop = tl.load(bounds + group + 1)
    n = start + tl.arange(0, DEPTH)
    left = rows + n.to(tl.int64)[:, None] * K + channel[None, :]
    right = cotangent + n.to(tl.int64)[:, None] * M + column[None, :]
    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in range(start, stop, DEPTH):
        own = (first + tl.arange(0, DEPTH) < stop)[:, None]
        a = tl.load(left, mask=own & (channel < K)[None, :], other=0.0)
        b = tl.load(right, mask=own & (column < M)[None, :], other=0.0)
        acc = tl.dot(tl.trans(a), b, acc=acc, input_precision=PRECISION)
        left += DEPTH * K
        right += DEPTH * M
    place = out + group.to(tl.int64) * (K * M) + channel[:, None] * M + column[None, :]
    kept = (channel < K)[:, None] & (column < M)[None, :]
    tl.store(place, acc.to(out.dtype.element_ty), mask=kept)
