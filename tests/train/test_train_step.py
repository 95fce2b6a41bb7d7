"""The step: accumulation equals one batch, bad steps are dropped, metrics say what happened."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.config import OptimiserConfig
from k3jax.optim import learning_rate
from k3jax.sharding import BATCH, make_mesh
from k3jax.train.state import blueprint
from k3jax.train.step import make_evaluation, make_step
from tests.train.stub import STEPS, VOCAB, Stub, same_bits, stub_batch, stub_loss, stub_rebalance

ADAM = OptimiserConfig(kind="adamw", warmup_fraction=0.0)
TOKEN_BYTES = np.arange(VOCAB) % 3


def stub_step(dtype, config=ADAM):
    plan = blueprint(lambda rngs: Stub(rngs, dtype), config, STEPS)
    schedule = learning_rate(config, STEPS)
    loss = stub_loss(plan.graphdef)
    return plan, make_step(loss, stub_rebalance, plan.optimiser, schedule, TOKEN_BYTES)


@pytest.fixture(scope="module")
def single():
    return stub_step(jnp.float32)


def difference(a, b):
    """The largest relative RMS difference of a leaf."""
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return max(float(jnp.linalg.norm(x - y) / (jnp.linalg.norm(y) + 1e-300)) for x, y in pairs)


def test_micro_batches_equal_one_batch():
    with jax.enable_x64(True):
        plan, step = stub_step(jnp.float64)
        whole = stub_batch(np.random.default_rng(0), micro=1, rows=4, dtype=np.float64)
        whole["weights"][:, 0] = 0  # micro-batches of very unequal weight, one of them empty
        one, expected = step(plan.create(0), whole)
        assert difference(one.params, plan.create(0).params) > 1e-4
        split = {name: x.reshape(4, 1, -1) for name, x in whole.items()}
        many, metrics = step(plan.create(0), split)
        for part in ("params", "balancing", "opt_state"):
            assert difference(getattr(many, part), getattr(one, part)) < 1e-12
        assert all(abs(metrics[k] - x) <= 1e-12 * abs(x) for k, x in expected.items())


def test_metrics(single):
    plan, step = single
    batch = stub_batch(np.random.default_rng(0))
    state = plan.create(0)
    flat = {name: x.reshape(4, -1) for name, x in batch.items()}
    found = make_evaluation(stub_loss(plan.graphdef), TOKEN_BYTES)(state, flat)
    bits, size = found["bits"], found["bytes"]
    assert float(found["dropped"]) == 0
    assert float(found["targets"]) == pytest.approx(batch["weights"].sum(), rel=1e-6)
    _, metrics = step(state, batch)
    total = batch["weights"].sum()
    size_here = (TOKEN_BYTES[batch["targets"]] * batch["weights"]).sum()
    assert float(size) == pytest.approx(size_here, rel=1e-6)
    assert float(metrics["bits_per_byte"]) == pytest.approx(float(bits / size), rel=1e-5)
    right = float(found["correct"] / found["targets"])
    assert 0 < right < 1 and float(metrics["accuracy"]) == pytest.approx(right, rel=1e-5)
    assert float(metrics["loss"]) == pytest.approx(float(bits) * math.log(2) / total, rel=1e-5)
    load = np.bincount(batch["inputs"].ravel() % 4, minlength=4)
    assert float(metrics["expert_load"]) == pytest.approx(load.max() / load.mean(), rel=1e-6)
    assert float(metrics["learning_rate"]) == pytest.approx(ADAM.learning_rate)
    assert int(metrics["dropped_steps"]) == 0


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_steps_that_are_not_finite_change_nothing(single, bad):
    plan, step = single
    rng = np.random.default_rng(3)
    good, second = stub_batch(rng), stub_batch(rng)
    poisoned = dict(good, weights=good["weights"].copy())
    poisoned["weights"][1, 0, 2] = bad
    before, first = step(plan.create(0), good)
    kept = jax.tree.map(jnp.copy, before)
    after, metrics = step(before, poisoned)
    assert not np.isfinite(metrics["loss"]) and int(metrics["dropped_steps"]) == 1
    for name in ("params", "balancing", "opt_state"):
        assert same_bits(getattr(after, name), getattr(kept, name))
    assert (int(after.step), int(after.skipped)) == (2, 1)
    resumed, metrics = step(after, second)
    direct, expected = step(kept, second)
    assert same_bits(resumed.params, direct.params)
    assert metrics["learning_rate"] == expected["learning_rate"] < first["learning_rate"]


def test_a_batch_of_padding_only_is_finite(single):
    plan, step = single
    batch = stub_batch(np.random.default_rng(0))
    state, metrics = step(plan.create(0), dict(batch, weights=0 * batch["weights"]))
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state.params))
    assert float(metrics["loss"]) == 0 and int(metrics["dropped_steps"]) == 0


def test_on_and_off_the_mesh():
    batch = stub_batch(np.random.default_rng(5))
    plan, step = stub_step(jnp.float32, OptimiserConfig())
    off, metrics = step(plan.create(0), batch)
    with jax.set_mesh(make_mesh()):
        spec = jax.P(None, BATCH, "context")
        placed = {name: jax.device_put(x, spec) for name, x in batch.items()}
        on, same = step(plan.create(0), placed)
        assert on.params["mix"][...].sharding.spec == jax.P(None, "fsdp", "tensor")
    assert difference(jax.device_get(on.params), jax.device_get(off.params)) < 1e-6
    assert float(metrics["loss"]) == pytest.approx(float(same["loss"]), rel=1e-6)
