"""A decoder in miniature: the shape of `k3jax.model.Decoder`, compiled in a second.

It reads the token, the one before it, and its position; a router's bias stands for balancing state.
"""

import dataclasses
import math
from typing import Any

import grain
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.nn import initializers

from k3jax.config import ExperimentConfig, OptimiserConfig
from k3jax.layers.stats import Sum
from k3jax.optim import learning_rate
from k3jax.params import BalancingState, ParamSpec, declare, weight
from k3jax.sharding import activation_spec, under_mesh
from k3jax.train.state import Blueprint, TrainState, blueprint
from k3jax.train.step import make_step

VOCAB, WIDTH, EXPERTS, STEPS = 12, 8, 4, 12


class Stub(nnx.Module):
    def __init__(self, rngs, dtype=jnp.float32):
        normal, dtype = initializers.normal(0.3), jnp.dtype(dtype)
        table = ParamSpec((VOCAB, WIDTH), ("vocab", "embed"), normal, decay=True, dtype=dtype)
        mix = ParamSpec(
            (2, WIDTH, WIDTH), ("layers", "embed", "mlp"), normal, "muon", True, dtype=dtype
        )
        scale = ParamSpec((WIDTH,), (None,), initializers.ones, dtype=dtype)
        self.table, self.mix, self.scale = (declare(s, rngs) for s in (table, mix, scale))
        bias = ParamSpec((EXPERTS,), (None,), initializers.zeros)
        self.bias = declare(bias, rngs, BalancingState)

    def nll(self, tokens, targets):
        """`[rows, T]` nats per token, and stats."""
        table = weight(self.table, self.table.dtype)
        out = activation_spec(3) if under_mesh() else None
        x = table.at[tokens].get(out_sharding=out) * self.scale[...]
        for layer in range(2):
            x = jnp.tanh(x @ weight(self.mix, x.dtype)[layer])
        logits = jnp.einsum("btd,vd->btv", x, table)
        picked = jnp.sum(jnp.where(targets[..., None] == jnp.arange(VOCAB), logits, 0), -1)
        load = jnp.sum(tokens[..., None] % EXPERTS == jnp.arange(EXPERTS), (0, 1))
        stats = {"blocks": {0: {"router": {"load": Sum(load.astype(jnp.float32))}}}}
        return jax.nn.logsumexp(logits, -1) - picked, stats


def stub_loss(graphdef):
    def loss(params, balancing, batch):
        model = nnx.merge(graphdef, params, balancing)
        nll, stats = model.nll(batch["inputs"], batch["targets"])
        return jnp.sum(nll * batch["weights"]), stats | {
            "correct": Sum(jnp.sum((nll < math.log(VOCAB)) * batch["weights"]))
        }

    return loss


def stub_rebalance(balancing, stats):
    load = stats["blocks"][0]["router"]["load"].value
    return jax.tree.map(lambda bias: bias - 0.1 * (load - load.mean()), balancing)


def stub_batch(rng, micro=2, rows=2, length=6, dtype=np.float32):
    """A random batch `[micro, rows, T]` with unequal, some zero, weights."""
    shape = (micro, rows, length)
    weights = rng.uniform(0.1, 2, shape) * (rng.uniform(size=shape) < 0.7)
    return {
        "inputs": rng.integers(VOCAB, size=shape, dtype=np.int32),
        "targets": rng.integers(VOCAB, size=shape, dtype=np.int32),
        "segment_ids": np.ones(shape, np.int32),
        "weights": weights.astype(dtype),
    }


@dataclasses.dataclass
class Run:
    """The stub's configuration, blueprint and compiled step."""

    config: ExperimentConfig
    plan: Blueprint
    step: Any

    def data(self):
        rows = grain.MapDataset.range(1000).map(lambda i: stub_batch(np.random.default_rng(i)))
        return iter(rows.to_iter_dataset())

    def advance(self, state: TrainState, data, steps: int):
        """`steps` steps on: the state, and the losses on the way."""
        losses = []
        for _ in range(steps):
            state, metrics = self.step(state, next(data))
            losses.append(float(metrics["loss"]))
        return state, losses


def make_run() -> Run:
    config = ExperimentConfig(optimiser=OptimiserConfig(learning_rate=0.02))
    plan = blueprint(Stub, config.optimiser, STEPS)
    schedule = learning_rate(config.optimiser, STEPS)
    loss = stub_loss(plan.graphdef)
    step = make_step(loss, stub_rebalance, plan.optimiser, schedule, np.ones(VOCAB))
    return Run(config, plan, step)


def same_bits(a, b) -> bool:
    """Whether two trees of arrays (typed keys among them) agree in every bit."""

    def raw(x):
        is_key = jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
        return np.asarray(jax.random.key_data(x) if is_key else x).tobytes()

    return list(map(raw, jax.tree.leaves(a))) == list(map(raw, jax.tree.leaves(b)))
