"""Schedules, and the rule that each parameter follows."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.nn import initializers

from k3jax.config import MeshConfig, OptimiserConfig
from k3jax.optim import learning_rate, make_optimiser, update
from k3jax.params import ParamSpec, declare, partition_specs
from k3jax.sharding import make_mesh

CONFIG = OptimiserConfig(warmup_fraction=0, clip_norm=0, learning_rate=0.1, weight_decay=0.5)
SHAPES = {"stack": (3, 4, 6), "heads": (2, 4, 9), "wide": (4, 6), "table": (5, 4), "gain": (4,)}


class Parts(nnx.Module):
    """A parameter of each kind: stacked and single matrices, a decayed table, an undecayed gain."""

    def __init__(self, rngs):
        normal, rule = initializers.normal(1.0), {"rule": "muon", "decay": True}
        axes = ("layers", "embed", "mlp")
        self.stack = declare(ParamSpec(SHAPES["stack"], axes, normal, **rule), rngs)
        heads = ParamSpec(SHAPES["heads"], ("layers", "embed", "heads"), normal, heads=3, **rule)
        self.heads = declare(heads, rngs)
        self.wide = declare(ParamSpec(SHAPES["wide"], axes[1:], normal, **rule), rngs)
        table = ParamSpec(SHAPES["table"], ("vocab", "embed"), normal, decay=True)
        self.table = declare(table, rngs)
        self.gain = declare(ParamSpec(SHAPES["gain"], (None,), normal), rngs)


@pytest.fixture(scope="module")
def params():
    return nnx.state(Parts(nnx.Rngs(0)))


def like(params, seed):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda p: jnp.asarray(rng.normal(size=p.shape), p.dtype), params)


def one_step(config, params, grads):
    optimiser = make_optimiser(config, 10, params)
    new, _ = jax.jit(lambda g, p: update(optimiser, g, optimiser.init(p), p))(grads, params)
    return new


def relative(a, b):
    return float(jnp.linalg.norm(a - b) / jnp.linalg.norm(b))


def newton_schulz(g):
    """The published iteration, one matrix at a time, in float64."""
    x = np.asarray(g, np.float64)
    if x.shape[0] > x.shape[1]:
        return newton_schulz(x.T).T
    x = x / np.linalg.norm(x)
    a, b, c = 3.4445, -4.7750, 2.0315
    for _ in range(5):
        s = x @ x.T
        x = a * x + (b * s + c * s @ s) @ x
    return x


def test_each_parameter_follows_its_rule(params):
    grads, lr, decay = like(params, 1), CONFIG.learning_rate, CONFIG.weight_decay
    new = one_step(CONFIG, params, grads)
    for name in ("stack", "wide"):
        old, grad = params[name][...], grads[name][...]
        matrices = np.asarray(grad).reshape(-1, 4, 6)
        direction = np.stack([newton_schulz(m) for m in matrices]).reshape(old.shape)
        expected = old - lr * (0.2 * 6**0.5 * direction + decay * old)
        assert relative(new[name][...], expected) < 1e-5
    sign = {name: jnp.sign(grads[name][...]) for name in ("table", "gain")}
    table, gain = params["table"][...], params["gain"][...]
    assert relative(new["table"][...], table - lr * (sign["table"] + decay * table)) < 1e-5
    assert relative(new["gain"][...], gain - lr * sign["gain"]) < 1e-5


@pytest.mark.parametrize("per_head", [True, False])
def test_every_head_is_a_matrix_of_its_own(params, per_head):
    """The blocks of columns are orthogonalised and scaled apart: 4 x 3, or all together: 4 x 9."""
    config = dataclasses.replace(CONFIG, weight_decay=0.0, muon_per_head=per_head)
    grads, widths = like(params, 6), [3] * 3 if per_head else [9]
    new, old = one_step(config, params, grads)["heads"][...], params["heads"][...]
    for layer in range(2):
        blocks = np.split(np.asarray(grads["heads"][layer]), np.cumsum(widths)[:-1], axis=1)
        expected = [0.2 * max(b.shape) ** 0.5 * newton_schulz(b) for b in blocks]
        step = (old[layer] - new[layer]) / config.learning_rate
        assert relative(step, np.concatenate(expected, axis=1)) < 1e-5


def test_momentum_is_that_of_the_papers(params):
    """M <- mu M + G, direction of mu M + G."""
    config = dataclasses.replace(CONFIG, weight_decay=0.0, schedule="wsd", final_fraction=1.0)
    optimiser = make_optimiser(config, 10, params)
    state, momentum, now = optimiser.init(params), 0, params
    for seed in (7, 8, 9):
        grads, old = like(params, seed), now
        now, state = jax.jit(lambda *args: update(optimiser, *args))(grads, state, old)
        grad, mu = np.asarray(grads["wide"][...], np.float64), config.muon_momentum
        momentum = mu * momentum + grad
        expected = 0.2 * 6**0.5 * newton_schulz(mu * momentum + grad)
        step = (old["wide"][...] - now["wide"][...]) / config.learning_rate
        assert relative(step, expected) < 1e-4


def test_adamw_everywhere(params):
    config = dataclasses.replace(CONFIG, kind="adamw", weight_decay=0.0)
    grads = like(params, 2)
    new = one_step(config, params, grads)
    for name in SHAPES:
        expected = params[name][...] - 0.1 * jnp.sign(grads[name][...])
        assert relative(new[name][...], expected) < 1e-5


def test_an_expert_without_gradient_stays(params):
    config = dataclasses.replace(CONFIG, weight_decay=0.0)
    grads = like(params, 3)
    grads["stack"] = grads["stack"].replace(grads["stack"][...].at[1].set(0))
    new, old = one_step(config, params, grads)["stack"][...], params["stack"][...]
    assert jnp.array_equal(new[1], old[1]) and relative(new[0], old[0]) > 0.01


def test_gradients_are_clipped_together(params):
    """Adam forgets scale, so clipping shows in its second moment: the clipped norm is 1."""
    config = dataclasses.replace(CONFIG, kind="adamw", clip_norm=1.0)
    optimiser = make_optimiser(config, 10, params)
    state = optimiser.init(params)
    _, state = update(optimiser, jax.tree.map(lambda g: 7 * g, like(params, 4)), state, params)
    moments = [
        leaf for path, leaf in jax.tree_util.tree_leaves_with_path(state) if "nu" in str(path)
    ]
    total = sum(float(leaf.sum()) for leaf in moments)
    assert abs(total / (1 - config.beta2) - 1) < 1e-5


def test_a_vector_cannot_follow_muon():
    with pytest.raises(ValueError, match="is no matrix"):
        ParamSpec((4,), (None,), initializers.ones, rule="muon")


def test_the_same_under_explicit_axes(params):
    grads = like(params, 5)
    expected = one_step(CONFIG, params, grads)
    with jax.set_mesh(make_mesh(MeshConfig())):
        place = lambda tree: jax.tree.map(jax.device_put, tree, partition_specs(params))  # noqa: E731
        new = one_step(CONFIG, place(params), place(grads))
        specs = jax.tree.leaves(jax.tree.map(lambda leaf: leaf.sharding.spec, new))
        assert specs == jax.tree.leaves(partition_specs(params))
    for a, b in zip(jax.tree.leaves(new), jax.tree.leaves(expected), strict=True):
        assert relative(jax.device_get(a), b) < 1e-6


def rates(steps, **settings):
    schedule = learning_rate(OptimiserConfig(learning_rate=1.0, **settings), steps)
    return np.array([schedule(step) for step in range(steps)])


def test_cosine():
    found = rates(101, schedule="cosine", warmup_fraction=0.1, final_fraction=0.2)
    np.testing.assert_allclose(found[:10], np.arange(1, 11) / 11, rtol=1e-6)
    fall = 0.2 + 0.8 * (1 + np.cos(np.pi * np.arange(91) / 90)) / 2
    np.testing.assert_allclose(found[10:], fall, rtol=1e-5)


def test_warm_up_stable_decay():
    found = rates(101, schedule="wsd", warmup_fraction=0.1, decay_fraction=0.2, final_fraction=0.0)
    np.testing.assert_allclose(found[:10], np.arange(1, 11) / 11, rtol=1e-6)
    np.testing.assert_allclose(found[10:81], 1.0)
    np.testing.assert_allclose(found[80:], np.arange(20, -1, -1) / 20, atol=1e-6)


@pytest.mark.parametrize("schedule", ["cosine", "wsd"])
@pytest.mark.parametrize("steps", [1, 2, 3])
@pytest.mark.parametrize("warmup", [0.0, 0.5, 1.0])
def test_short_runs_have_positive_finite_rates(schedule, steps, warmup):
    found = rates(steps, schedule=schedule, warmup_fraction=warmup)
    assert np.all(np.isfinite(found)) and np.all(found > 0) and np.all(found <= 1)
