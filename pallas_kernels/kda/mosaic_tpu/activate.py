"""Activations, inside a kernel: `gates` of the parent package for the pairs of a grid step.

All in float32. The gate's parameters come as rows of channels, one number per lane, and beta once
along rows and once along columns of the pairs' C x C matrices.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from .marks import Marks
from .plan import Plan
from .tiles import CHUNK, beside, cut, halves

LOG2E = 1.4426950408889634

# e^-96 is nothing in float32, and sums of much larger numbers would lose the small ones' digits.
NOTHING_LEFT = -96.0

# 1 / |x| of the two heads of pairs, `[n, C, 1]` each.
Norms = tuple[jax.Array, jax.Array]


class Raw(NamedTuple):
    """A grid step's tokens as they came, `[chunks * C, heads * W]`, and the gate's parameters as
    rows of channels `[1, heads * K]` (`a` is exp(a_log)), None where absent."""

    q: jax.Array
    k: jax.Array
    gate: jax.Array
    beta: jax.Array
    a: jax.Array | None
    dt_bias: jax.Array | None


def keys_cut(plan: Plan, x: jax.Array) -> jax.Array:
    """Queries or keys `[chunks * C, heads / repeat * K]` as pairs of value heads, in float32."""
    if plan.repeat > 1:
        K = plan.key_width
        of = [h // plan.repeat for h in range(plan.heads)]
        x = jnp.concatenate([x[:, K * h : K * (h + 1)] for h in of], axis=-1)
    return cut(x.astype(jnp.float32), plan.key_width, plan.chunks)


def log2_decay(plan: Plan, raw: Raw, marks: Marks | None) -> jax.Array:
    """Log decays of pairs `[n, C, 2K]` in units of log 2 (`gates.log_decay`), before the
    plan's floor; none at padding."""
    x, a = biased_gate(plan, raw, marks)
    if plan.gate_form == "log_decay":
        g = x * LOG2E
    elif plan.gate_form == "softplus":
        g = -(a * LOG2E) * softplus(x)
    else:
        g = (plan.lower_bound * LOG2E) * jax.nn.sigmoid(a * x)
    if plan.floor is not None:
        g = jnp.maximum(g, NOTHING_LEFT * LOG2E)
    return g if marks is None else jnp.where(marks.alive, g, 0.0)


def biased_gate(plan: Plan, raw: Raw, marks: Marks | None) -> tuple[jax.Array, jax.Array | float]:
    """Pairs of raw gates, finite at padding too, with dt_bias added, and `a` of their shape."""

    def channels(row: jax.Array) -> jax.Array:
        row = jnp.broadcast_to(row, (CHUNK, row.shape[1]))
        return jnp.concatenate([cut(row, plan.key_width, 1)] * plan.chunks, axis=0)

    x = cut(raw.gate.astype(jnp.float32), plan.key_width, plan.chunks)
    if marks is not None:
        x = jnp.where(marks.alive, x, 0.0)
    if raw.dt_bias is not None:
        x = x + channels(raw.dt_bias)
    return x, 1.0 if raw.a is None else channels(raw.a)


def softplus(x: jax.Array) -> jax.Array:
    """log(1 + e^x), to 1e-7 of what is added to max(x, 0), in half the steps of `jax.nn.softplus`:
    1 + e rounds a small e away, and two terms of the series do for it."""
    e = jnp.exp2(-LOG2E * jnp.abs(x))
    return jnp.maximum(x, 0.0) + jnp.where(e < 1e-3, e * (1.0 - 0.5 * e), jnp.log(1.0 + e))


def l2norm(x: jax.Array) -> tuple[jax.Array, Norms]:
    """x / |x| per head of pairs `[n, C, 2K]`."""
    a, b = halves(x)
    norms = (_inverse_norm(a), _inverse_norm(b))
    return beside(a * norms[0], b * norms[1]), norms


def _inverse_norm(x: jax.Array) -> jax.Array:
    return jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6)


def write_strength(plan: Plan, beta: jax.Array, marks: Marks | None) -> jax.Array:
    """beta `[chunks * C, heads]` in float32; no write at padding."""
    beta = beta.astype(jnp.float32)
    if plan.beta_form == "logit":
        beta = jax.nn.sigmoid(beta)
    return beta if marks is None else jnp.where(marks.alive_column, beta, 0.0)


def beta_slope(plan: Plan, beta: jax.Array, marks: Marks | None) -> jax.Array:
    """What `backward._dbeta` has left out of the gradient of raw beta, `[chunks * C, heads]`."""
    beta = beta.astype(jnp.float32)
    slope = jax.nn.sigmoid(-beta) if plan.beta_form == "logit" else jnp.ones_like(beta)
    return slope if marks is None else jnp.where(marks.alive_column, slope, 0.0)


def beta_rows(plan: Plan, beta: jax.Array, width: int) -> jax.Array:
    """beta `[chunks * C, heads]` along rows of pairs `[n, C, 2 width]`."""
    columns = (beta[:, h : h + 1] for h in range(plan.heads))
    rows = jnp.concatenate([jnp.broadcast_to(c, (c.shape[0], width)) for c in columns], axis=1)
    return cut(rows, width, plan.chunks)


def beta_columns(plan: Plan, beta: jax.Array) -> jax.Array:
    """beta `[chunks * C, heads]` along columns of pairs `[n, 1, 128]`."""
    beta = beta.T

    def of(c: int, h: int) -> jax.Array:
        return beta[h : h + 1, CHUNK * c : CHUNK * (c + 1)]

    heads = range(0, plan.heads, 2)
    return jnp.stack([beside(of(c, h), of(c, h + 1)) for c in range(plan.chunks) for h in heads])
