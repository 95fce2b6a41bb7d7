"""Gated feed-forward layers: SwiGLU, and the saturating SiTU of Kimi K3."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from flax import nnx

from k3jax.config import FeedForwardConfig
from k3jax.layers.documents import Documents
from k3jax.layers.linear import island, matrix, project
from k3jax.layers.stats import Stats
from k3jax.params import declare

Gate = Callable[[jax.Array, jax.Array], jax.Array]  # (gate, up) pre-activations -> hidden


def swiglu(a: jax.Array, b: jax.Array) -> jax.Array:
    """`silu(a) * b` of equal shapes, in a float32 island, in the dtype of `a`."""
    wide = island(a.dtype)
    return (jax.nn.silu(a.astype(wide)) * b.astype(wide)).astype(a.dtype)


def situ(a: jax.Array, b: jax.Array, beta: float, linear_beta: float) -> jax.Array:
    """SiTU-GLU (K3R eq. 12): SwiGLU with both factors saturated, bounded by `beta * linear_beta`.

    `beta tanh(a / beta) sigmoid(a) * linear_beta tanh(b / linear_beta)`, the sigmoid of the raw
    `a`; in a float32 island, in the dtype of `a`. With `linear_beta = 0` the second factor is `b`
    itself. Both betas to infinity give `swiglu`.
    """
    wide = island(a.dtype)
    gate, up = a.astype(wide), b.astype(wide)
    gate = beta * jnp.tanh(gate / beta) * jax.nn.sigmoid(gate)
    if linear_beta:
        up = linear_beta * jnp.tanh(up / linear_beta)
    return (gate * up).astype(a.dtype)


def activation(config: FeedForwardConfig) -> Gate:
    """The function of gate and up pre-activations that `config` names."""
    if config.activation == "swiglu":
        return swiglu
    return functools.partial(situ, beta=config.situ_beta, linear_beta=config.situ_linear_beta)


class GatedMLP(nnx.Module):
    """`down(act(gate x, up x))`: a dense layer, or all shared experts of a layer as one.

    `hf_prefix` is `mlp` for dense layers, `block_sparse_moe.shared_experts` for shared experts.
    """

    def __init__(
        self,
        d_model: int,
        width: int,
        config: FeedForwardConfig,
        *,
        init_std: float = 0.02,
        hf_prefix: str = "mlp",
        rngs: nnx.Rngs | None,
    ):
        def kernel(name: str, shape: tuple[int, int], axes: tuple[str, str]) -> nnx.Variable:
            return declare(matrix(shape, axes, f"{hf_prefix}.{name}_proj.weight", init_std), rngs)

        self.config = config
        self.gate = kernel("gate", (d_model, width), ("embed", "mlp"))
        self.up = kernel("up", (d_model, width), ("embed", "mlp"))
        self.down = kernel("down", (width, d_model), ("mlp", "embed"))

    def __call__(
        self, x: jax.Array, *, documents: Documents, cache: None = None, probes: Sequence[str] = ()
    ) -> tuple[jax.Array, None, Stats]:
        """`x [B, T, d]` to the same shape and dtype; padding gives zero. No cache, no stats."""
        # The backward pass saves the products alone.
        hidden = jax.checkpoint(activation(self.config))(project(x, self.gate), project(x, self.up))
        y = project(hidden, self.down)
        return jnp.where(documents.real[..., None], y, 0), cache, {}
