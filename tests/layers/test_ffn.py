"""Activations against their formulae, and the gated MLP against numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from k3jax.config import FeedForwardConfig
from k3jax.layers.documents import documents_of
from k3jax.layers.ffn import GatedMLP, activation, situ, swiglu
from k3jax.params import specs
from k3jax.sharding import activation_spec, make_mesh
from tests.layers.rows import relative_rms

RNG = np.random.default_rng(0)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def test_situ_is_equation_12():
    a, b = RNG.normal(0, 6, (2, 1000))
    want = 4 * np.tanh(a / 4) * sigmoid(a) * 25 * np.tanh(b / 25)
    with jax.enable_x64(True):
        assert relative_rms(situ(jnp.asarray(a), jnp.asarray(b), 4.0, 25.0), want) < 1e-14


def test_situ_saturates_where_swiglu_does_not():
    a, b = jnp.array([1e4, -1e4, 1e4, 0.0]), jnp.array([1e4, 1e4, -1e4, 5.0])
    assert situ(a, b, 4.0, 25.0).tolist() == [100.0, 0.0, -100.0, 0.0]
    gradient = jax.grad(lambda a: situ(a, b, 4.0, 25.0).sum())(a)
    assert np.all(np.isfinite(gradient))
    assert swiglu(a, b)[0] == 1e8


def test_situ_tends_to_swiglu():
    a, b = (jnp.asarray(x, jnp.float32) for x in RNG.normal(0, 2, (2, 1000)))
    assert relative_rms(situ(a, b, 1e4, 1e4), swiglu(a, b)) < 1e-6
    assert relative_rms(situ(a, b, 4.0, 25.0), swiglu(a, b)) > 0.1


@pytest.mark.parametrize("name", ["swiglu", "situ"])
def test_bfloat16_is_computed_in_float32(name):
    act = activation(FeedForwardConfig(activation=name))
    a, b = (jnp.asarray(x, jnp.bfloat16) for x in RNG.normal(0, 3, (2, 1000)))
    want = act(a.astype(jnp.float32), b.astype(jnp.float32)).astype(jnp.bfloat16)
    assert act(a, b).dtype == jnp.bfloat16
    assert np.array_equal(act(a, b), want)


def test_gated_mlp_equals_numpy_on_and_off_the_mesh():
    mlp = GatedMLP(6, 10, FeedForwardConfig(), init_std=0.5, rngs=nnx.Rngs(0))
    ids = jnp.array([[1, 1, 0, 2], [0, 1, 1, 1]], jnp.int32)
    x = jnp.asarray(RNG.normal(size=(2, 4, 6)), jnp.float32)
    gate, up, down = (np.asarray(p[...], np.float64) for p in (mlp.gate, mlp.up, mlp.down))
    a, b = np.asarray(x, np.float64) @ gate, np.asarray(x, np.float64) @ up
    want = (4 * np.tanh(a / 4) * sigmoid(a) * 25 * np.tanh(b / 25)) @ down
    want = np.where(np.asarray(ids)[..., None] > 0, want, 0)

    y, cache, stats = mlp(x, documents=documents_of(ids))
    assert (cache, stats) == (None, {})
    assert relative_rms(y, want) < 1e-6
    with jax.set_mesh(make_mesh()):
        rows = jax.sharding.reshard(x, activation_spec(3))
        y, _, _ = mlp(rows, documents=documents_of(ids))
        assert relative_rms(y, want) < 1e-6


def test_names_follow_the_official_checkpoint():
    shared = GatedMLP(
        6, 10, FeedForwardConfig(), hf_prefix="block_sparse_moe.shared_experts", rngs=None
    )
    found = {
        spec.hf_name: (spec.shape, spec.rule, spec.decay) for _, spec in specs(nnx.state(shared))
    }
    prefix = "block_sparse_moe.shared_experts"
    assert found == {
        f"{prefix}.gate_proj.weight": ((6, 10), "muon", True),
        f"{prefix}.up_proj.weight": ((6, 10), "muon", True),
        f"{prefix}.down_proj.weight": ((10, 6), "muon", True),
    }
