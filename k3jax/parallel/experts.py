"""Tokens to experts and back: the transports of a mixture of experts.

A transport takes each token's routes and a bank of experts, and gives the weighted sum of the
chosen experts' outputs. `experts_local` is the one that moves nothing between devices: each has its
own tokens and the whole bank. It is exact for any load (no capacity, nothing dropped).
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from pallas_kernels.grouped_matmul import grouped_matmul


def experts_local(
    z: jax.Array,
    indices: jax.Array,
    weights: jax.Array,
    valid: jax.Array,
    w_gate: jax.Array,
    w_up: jax.Array,
    w_down: jax.Array,
    activation: Callable[[jax.Array, jax.Array], jax.Array],
) -> jax.Array:
    """`sum_j weights[n, j] E(z[n])` over the k experts `indices[n]`, rows sorted by expert.

    Args:
      z: tokens `[N, l]`.
      indices: `[N, k]` int32, in 0 .. E-1 and distinct within a token.
      weights: `[N, k]`; the sum is taken in their dtype (at least float32), then cast to z's.
      valid: `[N]` bool. Other tokens go to no expert and get zero.
      w_gate, w_up: `[E, l, m]` in z's dtype; w_down: `[E, m, l]`.
      activation: of gate and up pre-activations `[rows, m]`, elementwise.

    Returns:
      `[N, l]` in z's dtype.
    """
    tokens, k = indices.shape
    experts = w_gate.shape[0]
    expert = jnp.where(valid[:, None], indices, experts).reshape(-1)  # route r is token r // k's
    order = jnp.argsort(expert, stable=True)  # row -> route
    place = jnp.argsort(order).reshape(tokens, k)  # token, choice -> row
    ends = jnp.searchsorted(expert[order], jnp.arange(experts), side="right").astype(jnp.int32)
    sizes = jnp.diff(ends, prepend=0)

    rows = take_rows(z, order // k, place)
    hidden = activation(grouped_matmul(rows, w_gate, sizes), grouped_matmul(rows, w_up, sizes))
    out = grouped_matmul(hidden, w_down, sizes)
    out = take_rows(out, place.reshape(-1), order[:, None]).reshape(tokens, k, out.shape[-1])
    return (weights[..., None] * out.astype(weights.dtype)).sum(axis=1).astype(z.dtype)


@jax.custom_vjp
def take_rows(x: jax.Array, source: jax.Array, readers: jax.Array) -> jax.Array:
    """`x[source]`, whose gradient is a gather too, because `readers` inverts `source`.

    `x [N, l]`, `source [R]` int32; `readers [N, R / N]` int32 holds, for every row of `x`, the
    positions of `source` that name it.
    """
    return x.at[source].get(mode="promise_in_bounds")


def _take_rows_forward(x, source, readers):
    return take_rows(x, source, readers), readers


def _take_rows_backward(readers, cotangent):
    parts = cotangent.at[readers].get(mode="promise_in_bounds")
    wide = jnp.promote_types(cotangent.dtype, jnp.float32)
    return parts.sum(axis=1, dtype=wide).astype(cotangent.dtype), None, None


take_rows.defvjp(_take_rows_forward, _take_rows_backward)
