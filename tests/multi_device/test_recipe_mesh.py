"""The whole step of the recipe on eight devices equals that on one: Muon per head, QK clip.

Run as a program, this file does the comparison: fake devices must be asked for before jax starts.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.config import (
    FeedForwardConfig,
    MeshConfig,
    MLAConfig,
    ModelConfig,
    MoEConfig,
    OptimiserConfig,
    ResidualConfig,
)
from k3jax.layers.balancing import update_balancing
from k3jax.model import Decoder
from k3jax.optim import learning_rate
from k3jax.sharding import BATCH, SEQUENCE, make_mesh
from k3jax.train.state import blueprint
from k3jax.train.step import decoder_loss, make_step
from tests.multi_device.eight_devices import run_on_eight_devices

STEPS, MICRO, ROWS, TOKENS = 3, 2, 4, 8
MODEL = ModelConfig(
    vocab_size=32,
    d_model=16,
    layers=2,
    kda_to_full="0:1",
    mla=MLAConfig(
        heads=4, q_lora_rank=8, kv_lora_rank=6, qk_nope_dim=4, qk_rope_dim=2, value_dim=4
    ),
    residual=ResidualConfig("plain"),
    ffn=FeedForwardConfig(dense_width=8),
    moe=MoEConfig(experts=0),
    init_std=0.5,
    dtype="float64",
)
# The limit lies within the spread of the heads' logits: some are clipped, others are not.
OPTIMISER = OptimiserConfig(learning_rate=0.05, warmup_fraction=0, qk_clip=3.0)


def run(mesh: MeshConfig, batches: list[dict]) -> tuple[list[np.ndarray], list[dict]]:
    with jax.set_mesh(make_mesh(mesh)):
        plan = blueprint(lambda rngs: Decoder(MODEL, rngs=rngs), OPTIMISER, STEPS)
        rebalance = functools.partial(update_balancing, config=MODEL.moe)
        schedule, limit = learning_rate(OPTIMISER, STEPS), OPTIMISER.qk_clip
        loss = decoder_loss(plan.graphdef)
        step = make_step(loss, rebalance, plan.optimiser, schedule, np.ones(32), limit)
        state = plan.create(0)
        params = jax.tree.map(lambda p: p.astype(jnp.float64), state.params)
        opt_state = jax.jit(plan.optimiser.init)(params)
        state = dataclasses.replace(state, params=params, opt_state=opt_state)
        found = []
        for batch in batches:
            spec = jax.P(None, BATCH, SEQUENCE)
            state, metrics = step(state, {k: jax.device_put(v, spec) for k, v in batch.items()})
            found.append({name: float(value) for name, value in metrics.items()})
        return [np.asarray(leaf) for leaf in jax.tree.leaves(state.params)], found


def main():
    jax.config.update("jax_enable_x64", True)
    rng = np.random.default_rng()

    def batch():
        shape = (MICRO, ROWS, TOKENS)
        ids = np.sort(rng.integers(0, 4, shape), axis=2).astype(np.int32)
        inputs, targets = rng.integers(0, 32, (2, *shape), dtype=np.int32)
        weights = (ids > 0).astype(np.float64)
        return {"inputs": inputs, "targets": targets, "weights": weights, "segment_ids": ids}

    batches = [batch() for _ in range(STEPS)]
    one, expected = run(MeshConfig(), batches)
    many, metrics = run(MeshConfig(data=2, context=2, tensor=2), batches)
    assert {leaf.dtype for leaf in one} == {np.dtype(np.float64)}
    clipped = [m["qk_clipped_heads"] for m in expected]
    assert 0 < sum(clipped) < STEPS * MODEL.layers * MODEL.mla.heads, clipped
    for here, there in zip(expected, metrics, strict=True):
        assert here.keys() == there.keys()
        assert all(abs(there[k] - v) <= 1e-6 * abs(v) for k, v in here.items()), (here, there)
    for want, got in zip(one, many, strict=True):
        error = np.sqrt(np.mean((got - want) ** 2) / np.mean(want**2))
        assert error < 1e-10, (want.shape, error)
    print(len(jax.devices()), "devices agree")


@pytest.mark.full
def test_eight_devices_equal_one():
    run_on_eight_devices("tests.multi_device.test_recipe_mesh")


if __name__ == "__main__":
    main()
