"""The gradient of `prepare`, inside a kernel: from pairs and decays back to tokens.

Every exponent of a factor is a sum of log decays, so its gradient, factor times the factor's own
gradient, is added up over the tokens that it sums, never as the difference of two large terms of
the whole chunk. Only inside an anchored block do a pair's row and column carry log decays that
cancel; both terms are then the same product of the same rounded numbers, and what is left of them
is float32's rounding.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from . import activate, prepare
from .activate import Norms, Raw
from .marks import Marks
from .plan import Plan
from .prepare import Prepared
from .recur import Operands
from .tiles import (
    CHUNK,
    NN,
    PAIR,
    above,
    apart,
    beside,
    dot,
    halves,
    heads,
    iota,
    pairs,
    split,
)


class Cotangents(NamedTuple):
    """Gradients of pairs of heads in float32: of M above P `[n, 2C, 128]`, not yet causal; of Kd,
    Qd and Kr `[n, C, 2K]`; of the chunk's decay `[n, 1, 2K]`."""

    products: jax.Array
    k_in: jax.Array
    q_in: jax.Array
    k_out: jax.Array
    decay: jax.Array


class Gradients(NamedTuple):
    """Of the raw q, k and gate, pairs `[n, C, 2K]`, and of `a` and dt_bias `[n, 1, 2K]` or None."""

    q: jax.Array
    k: jax.Array
    gate: jax.Array
    a: jax.Array | None
    dt_bias: jax.Array | None


def pull(
    plan: Plan,
    raw: Raw,
    marks: Marks | None,
    p: Prepared,
    x: Operands,
    d: Cotangents,
) -> Gradients:
    """The gradient of `prepare.prepare` and of Kd, Qd and Kr in `recur.operands`."""
    wide = jnp.float32
    i, j = iota((2 * CHUNK, PAIR), 0), iota((2 * CHUNK, PAIR), 1) % CHUNK
    causal = i % CHUNK > j
    if marks is not None:
        causal &= above(marks.same, marks.same)
    products = prepare.narrow(plan, jnp.where(causal, d.products, 0.0))
    # Heads [2n, C, 2C]: columns against keys' rows, then queries' rows.
    transposed = jnp.swapaxes(products, 1, 2).reshape(2 * products.shape[0], CHUNK, PAIR)

    own = i % CHUNK // plan.anchored == j // plan.anchored
    drows = dot(jnp.where(own, products, 0), apart(p.columns), NN)
    i, j = iota((CHUNK, PAIR), 1) % CHUNK, iota((CHUNK, PAIR), 0)
    own = i // plan.anchored == j // plan.anchored
    dcolumns = pairs(dot(jnp.where(own, transposed, 0), heads(p.rows), NN))
    dk_rows, dq_rows = drows[:, :CHUNK], drows[:, CHUNK:]
    dq = dq_rows * p.row_decay + d.q_in * p.enter
    dk = dk_rows * p.row_decay + dcolumns * p.column_decay
    dk += d.k_in * p.enter + d.k_out * p.leave
    # Pairs i == j, which no decay comes between, add to q and k alone.
    own_pairs = _diagonal(d.products[:, CHUNK:], plan.key_width)
    dq += own_pairs * p.k
    dk += own_pairs * p.q

    k_rows, q_rows = p.rows[:, :CHUNK].astype(wide), p.rows[:, CHUNK:].astype(wide)
    anchored = k_rows * dk_rows + q_rows * dq_rows - p.columns.astype(wide) * dcolumns
    terms = [
        (_sums_from(CHUNK), x.k_in.astype(wide) * d.k_in + x.q_in.astype(wide) * d.q_in),
        (_sums_before(), p.k_out * d.k_out),
    ]
    for level in p.levels:
        size, half = level.size, CHUNK // 2
        dproducts = above(
            prepare.right_halves(products[:, :CHUNK], size),
            prepare.right_halves(products[:, CHUNK:], size),
        )
        crossing = prepare.crossing_pairs(size)
        dproducts = jnp.where(above(crossing, crossing), dproducts, 0)
        drows = dot(dproducts, apart(level.columns[0]), NN)
        left = (i // (2 * size) == j // (2 * size)) & (i // size % 2 == 1) & (j // size % 2 == 0)
        rows = above(*(_spread(level.rows[:, s : s + half], size) for s in (0, half)))
        dcolumns = pairs(dot(jnp.where(left, transposed, 0), heads(rows), NN))
        dcolumns = prepare.left_halves(dcolumns, size)
        k_rows, q_rows = level.rows[:, :half].astype(wide), level.rows[:, half:].astype(wide)
        columns = prepare.left_halves(level.columns[0], size).astype(wide)
        dq = prepare.add_right(dq, drows[:, half:] * level.ahead, size)
        dk += prepare.interleave(dcolumns * level.behind, drows[:, :half] * level.ahead, size)
        exponents = k_rows * drows[:, :half] + q_rows * drows[:, half:]
        terms.append(
            (_sums_of_level(size), prepare.interleave(columns * dcolumns, exponents, size))
        )
    dg = prepare.sums(plan, _sums_from(plan.anchored), anchored)
    if plan.floor is not None:
        # Pairs of an anchored block that cross a token below the floor had the floor in its place.
        g = activate.log2_decay(plan, raw, marks)
        dg *= jnp.exp2(jnp.minimum(g - plan.floor * activate.LOG2E, 0.0))
    dg += _accumulate(plan, terms) + d.decay * p.decay
    if marks is not None:
        dg = jnp.where(marks.alive, dg, 0.0)
    dgate, da, ddt_bias = _pull_gate(plan, raw, marks, dg)
    if p.q_norm is not None and p.k_norm is not None:
        dq, dk = _pull_norm(p.q, p.q_norm, dq), _pull_norm(p.k, p.k_norm, dk)
    return Gradients(dq, dk, dgate, da, ddt_bias)


def _diagonal(x: jax.Array, width: int) -> jax.Array:
    """The diagonals of both heads of `[n, C, 128]`, along rows `[n, C, 2 width]`."""
    i, lane = iota((CHUNK, PAIR), 0), iota((CHUNK, PAIR), 1)
    columns = (
        jnp.sum(jnp.where(lane == i + first, x, 0.0), axis=-1, keepdims=True)
        for first in (0, CHUNK)
    )
    return beside(*(jnp.broadcast_to(c, (*c.shape[:2], width)) for c in columns))


def _spread(x: jax.Array, size: int) -> jax.Array:
    """Right halves `[n, C / 2, .]` in their places, zeros in the left ones."""
    return prepare.interleave(jnp.zeros_like(x), x, size)


def _square() -> tuple[jax.Array, jax.Array]:
    return iota((CHUNK, CHUNK), 0), iota((CHUNK, CHUNK), 1)


def _sums_from(size: int) -> jax.Array:
    """Which exponents i hold the log decay of token t, for a prefix in blocks: `[t, i]`."""
    t, i = _square()
    return (i >= t) & (i // size == t // size)


def _sums_before() -> jax.Array:
    """The same for what is left of the chunk after token i."""
    t, i = _square()
    return i < t


def _sums_of_level(size: int) -> jax.Array:
    """The same for a level: a suffix in left halves, a prefix in right ones."""
    t, i = _square()
    return (i // size == t // size) & jnp.where(i // size % 2 == 1, i >= t, i < t)


def _accumulate(plan: Plan, terms: list[tuple[jax.Array, jax.Array]]) -> jax.Array:
    """Gradients of log decays `[n, C, 2K]` from those of exponents, in parts: terms alternate as
    pseudo-values do, and a gate's parameters sum them over all tokens."""
    matrices, values = zip(*terms, strict=True)
    parts = [split(y, plan.operand) for y in values]
    rows = [m.astype(plan.operand) for m, own in zip(matrices, parts, strict=True) for _ in own]
    matrix = jnp.concatenate(rows, axis=1)
    matrix = jnp.broadcast_to(matrix, (values[0].shape[0], *matrix.shape))
    return dot(matrix, above(*(y for own in parts for y in own)), NN)


def _pull_gate(
    plan: Plan, raw: Raw, marks: Marks | None, dg: jax.Array
) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
    """Gradients of the raw gate, of `a` and of dt_bias from that of the log decay in nats."""
    if plan.gate_form == "log_decay":
        return dg, None, None
    x, a = activate.biased_gate(plan, raw, marks)
    if plan.gate_form == "softplus":
        da = -activate.softplus(x) * dg
        dx = -a * jax.nn.sigmoid(x) * dg
    else:
        slope = plan.lower_bound * jax.nn.sigmoid(a * x) * jax.nn.sigmoid(-a * x) * dg
        da, dx = slope * x, slope * a
    total = jnp.sum(dx, axis=1, keepdims=True) if raw.dt_bias is not None else None
    return dx, jnp.sum(da, axis=1, keepdims=True) if raw.a is not None else None, total


def _pull_norm(y: jax.Array, norms: Norms, dy: jax.Array) -> jax.Array:
    """Gradient of x from that of y = x / |x|."""
    parts = []
    for unit, dunit, norm in zip(halves(y), halves(dy), norms, strict=True):
        along = jnp.sum(unit * dunit, axis=-1, keepdims=True)
        parts.append(norm * (dunit - unit * along))
    return beside(*parts)
