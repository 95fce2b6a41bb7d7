"""Activations and their gradients, in registers: raw gate to log decay, write strength."""

import math

import jax.numpy as jnp

from . import tiles
from .chunks import Chunks
from .tiles import LOG2E, cols

# Half of what 16 tokens at 5 nats decay by, 115.4 in base 2.
SHIFT = 58.0
# Below this a float32 is zero, whatever the decay: sums of log decays stay exact.
FLOOR = -200.0


def log_decay(c: Chunks, raw, a, dt):
    """log2 of the decay, from a raw gate `[64, n]`; a is exp(A_log), dt `[n]` a COL or None."""
    if c.gate_form == "log_decay":
        return raw * LOG2E
    if c.gate_form == "bounded":
        # bound / (1 + exp(-a x)), with the bound inside: two instructions less an element.
        bound, rate = -c.lower_bound * LOG2E, a * -LOG2E
        start = tiles.zeros(raw.shape[1:], tiles.COL) if dt is None else dt * rate
        e = tiles.exp2(tiles.linear(raw, rate, start - math.log2(bound)))
        return tiles.reciprocal(-1.0 / bound - e)
    x = raw if dt is None else raw + cols(dt, raw.shape)
    return softplus(x) * (a * -LOG2E)


def softplus(x):
    """max(x, 0) + log1p(exp(-|x|)), to float32's accuracy at both ends."""
    e = tiles.exp2(jnp.abs(x) * -LOG2E)
    series = e * (1.0 - e * (0.5 - e * (1.0 / 3.0)))
    return jnp.maximum(x, 0.0) + jnp.where(e < 0.02, series, jnp.log(1.0 + e))


def sigmoid(x, layout=tiles.TILE):
    return tiles.reciprocal(1.0 + tiles.exp2(x * -LOG2E, layout), layout)


def write_strength(c: Chunks, raw, layout):
    """beta; never quite 0, so that its gradient is U / beta, and 2^-40 changes nothing."""
    beta = sigmoid(raw, layout) if c.beta_form == "logit" else raw
    return jnp.where(jnp.abs(beta) < 2.0**-40, 2.0**-40, beta)


def strength_gradient(c: Chunks, x, raw, layout):
    """Of raw beta, from the sum x of dV U, which holds beta twice."""
    beta = write_strength(c, raw, layout)
    dbeta = x / (beta * beta)
    if c.beta_form == "logit":
        dbeta = dbeta * sigmoid(raw, layout) * sigmoid(-raw, layout)
    return dbeta


def gate_gradient(c: Chunks, dlog, raw, a, dt):
    """From that of the log decay (in nats) those of the raw gate and, summand by summand, of a."""
    if c.gate_form == "log_decay":
        return dlog, None
    y = raw if dt is None else raw + cols(dt, raw.shape)
    if c.gate_form == "bounded":
        e = tiles.exp2(-jnp.abs(y * (a * LOG2E)))
        near = tiles.reciprocal(1.0 + e)
        slope = dlog * (e * near * near)
        return slope * (a * c.lower_bound), slope * (y * c.lower_bound)
    return dlog * sigmoid(y) * -a, -dlog * softplus(y)
