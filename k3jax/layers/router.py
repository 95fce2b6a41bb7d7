"""Which experts a token goes to, and with what weights (K3R eq. 13)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from k3jax.config import MoEConfig
from k3jax.layers import balancing
from k3jax.layers.documents import Documents
from k3jax.layers.linear import island, matrix
from k3jax.layers.stats import Stats, reduce_stats
from k3jax.parallel.experts.names import name_plan
from k3jax.parallel.local import local
from k3jax.params import BalancingState, declare, weight
from k3jax.sharding import mesh_axes, spec_of, under_mesh


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Routing:
    """The routes of tokens `[...]` to `k` of `E` experts.

    `indices [..., k]` int32: experts in falling order of biased score, ties to the lower number.
    `weights [..., k]`: combination weights, at least float32, differentiable. `scores [..., E]`:
    the unbiased sigmoid scores. `cutoff [...]`: the (k+1)-th largest biased score, which a route
    must beat; -inf where k = E.
    """

    indices: jax.Array
    weights: jax.Array
    scores: jax.Array
    cutoff: jax.Array


def route(x: jax.Array, kernel: jax.Array, bias: jax.Array, config: MoEConfig) -> Routing:
    """Top-k routing of `x [..., d]` by `sigmoid(x @ kernel [d, E])`, in at least float32.

    `bias [E]` takes part in the selection only, never in the weights or in gradients. Weights sum
    to `config.scaling` where `config.renormalise` and k > 1 (the official code leaves k = 1 alone).
    """
    wide = island(x.dtype)
    logits = jnp.matmul(x.astype(wide), kernel.astype(wide), precision=jax.lax.Precision.HIGHEST)
    scores = jax.nn.sigmoid(logits)
    k, experts = config.top_k, config.experts
    biased = jax.lax.stop_gradient(scores + bias)
    best, indices = jax.lax.top_k(biased, min(k + 1, experts))
    cutoff = best[..., k] if k < experts else jnp.full_like(best[..., 0], -jnp.inf)
    indices = name_plan(indices[..., :k])  # the choice is made once, whatever is recomputed
    weights = _select(scores, indices)
    if config.renormalise and k > 1:
        # weights / (sum + 1e-20), in units of the largest: the gradient divides by the square of
        # the sum, which would underflow where all scores are saturated.
        unit = 1 / jnp.maximum(jax.lax.stop_gradient(weights.max(-1, keepdims=True)), 1e-30)
        weights = unit * weights / ((unit * weights).sum(-1, keepdims=True) + 1e-20 * unit)
    return Routing(indices, weights * config.scaling, scores, cutoff)


def _select(scores: jax.Array, indices: jax.Array) -> jax.Array:
    """`scores [..., E]` at `indices [..., k]`, as a fused sum: its gradient needs no scatter."""
    chosen = indices[..., None] == jnp.arange(scores.shape[-1])
    return jnp.where(chosen, scores[..., None, :], 0).sum(axis=-1)


class QuantileRouter(nnx.Module):
    """Sigmoid router with a selection bias that quantile balancing, or another rule, moves.

    `config.balancing` names the rule; the layer only gathers its statistics. The bias moves in
    `k3jax.layers.balancing.update_balancing`, once per optimiser step (K3R §2.3.3).
    """

    bias: BalancingState

    def __init__(
        self, config: MoEConfig, d_model: int, *, init_std: float = 0.02, rngs: nnx.Rngs | None
    ):
        self.config = config
        spec = matrix(
            (d_model, config.experts), ("embed", None), "block_sparse_moe.gate.weight", init_std
        )
        self.kernel = declare(spec, rngs)
        # The state is constant at the start: it takes nothing from the model's random stream.
        constant = None if rngs is None else nnx.Rngs(0)
        for name, state in balancing.state_specs(config).items():
            setattr(self, name, declare(state, constant, BalancingState))

    def __call__(
        self, x: jax.Array, *, documents: Documents, cache: None = None, probes: Sequence[str] = ()
    ) -> tuple[Routing, None, Stats]:
        """Routes of `x [B, T, d]`, and what balancing needs to know of its real tokens."""
        kernel = weight(self.kernel, island(x.dtype))
        routing = route(x, kernel, self.bias[...], self.config)
        return routing, cache, self._statistics(routing, documents.real)

    def _statistics(self, routing: Routing, real: jax.Array) -> Stats:
        """Of all devices' tokens: each counts its own, and parts add up as micro-batches do."""
        spec = spec_of(routing.cutoff) if under_mesh() else PartitionSpec()
        if under_mesh():
            real = jax.sharding.reshard(real, spec)

        def shard(routing: Routing, real: jax.Array, bias: jax.Array) -> Stats:
            flat, valid = jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), (routing, real))
            stats = balancing.statistics(
                flat.indices, flat.scores, flat.cutoff, bias, valid, self.config
            )
            return jax.tree.map(lambda leaf: leaf[None], stats)

        parts = PartitionSpec(mesh_axes(spec))
        return reduce_stats(local(shard, routing, real, self.bias[...], out_specs=parts))
