"""Multi-head latent attention against the equations of K3R §2.1.2, one document at a time."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from k3jax.config import MLAConfig
from k3jax.layers.documents import documents_of, one_document
from k3jax.layers.mla import MLACache, MultiHeadLatentAttention
from k3jax.layers.row_cache import grow
from k3jax.params import partition_specs, specs
from tests.layers.rows import (
    RAGGED,
    check_against_naive,
    check_cache,
    check_mesh,
    randomised,
    relative_rms,
    run,
)

WIDTH = 24
K3 = MLAConfig(heads=3, q_lora_rank=10, kv_lora_rank=12, qk_nope_dim=8, qk_rope_dim=4, value_dim=6)
PLAIN = MLAConfig(
    heads=2, kv_lora_rank=9, qk_nope_dim=6, qk_rope_dim=0, value_dim=5, output_gate=False
)


@cache
def layer_of(config, dtype=jnp.float64):
    return randomised(MultiHeadLatentAttention(config, WIDTH, rngs=None), dtype)


def naive(config, p, u):
    """`u [t, d]` of one document -> `y [t, d]`, head by head."""
    nope, value = config.qk_nope_dim, config.value_dim

    def norm(x, gain):
        return x / jnp.sqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * gain

    q = (
        u @ p["query"]
        if "query" in p
        else norm(u @ p["query_down"], p["query_norm"]) @ p["query_up"]
    )
    c = u @ p["kv_down"]
    latent, shared = c[:, : config.kv_lora_rank], c[:, config.kv_lora_rank :]
    kv = norm(latent, p["kv_norm"]) @ p["kv_up"]
    heads = []
    for h in range(config.heads):
        q_h = q[:, h * (nope + config.qk_rope_dim) : (h + 1) * (nope + config.qk_rope_dim)]
        kv_h = kv[:, h * (nope + value) : (h + 1) * (nope + value)]
        logits = q_h[:, :nope] @ kv_h[:, :nope].T + q_h[:, nope:] @ shared.T
        logits = logits / jnp.sqrt(nope + config.qk_rope_dim)
        logits = jnp.where(jnp.tri(len(u), dtype=bool), logits, -1e300)
        heads.append(jax.nn.softmax(logits, -1) @ kv_h[:, nope:])
    o = jnp.concatenate(heads, -1)
    if config.output_gate:
        o = o * jax.nn.sigmoid(u @ p["gate"])
    return o @ p["out"]


@pytest.mark.parametrize("config", [K3, PLAIN], ids=["k3", "plain"])
def test_equals_the_equations(config):
    with jax.enable_x64(True):
        check_against_naive(*layer_of(config), WIDTH, partial(naive, config))


def test_cache_equals_one_pass():
    """Prefill in two parts, expanded, then the absorbed form token by token."""
    with jax.enable_x64(True):
        check_cache(*layer_of(K3), WIDTH, capacity=9)


def test_on_the_mesh():
    with jax.enable_x64(True):
        check_mesh(*layer_of(K3), WIDTH)


def test_bfloat16():
    """bfloat16 stays near float64, gradients too; those of parameters are in their dtype."""
    x, dy = np.random.default_rng(4).normal(0, 1, (2, *RAGGED.shape, WIDTH))
    with jax.enable_x64(True):
        graphdef, state = layer_of(K3)
        wide = run(graphdef, state, x, dy, RAGGED)
        y, _, grads, dx = narrow = run(
            graphdef, state, x.astype(jnp.bfloat16), dy.astype(jnp.bfloat16), RAGGED
        )
        assert y.dtype == dx.dtype == jnp.bfloat16
        assert all(grad.dtype == jnp.float64 for grad in jax.tree.leaves(grads))
        for got, want in zip(jax.tree.leaves(narrow), jax.tree.leaves(wide), strict=True):
            assert relative_rms(got, want) <= 2e-2


def test_past_the_capacity():
    cache = MLACache(jnp.zeros((2, 3, 4)), jnp.array([1, 2], jnp.int32))
    with pytest.raises(ValueError, match="cache: row 1 would hold 4 tokens, its capacity is 3"):
        grow(one_document(jnp.zeros((2, 2))), cache)
    two = documents_of(np.array([[1, 1], [1, 2]], np.int32))
    with pytest.raises(ValueError, match="segment_ids: 2 found, a row with a cache holds one"):
        grow(two, cache)

    # Under jit a fourth token is dropped: it changes nothing and reads the three that are kept.
    graphdef, state = layer_of(PLAIN, dtype=jnp.float32)

    @jax.jit
    def call(x):
        layer = nnx.merge(graphdef, state)
        empty = layer.empty_cache(2, 3, jnp.float32)
        return layer(x, documents=one_document(jnp.zeros((2, 4))), cache=empty)

    x = np.random.default_rng(4).normal(0, 1, (2, 4, WIDTH)).astype(np.float32)
    other = x.copy()
    other[:, 3] *= 5
    (y, full, _), (other_y, other_full, _) = call(x), call(other)
    assert np.array_equal(full.length, [3, 3])
    assert np.array_equal(full.latents, other_full.latents)
    assert np.array_equal(y[:, :3], other_y[:, :3])
    assert np.all(np.isfinite(y)) and np.all(np.any(y[:, 3] != other_y[:, 3], axis=1))


def test_parameters():
    layer = MultiHeadLatentAttention(K3, WIDTH, rngs=None)
    declared = {spec.hf_name: spec for _, spec in specs(nnx.state(layer))}
    shapes = {
        "q_a_proj": (24, 10),
        "q_a_layernorm": (10,),
        "q_b_proj": (10, 36),
        "kv_a_proj_with_mqa": (24, 16),
        "kv_a_layernorm": (12,),
        "kv_b_proj": (12, 42),
        "g_proj": (24, 18),
        "o_proj": (18, 24),
    }
    assert {f"self_attn.{name}.weight": shape for name, shape in shapes.items()} == {
        name: spec.shape for name, spec in declared.items()
    }
    for spec in declared.values():
        matrix = len(spec.shape) == 2
        assert (spec.rule, spec.decay) == (("muon", True) if matrix else ("adamw", False))
    partition_specs(nnx.state(layer))  # no two axes of one parameter on one mesh axis
    plain = MultiHeadLatentAttention(PLAIN, WIDTH, init_std=0.5, rngs=None)
    declared = {spec.hf_name.split(".")[1]: spec for _, spec in specs(nnx.state(plain))}
    assert declared.keys() == {
        "q_proj",
        "kv_a_proj_with_mqa",
        "kv_a_layernorm",
        "kv_b_proj",
        "o_proj",
    }
    key = jax.random.key(0)
    assert np.all(declared["kv_a_layernorm"].init(key, (9,), jnp.float32) == 1)
    assert abs(np.std(declared["o_proj"].init(key, (50, 50), jnp.float32)) - 0.5) < 0.05
