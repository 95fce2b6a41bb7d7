"""Activations before the recurrence: raw gate to log decay, write strength, L2 norm.

All are computed in the recurrence's dtype (float32, or float64 where an input is), whatever the
inputs are held in: a decay or a write strength rounded to bfloat16 makes the state drift.
"""

import jax
import jax.numpy as jnp

from .spec import Parameters, Spec, Tokens

# exp(60) x 1e2 is far inside float32, and far beyond where either form is saturated: past it only
# inf * 0 in the backward pass could come (A_log of 90 is inf in float32).
_MAX_A_LOG = 60.0


def sigmoid(x: jax.Array) -> jax.Array:
    """Logistic function whose derivative s(x) s(-x) keeps its relative accuracy where it saturates
    (that of `jax.nn.sigmoid`, s (1 - s), has lost three digits at x = 8)."""
    return jnp.exp(jax.nn.log_sigmoid(x))


def rate(a_log: jax.Array) -> jax.Array:
    """A = exp(A_log) of every head."""
    return jnp.exp(jnp.minimum(a_log, _MAX_A_LOG))


def log_decay(
    raw: jax.Array,
    a_log: jax.Array | None,
    dt_bias: jax.Array | None,
    gate_form: str,
    lower_bound: float,
) -> jax.Array:
    """Log decay g <= 0 from a raw gate.

        softplus    g = -exp(A_log) softplus(raw + dt_bias)                    KLR, unbounded
        bounded     g = lower_bound sigmoid(exp(A_log) (raw + dt_bias))        K3R eq. 5
        log_decay   g = raw

    Args:
      raw: `[..., HV, K or 1]` in the dtype of the recurrence.
      a_log: `[HV]`, or None for A = 1.
      dt_bias: `[HV, K or 1]`, or None for 0.

    Returns: g of raw's shape. Its gradients are finite for every finite input, and 0 where the
    gate is saturated.
    """
    if gate_form == "log_decay":
        return raw
    x = raw if dt_bias is None else raw + dt_bias.astype(raw.dtype)
    a = jnp.ones((), raw.dtype) if a_log is None else rate(a_log.astype(raw.dtype))[:, None]
    if gate_form == "softplus":
        return -a * jax.nn.softplus(x)
    return lower_bound * sigmoid(a * x)


def write_strength(beta: jax.Array, beta_form: str) -> jax.Array:
    """beta from its logit, or as it is given (values up to 2 give negative eigenvalues)."""
    return sigmoid(beta) if beta_form == "logit" else beta


def l2norm(x: jax.Array) -> jax.Array:
    """x / sqrt(sum x^2 + 1e-6) over the last axis: the 1e-6 is added to the sum of squares."""
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6)


def activate(spec: Spec, x: Tokens, parameters: Parameters) -> tuple[jax.Array, ...]:
    """The operands of the recurrence, with the token and head axes left where they were.

    Works for `[B, T, ...]` and, token axis absent, for `[B, ...]`.

    Returns: q (normalised, scaled) and k `[..., H, K]`, v `[..., HV, V]`, log decay g
    `[..., HV, K]` and write strength beta `[..., HV]`, all in `spec.dtype`.
    """
    q, k, v, beta = (y.astype(spec.dtype) for y in (x.q, x.k, x.v, x.beta))
    if spec.qk_l2norm:
        q, k = l2norm(q), l2norm(k)
    shape = (*v.shape[:-1], spec.key_width)
    if x.gate is None:
        g = jnp.zeros(shape, spec.dtype)
    else:
        raw = x.gate.astype(spec.dtype)
        g = log_decay(raw, *parameters, spec.gate_form, spec.lower_bound)
        g = jnp.broadcast_to(g, shape)
    return q * spec.scale, k, v, g, write_strength(beta, spec.beta_form)
