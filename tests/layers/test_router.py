"""Routing: what is selected, what it weighs, and what is counted."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from k3jax.config import MoEConfig
from k3jax.layers.documents import documents_of
from k3jax.layers.router import QuantileRouter, route
from k3jax.params import BalancingState, specs
from k3jax.sharding import activation_spec, make_mesh
from tests.layers.rows import RAGGED, relative_rms

CONFIG = MoEConfig(experts=6, top_k=2, scaling=2.5, balancing="quantile", bins=50)
D = 8


def tokens(n=40, dtype=jnp.float32, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=(n, D)), dtype)


KERNEL, BIAS = tokens(D, seed=1)[:, :6], 0.3 * tokens(1, seed=2)[0, :6]


def test_selects_by_biased_and_weighs_by_unbiased_scores():
    x = tokens()
    routing = route(x, KERNEL, BIAS, CONFIG)
    scores = 1 / (1 + np.exp(-np.asarray(x, np.float64) @ np.asarray(KERNEL, np.float64)))
    order = np.argsort(-(scores + np.asarray(BIAS)), axis=1, kind="stable")
    chosen = np.take_along_axis(scores, order, 1)
    assert np.array_equal(routing.indices, order[:, :2])
    assert not np.array_equal(order[:, :2], np.argsort(-scores, axis=1)[:, :2])
    assert relative_rms(routing.scores, scores) < 1e-6
    want = 2.5 * chosen[:, :2] / chosen[:, :2].sum(1, keepdims=True)
    assert relative_rms(routing.weights, want) < 1e-6
    third = np.take_along_axis(scores + np.asarray(BIAS), order[:, 2:3], 1)[:, 0]
    assert relative_rms(routing.cutoff, third) < 1e-6


def test_ties_go_to_the_lower_expert():
    routing = route(tokens(3), jnp.zeros((D, 6)), jnp.array([0.0, 0, 0, 1, 0, 0]), CONFIG)
    assert routing.indices.tolist() == [[3, 0]] * 3
    assert routing.cutoff.tolist() == [0.5] * 3
    assert relative_rms(routing.weights, np.full((3, 2), 1.25)) < 1e-6


@pytest.mark.parametrize(
    "change, total",
    [
        (dict(top_k=1), None),  # one route keeps its own score
        (dict(renormalise=False), None),
        (dict(top_k=6, balancing="none"), 2.5),  # every expert
        (dict(), 2.5),
    ],
)
def test_renormalisation(change, total):
    config = MoEConfig(**{**dict(experts=6, top_k=2, scaling=2.5, balancing="quantile"), **change})
    routing = route(tokens(), KERNEL, BIAS, config)
    chosen = np.take_along_axis(np.asarray(routing.scores), np.asarray(routing.indices), 1)
    want = 2.5 * chosen if total is None else total * chosen / chosen.sum(1, keepdims=True)
    assert relative_rms(routing.weights, want) < 1e-6
    assert np.all(np.isneginf(routing.cutoff)) == (config.top_k == 6)


def test_saturated_scores_keep_finite_weights_and_gradients():
    kernel = jnp.full((D, 6), -1e4)
    x = jnp.ones((4, D))
    loss = lambda x: route(x, kernel, jnp.zeros(6), CONFIG).weights.sum()  # noqa: E731
    assert np.all(np.isfinite(jax.grad(loss)(x)))
    assert np.all(np.isfinite(route(x, kernel, jnp.zeros(6), CONFIG).weights))


def test_bias_does_not_enter_weights_or_gradients():
    x, v = tokens(), tokens(seed=3)[:, :2]

    def loss(x, kernel, bias):
        return jnp.sum(route(x, kernel, bias, CONFIG).weights * v)

    # A bias that is equal for all experts cannot change the selection.
    plain = jax.value_and_grad(loss, argnums=(0, 1, 2))(x, KERNEL, BIAS)
    moved = jax.value_and_grad(loss, argnums=(0, 1, 2))(x, KERNEL, BIAS + 0.25)
    assert np.array_equal(plain[0], moved[0])
    for a, b in zip(plain[1], moved[1], strict=True):
        assert np.array_equal(a, b)
    assert np.all(plain[1][2] == 0) and np.any(plain[1][1] != 0)


def test_bfloat16_tokens_are_scored_in_float32():
    x = tokens(dtype=jnp.bfloat16)
    routing = route(x, KERNEL, BIAS, CONFIG)
    want = 1 / (1 + np.exp(-np.asarray(x, np.float64) @ np.asarray(KERNEL, np.float64)))
    assert routing.weights.dtype == routing.scores.dtype == jnp.float32
    assert relative_rms(routing.scores, want) < 1e-6


@pytest.mark.parametrize("mesh", [False, True])
def test_statistics_leave_padding_out(mesh):
    config = MoEConfig(experts=6, top_k=2, balancing="histogram", bins=50)
    router = QuantileRouter(config, D, init_std=1.0, rngs=nnx.Rngs(0))
    rng = np.random.default_rng(4)
    x = rng.normal(size=(*RAGGED.shape, D)).astype(np.float32)
    other = np.where(RAGGED[..., None] > 0, x, rng.normal(0, 9, x.shape).astype(np.float32))

    def stats(x):
        x, ids = jnp.asarray(x), jnp.asarray(RAGGED)
        if mesh:
            x = jax.sharding.reshard(x, activation_spec(3))
            ids = jax.sharding.reshard(ids, activation_spec(2))
        routing, _, stats = router(x, documents=documents_of(ids))
        return routing, jax.tree.map(np.asarray, stats)

    with jax.set_mesh(make_mesh()) if mesh else jax.enable_x64(False):
        routing, found = stats(x)
        _, again = stats(other)
    assert jax.tree.all(jax.tree.map(np.array_equal, found, again))
    real = RAGGED > 0
    routes = np.asarray(routing.indices)[real].reshape(-1)
    assert np.array_equal(found["load"].value, np.bincount(routes, minlength=6))
    assert found["tokens"].value == real.sum()
    required = np.asarray(routing.cutoff[..., None] - routing.scores)[real]
    want = [np.histogram(r, 50, (-1.0, 1.0))[0] for r in required.T]
    assert np.array_equal(found["histogram"].value, want)


def test_parameters_and_state():
    router = QuantileRouter(MoEConfig(experts=6, bins=50), D, rngs=None)
    found = {path: (spec.shape, spec.hf_name) for path, spec in specs(nnx.state(router))}
    assert found == {
        "kernel": ((D, 6), "block_sparse_moe.gate.weight"),
        "bias": ((6,), "block_sparse_moe.gate.e_score_correction_bias"),
        "histogram": ((6, 50), None),
        "bounds": ((2,), None),
    }
    assert set(nnx.state(router, BalancingState)) == {"bias", "histogram", "bounds"}


def test_the_rule_does_not_change_the_initial_weights():
    kernels = [
        QuantileRouter(MoEConfig(balancing=rule), D, rngs=nnx.Rngs(7)).kernel[...]
        for rule in ("none", "histogram")
    ]
    assert np.array_equal(*kernels)


def test_bad_settings_are_named():
    with pytest.raises(ValueError, match=r"moe\.top_k = 7: must be at most moe\.experts = 6"):
        MoEConfig(experts=6, top_k=7)
    with pytest.raises(ValueError, match=r"moe\.top_k = 6: quantile balancing needs an expert"):
        MoEConfig(experts=6, top_k=6, balancing="histogram")
    with pytest.raises(ValueError, match=r"moe\.balancing = 'fair': must be one of none, sign"):
        MoEConfig(balancing="fair")
