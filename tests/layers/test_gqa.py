"""Grouped-query attention against plain multi-head attention, one document at a time."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from k3jax.config import GQAConfig
from k3jax.layers.gqa import GroupedQueryAttention
from k3jax.params import partition_specs, specs
from tests.layers.rows import (
    check_against_naive,
    check_cache,
    check_mesh,
    randomised,
)

WIDTH = 20
ROPE = GQAConfig(heads=4, kv_heads=2, head_dim=6, rope=True, rope_theta=100.0)
NOPE = GQAConfig(heads=3, kv_heads=1, head_dim=5)


@cache
def layer_of(config):
    return randomised(GroupedQueryAttention(config, WIDTH, rngs=None), jnp.float64)


def turn(x, config):
    """Rotary positions as a product of complex numbers: `x [t, D]` of one document."""
    if not config.rope:
        return x
    half = config.head_dim // 2
    speed = config.rope_theta ** (-2.0 * jnp.arange(half) / config.head_dim)
    z = (x[:, :half] + 1j * x[:, half:]) * jnp.exp(1j * jnp.arange(len(x))[:, None] * speed)
    return jnp.concatenate([z.real, z.imag], -1)


def naive(config, p, u):
    """`u [t, d]` of one document -> `y [t, d]`, head by head."""
    D, group = config.head_dim, config.heads // config.kv_heads
    heads = []
    for h in range(config.heads):
        q, k, v = (
            (u @ p[name])[:, i * D : (i + 1) * D]
            for name, i in (("query", h), ("key", h // group), ("value", h // group))
        )
        logits = turn(q, config) @ turn(k, config).T / jnp.sqrt(D)
        logits = jnp.where(jnp.tri(len(u), dtype=bool), logits, -1e300)
        heads.append(jax.nn.softmax(logits, -1) @ v)
    return jnp.concatenate(heads, -1) @ p["out"]


@pytest.mark.parametrize("config", [ROPE, NOPE], ids=["rope", "nope"])
def test_equals_plain_attention(config):
    with jax.enable_x64(True):
        check_against_naive(*layer_of(config), WIDTH, partial(naive, config))


def test_cache_equals_one_pass():
    """Prefill in two parts, then token by token: positions go on from the cache."""
    with jax.enable_x64(True):
        check_cache(*layer_of(ROPE), WIDTH, capacity=11)


def test_on_the_mesh():
    with jax.enable_x64(True):
        check_mesh(*layer_of(ROPE), WIDTH)


def test_parameters():
    layer = GroupedQueryAttention(ROPE, WIDTH, rngs=None)
    declared = {spec.hf_name: spec.shape for _, spec in specs(nnx.state(layer))}
    assert declared == {
        "self_attn.q_proj.weight": (20, 24),
        "self_attn.k_proj.weight": (20, 12),
        "self_attn.v_proj.weight": (20, 12),
        "self_attn.o_proj.weight": (24, 20),
    }
    partition_specs(nnx.state(layer))  # no two axes of one parameter on one mesh axis
