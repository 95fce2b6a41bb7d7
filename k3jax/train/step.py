"""The training step: one compiled function from state and batch to state and metrics.

A batch is a dict of `inputs`, `targets`, `segment_ids` (int32) and `weights` (float), each
`[micro-batches, rows, T]`; see `k3jax.data`. Means are over all tokens of the batch, however they
are spread over micro-batches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from k3jax.layers.balancing import load_ratio
from k3jax.layers.documents import documents_of
from k3jax.layers.stats import Stats, Sum, reduce_stats
from k3jax.model import next_token_loss
from k3jax.optim import clip_logits, update
from k3jax.sharding import spec_of, under_mesh
from k3jax.train.state import TrainState

type Batch = dict[str, jax.Array]
type Metrics = dict[str, jax.Array]
type Loss = Callable[[nnx.State, nnx.State, Batch], tuple[jax.Array, Stats]]
type Rebalance = Callable[[nnx.State, Stats], nnx.State]


def decoder_loss(graphdef: nnx.GraphDef, probes: Sequence[str] = (), gapless: bool = False) -> Loss:
    """The loss of a decoder: `(sum of weighted nll in nats, stats)` of one micro-batch.

    `gapless`: batches are padded at the ends of rows alone, as those of `k3jax.data` are. The
    stats' own entry, `correct`, is the weight of the targets that it finds most probable.
    """

    def loss(params: nnx.State, balancing: nnx.State, batch: Batch) -> tuple[jax.Array, Stats]:
        model = nnx.merge(graphdef, params, balancing)
        documents = documents_of(batch["segment_ids"], gapless)
        hidden, _, stats = model.hidden(batch["inputs"], documents=documents, probes=probes)
        nll, correct = next_token_loss(model, hidden, batch["targets"], batch["weights"])
        return nll, stats | {"correct": Sum(correct)}

    return loss


def make_step(
    loss: Loss,
    rebalance: Rebalance,
    optimiser: optax.GradientTransformation,
    schedule: optax.Schedule,
    token_bytes: np.ndarray,
    qk_clip: float = 0,
) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
    """The step function, compiled on first call; it consumes (donates) the state.

    A step whose loss or gradient is not finite changes nothing but the counts. `token_bytes
    [vocab]` are the bytes each token stands for; `qk_clip` limits attention logits, 0 does not.
    Metrics are scalars: `loss` in nats per token, `bits_per_byte`, `accuracy`, `grad_norm`,
    `learning_rate`, `dropped_steps` (so far); where there are experts, `expert_load` (largest load
    over mean load, of the layer in which it is worst) and `dropped_routes` (those that found no
    room on their way to an expert, of all layers); where there is softmax attention, what
    `clip_logits` finds.
    """

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        weight, share = target_weight(batch)
        grads, mean, stats = accumulated(loss, state, batch, share)
        norm = optax.tree.norm(grads)
        size = target_bytes(batch, token_bytes)
        finite = jnp.isfinite(mean) & jnp.isfinite(norm)

        params, opt_state = update(optimiser, grads, state.opt_state, state.params)
        params, logits = clip_logits(params, stats, qk_clip)
        old = (state.params, state.balancing, state.opt_state)
        new = jax.tree.leaves((params, rebalance(state.balancing, stats), opt_state))
        kept = [jnp.where(finite, n, o) for n, o in zip(new, jax.tree.leaves(old), strict=True)]
        params, balancing, opt_state = jax.tree.unflatten(jax.tree.structure(old), kept)
        skipped = state.skipped + ~finite
        metrics = {
            "loss": mean,
            "bits_per_byte": mean * weight / math.log(2) / jnp.maximum(size, 1),
            "accuracy": stats["correct"].value * share,
            "grad_norm": norm,
            "learning_rate": schedule(state.step - state.skipped),
            "dropped_steps": skipped,
        }
        metrics |= _expert_metrics(stats) | logits
        state = TrainState(params, balancing, opt_state, state.step + 1, skipped, state.rng)
        return state, metrics

    return jax.jit(step, donate_argnums=0)


def target_weight(batch: Batch) -> tuple[jax.Array, jax.Array]:
    """The weight of all targets of `batch`, and a unit's share of it: 1 where there is none."""
    weight = jnp.sum(batch["weights"])
    return weight, 1 / jnp.where(weight > 0, weight, 1)


def accumulated(
    loss: Loss, state: TrainState, batch: Batch, share: jax.Array
) -> tuple[nnx.State, jax.Array, Stats]:
    """Gradient, value and stats of `share` times the loss, summed over micro-batches in turn."""

    def micro_batch(grads: nnx.State, part: Batch) -> tuple[nnx.State, Any]:
        def objective(params: nnx.State) -> tuple[jax.Array, Stats]:
            nll, stats = loss(params, state.balancing, part)
            return nll * share, stats

        out, grad = jax.value_and_grad(objective, has_aux=True)(state.params)
        return jax.tree.map(jnp.add, grads, grad), out

    zeros = jax.tree.map(jnp.zeros_like, state.params)
    grads, (losses, stats) = jax.lax.scan(micro_batch, zeros, batch)
    return grads, jnp.sum(losses), reduce_stats(stats)


def make_evaluation(
    loss: Loss, token_bytes: np.ndarray
) -> Callable[[TrainState, Batch], dict[str, jax.Array]]:
    """A compiled function from state and `[rows, T]` batch to sums over its targets.

    They are `bits`, `bytes`, `targets` (their weight), `correct` of them, and `dropped`: how many
    routes to experts were.
    """

    def evaluate(state: TrainState, batch: Batch) -> dict[str, jax.Array]:
        nll, stats = loss(state.params, state.balancing, batch)
        return {
            "bits": nll / math.log(2),
            "bytes": target_bytes(batch, token_bytes),
            "targets": jnp.sum(batch["weights"]),
            "correct": stats["correct"].value,
            "dropped": dropped_routes(stats),
        }

    return jax.jit(evaluate)


def target_bytes(batch: Batch, token_bytes: np.ndarray) -> jax.Array:
    """How many bytes the weighted targets of `batch` stand for."""
    table, targets = jnp.asarray(token_bytes, jnp.float32), batch["targets"]
    out = spec_of(targets) if under_mesh() else None
    return jnp.sum(table.at[targets].get(out_sharding=out) * batch["weights"])


def dropped_routes(stats: Stats) -> jax.Array:
    """How many routes to experts found no room, in all layers."""
    return _expert_metrics(stats).get("dropped_routes", jnp.float32(0))


def _expert_metrics(stats: Stats) -> Metrics:
    """What all layers with experts report: the worst load, the total of dropped routes."""
    leaves = jax.tree_util.tree_leaves_with_path(stats, is_leaf=lambda leaf: isinstance(leaf, Sum))

    def named(name: str) -> list[jax.Array]:
        return [leaf.value for path, leaf in leaves if _name(path[-1]) == name]

    metrics = {}
    if loads := named("load"):
        metrics["expert_load"] = jnp.max(jnp.stack([load_ratio(load).max() for load in loads]))
    if dropped := named("dropped_routes"):
        # One layer's count fits in int32, the sum of all layers may not.
        totals = [jnp.sum(counts.astype(jnp.float32)) for counts in dropped]
        metrics["dropped_routes"] = jnp.sum(jnp.stack(totals))
    return metrics


def _name(key: Any) -> str:
    return jax.tree_util.keystr((key,), simple=True)
