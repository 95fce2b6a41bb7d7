"""K1, inside a kernel: what the chunks of a grid step need before they see a state.

With G the cumulative log decay of a chunk, for all pairs of heads of a grid step at once:

    Kd = exp(G) K      Qd = exp(G) Q      Kr = exp(G_C - G) K                       KLR eq. 6-8
    M = stril(K exp(G_i - G_j) K^T)       P = tril(Q exp(G_i - G_j) K^T)

No factor overflows, whatever the gate. A block of `plan.anchored` tokens is short enough that its
rows may decay from one anchor and its columns grow towards it, both by at most e^`plan.reach`; the
anchor lies before the block, so that later tokens change no bit of an earlier row. Outputs are
scaled, not queries: that would push them out of range. Blocks are then merged by halves as in
`pairs.halving`: a pair that crosses the middle of a larger block decays up to the middle and on
from it, and every exponent is at most 0. Log decays are summed in units of log 2.
"""

import functools
import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from .activate import LOG2E, Norms, Raw, keys_cut, l2norm, log2_decay
from .marks import Marks
from .plan import Plan
from .tiles import CHUNK, NN, NT, PAIR, Parts, above, apart, beside, dot, iota, split


class Level(NamedTuple):
    """Pairs across the middles of blocks of 2 `size` tokens: `rows` `[n, C, 2K]` are the keys, then
    the queries, of right halves, `columns` `[n, C, 2K]` the keys of left halves and zeros, both in
    the products' dtype, these in parts; `ahead` and `behind` `[n, C / 2, 2K]` are their decays."""

    size: int
    rows: jax.Array
    columns: Parts
    ahead: jax.Array
    behind: jax.Array


class Prepared(NamedTuple):
    """Of n pairs of heads.

    q, k: activated `[n, C, 2K]`, in float32; norms are None without the L2 norm.
    rows, columns: factors of the anchored blocks, `[n, 2C, 2K]` (keys, then queries) and
      `[n, C, 2K]` in the products' dtype, with their decays `[n, C, 2K]`.
    enter, leave, decay: decays from the chunk's start up to a token and from after it to the end,
      `[n, C, 2K]`, and of the chunk, `[n, 1, 2K]`.
    delta, read: M, without beta in it, and P, `[n, C, 128]`.
    k_in, q_in, k_out: Kd, Qd and Kr, `[n, C, 2K]` in float32.
    """

    q: jax.Array
    k: jax.Array
    q_norm: Norms | None
    k_norm: Norms | None
    rows: jax.Array
    columns: jax.Array
    row_decay: jax.Array
    column_decay: jax.Array
    levels: list[Level]
    enter: jax.Array
    leave: jax.Array
    decay: jax.Array
    delta: jax.Array
    read: jax.Array
    k_in: jax.Array
    q_in: jax.Array
    k_out: jax.Array


def narrow(plan: Plan, x: jax.Array) -> jax.Array:
    return x.astype(plan.operand)


def sums(plan: Plan, matrix: jax.Array, x: jax.Array) -> jax.Array:
    """`matrix [C, C]` of zeros and ones times pairs `[n, C, 2K]` in float32: with bfloat16 products
    x is the sum of two of them, which is all of it but 2^-17."""
    lead = (x.shape[0], CHUNK, CHUNK)
    matrix = jnp.broadcast_to(matrix.astype(plan.operand), lead)
    if plan.operand == "float32":
        return dot(matrix, x, NN)
    high = x.astype(jnp.bfloat16)
    low = (x - high.astype(jnp.float32)).astype(jnp.bfloat16)
    return dot(beside(matrix, matrix), above(high, low), NN)


def blocks(x: jax.Array, size: int) -> list[jax.Array]:
    """`[n, C, .]` as its blocks of `size` tokens."""
    return [x[:, i : i + size] for i in range(0, CHUNK, size)]


def prepare(plan: Plan, raw: Raw, marks: Marks | None) -> Prepared:
    """Activations, decays and pairs of a grid step."""
    q, k, g = keys_cut(plan, raw.q), keys_cut(plan, raw.k), log2_decay(plan, raw, marks)
    if marks is not None:
        q, k = (jnp.where(marks.alive, x, 0.0) for x in (q, k))
    q_norm = k_norm = None
    if plan.qk_l2norm:
        (q, q_norm), (k, k_norm) = l2norm(q), l2norm(k)

    size = plan.anchored
    i, j = iota((CHUNK, CHUNK), 0), iota((CHUNK, CHUNK), 1)
    until = (i >= j) & (i // size == j // size)
    prefix = anchored = sums(plan, until, g)
    if plan.floor is not None:
        anchored = sums(plan, until, jnp.maximum(g, plan.floor * LOG2E))
    # A power of two, so that keys that decay little are rounded alike on both sides.
    shift = float(round(plan.reach * LOG2E))
    row_decay, column_decay = jnp.exp2(anchored + shift), jnp.exp2(-anchored - shift)
    k_row, q_row, k_column = k * row_decay, q * row_decay, k * column_decay
    rows = above(narrow(plan, k_row), narrow(plan, q_row))
    columns = split(k_column, plan.operand)
    products = times_columns(rows, columns)
    own, strict = anchored_pairs(plan)
    delta = jnp.where(own & strict, products[:, :CHUNK], 0.0)
    read = jnp.where(own, products[:, CHUNK:], 0.0)

    # Decays of every block: from its start, to its end, and of all of it.
    in_blocks = blocks(prefix, size)
    lasts = [x[:, -1:] for x in in_blocks]
    # Where the anchored factors hold true decays, all others are theirs times a constant or a row.
    shared = plan.floor is None and plan.operand == "bfloat16"
    unshift = 2.0**-shift
    if shared:
        enters = [x * unshift for x in blocks(row_decay, size)]
        leaves = [
            x * jnp.exp2(y + shift) for x, y in zip(blocks(column_decay, size), lasts, strict=True)
        ]
    else:
        enters = [jnp.exp2(x) for x in in_blocks]
        suffixes = [y - x for x, y in zip(in_blocks, lasts, strict=True)]
        if plan.operand == "float32":
            # A difference of prefixes has lost the digits of slow decays that follow a fast one.
            suffixes = blocks(sums(plan, (i < j) & (i // size == j // size), g), size)
        leaves = [jnp.exp2(x) for x in suffixes]
    wholes = [x[:, -1:] for x in enters]
    levels = []
    while size < CHUNK:
        level = _level(plan, size, q, k, above(*enters[1::2]), above(*leaves[0::2]))
        if shared and size == plan.anchored:  # the anchored rows, but for a power of two
            known = above(*(right_halves(x, size) for x in (rows[:, :CHUNK], rows[:, CHUNK:])))
            products = times_columns(known, level.columns) * unshift
        else:
            products = times_columns(level.rows, level.columns)
        if size < CHUNK // 2:
            crossing = crossing_pairs(size)
            products = jnp.where(above(crossing, crossing), products, 0.0)
        delta = add_right(delta, products[:, : CHUNK // 2], size)
        read = add_right(read, products[:, CHUNK // 2 :], size)
        levels.append(level)
        ab = [(b, b + 1) for b in range(0, len(wholes), 2)]
        enters = [above(enters[a], enters[b] * wholes[a]) for a, b in ab]
        leaves = [above(leaves[a] * wholes[b], leaves[b]) for a, b in ab]
        wholes = [wholes[a] * wholes[b] for a, b in ab]
        size *= 2
    (enter,), (leave,) = enters, leaves
    *_, total = ends = list(itertools.accumulate(lasts[::-1]))
    # Anew: a product of factors, or what a shift leaves of one, is off by as much in every chunk of
    # a row, and its state would drift.
    decay = jnp.exp2(total)
    if not shared:
        k_in, q_in, k_out = k * enter, q * enter, k * leave
    else:
        starts = itertools.accumulate(lasts[:-1])
        later = [jnp.exp2(x + y) for x, y in zip(in_blocks[1:], starts, strict=True)]
        k_in, q_in = (
            above(
                row[:, : plan.anchored] * unshift,
                *(a * b for a, b in zip(blocks(x, plan.anchored)[1:], later, strict=True)),
            )
            for x, row in ((k, k_row), (q, q_row))
        )
        ends = [jnp.exp2(x + shift) for x in ends][::-1]
        k_out = above(*(a * b for a, b in zip(blocks(k_column, plan.anchored), ends, strict=True)))
    if marks is not None:
        k_in, q_in = (jnp.where(marks.carried, x, 0.0) for x in (k_in, q_in))
        k_out = jnp.where(marks.kept, k_out, 0.0)
        delta, read = (jnp.where(marks.same, x, 0.0) for x in (delta, read))
        enter = jnp.where(marks.carried, enter, 0.0)
        leave = jnp.where(marks.kept, leave, 0.0)
        decay = jnp.where(marks.survives, decay, 0.0)
    return Prepared(
        q, k, q_norm, k_norm, rows, columns[0], row_decay, column_decay, levels, enter, leave,
        decay, delta, read, k_in, q_in, k_out,
    )  # fmt: skip


def times_columns(rows: jax.Array, columns: Parts) -> jax.Array:
    """Rows `[n, ., 2K]` of pairs times the sum of the parts of columns, `[n, ., 128]`."""
    products = dot(rows, above(*(apart(y) for y in columns)), NT)
    return functools.reduce(jnp.add, jnp.split(products, len(columns), axis=-1))


def anchored_pairs(plan: Plan) -> tuple[jax.Array, jax.Array]:
    """Causal pairs of an anchored block, and pairs of different tokens: masks `[C, 128]`."""
    i, j = iota((CHUNK, PAIR), 0), iota((CHUNK, PAIR), 1) % CHUNK
    return (i >= j) & (i // plan.anchored == j // plan.anchored), i > j


def crossing_pairs(size: int) -> jax.Array:
    """Which columns the right halves' rows of a level see: a mask `[C / 2, 128]`."""
    i, j = iota((CHUNK // 2, PAIR), 0), iota((CHUNK // 2, PAIR), 1) % CHUNK
    return (i // size == j // (2 * size)) & (j // size % 2 == 0)


def right_halves(x: jax.Array, size: int) -> jax.Array:
    """Rows of the right halves of blocks of 2 `size` tokens: `[n, C, .]` to `[n, C / 2, .]`."""
    return above(*blocks(x, size)[1::2])


def left_halves(x: jax.Array, size: int) -> jax.Array:
    return above(*blocks(x, size)[0::2])


def interleave(left: jax.Array, right: jax.Array, size: int) -> jax.Array:
    """Left and right halves `[n, C / 2, .]` back in their places `[n, C, .]`."""
    parts = []
    for i in range(0, CHUNK // 2, size):
        parts += [left[:, i : i + size], right[:, i : i + size]]
    return above(*parts)


def add_right(x: jax.Array, y: jax.Array, size: int) -> jax.Array:
    """x `[n, C, .]` with y `[n, C / 2, .]` added to its right halves."""
    return interleave(left_halves(x, size), right_halves(x, size) + y, size)


def _level(
    plan: Plan, size: int, q: jax.Array, k: jax.Array, ahead: jax.Array, behind: jax.Array
) -> Level:
    rows = above(right_halves(k, size) * ahead, right_halves(q, size) * ahead)
    columns = left_halves(k, size) * behind
    columns = interleave(columns, jnp.zeros_like(columns), size)
    parts = split(columns, plan.operand)[: plan.level_parts]
    return Level(size, narrow(plan, rows), parts, ahead, behind)
