"""Rotary position embedding (Su et al., arXiv 2104.09864), in the rotate-half convention."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from k3jax.layers.linear import island


def rotate(x: jax.Array, positions: jax.Array, theta: float) -> jax.Array:
    """`x [B, T, H, D]` rotated by `positions [B, T]`, D even.

    Channels i and i + D/2 turn by `positions * theta^(-2i/D)` radians, as in the Llama checkpoints.
    Computed in a float32 island, returned in the dtype of `x`.
    """
    wide, half = island(x.dtype), x.shape[-1] // 2
    turns = theta ** (-jnp.arange(half, dtype=wide) / half)
    angle = positions[..., None, None].astype(wide) * turns
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    a, b = jnp.split(x.astype(wide), 2, -1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)
