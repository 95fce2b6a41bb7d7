"""Mixture of experts, at latent or full width, beside shared experts (K3R §2.3, eq. 11)."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from k3jax.config import ModelConfig
from k3jax.layers.documents import Documents
from k3jax.layers.ffn import GatedMLP, activation
from k3jax.layers.linear import gain, matrix, normal, project, rms_norm
from k3jax.layers.router import QuantileRouter, Routing
from k3jax.layers.stats import Stats, Sum
from k3jax.parallel.experts import Bank, Group, choose, name_sum, run_experts
from k3jax.parallel.local import gathered, local
from k3jax.params import ParamSpec, declare, weight
from k3jax.sharding import mesh_axes, spec_of, under_mesh
from pallas_kernels.dispatch import current_platform

HF = "block_sparse_moe"


class LatentMoE(nnx.Module):
    """`shared(x) + up(norm(sum_e p_e E_e(down x)))` (K3R eq. 11); the router reads `x` itself.

    With `moe.latent_width = 0` experts work at full width and there is no down, norm or up:
    `shared(x) + sum_e p_e E_e(x)` (Kimi Linear). The `moe.shared_experts` experts that every token
    takes are one MLP of their summed width.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs | None):
        moe, d, std = config.moe, config.d_model, config.init_std
        width, hidden, inner = moe.latent_width or d, moe.expert_width, "embed"
        self.config = config
        self.router = QuantileRouter(moe, d, init_std=std, rngs=rngs)
        if moe.latent_width:
            inner = "latent"
            prefix = f"{HF}.routed_expert"
            # Only the full-width side is split: one mesh axis cannot serve both.
            down = matrix((d, width), ("embed", None), f"{prefix}_down_proj.weight", std)
            up = matrix((width, d), (None, "embed"), f"{prefix}_up_proj.weight", std)
            self.down, self.up = declare(down, rngs), declare(up, rngs)
            if moe.latent_norm:
                self.norm = declare(gain(width, f"{prefix}_norm.weight"), rngs)

        def bank(name: str, shape: tuple[int, int], axes: tuple[str, str]) -> nnx.Variable:
            spec = ParamSpec(
                (moe.experts, *shape),
                ("experts", *axes),
                normal(std),
                rule="muon",
                decay=True,
                hf_name=f"{HF}.experts.{{expert}}.{name}.weight",
            )
            return declare(spec, rngs)

        self.expert_gate = bank("w1", (width, hidden), (inner, "mlp"))
        self.expert_up = bank("w3", (width, hidden), (inner, "mlp"))
        self.expert_down = bank("w2", (hidden, width), ("mlp", inner))
        if moe.shared_experts:
            self.shared = GatedMLP(
                d,
                moe.shared_experts * hidden,
                config.ffn,
                init_std=std,
                hf_prefix=f"{HF}.shared_experts",
                rngs=rngs,
            )

    def __call__(
        self, x: jax.Array, *, documents: Documents, cache: None = None, probes: Sequence[str] = ()
    ) -> tuple[jax.Array, None, Stats]:
        """`x [B, T, d]` to the same shape and dtype; padding gives zero.

        `stats["router"]` holds what `k3jax.layers.balancing` needs; `stats["dropped_routes"]`
        counts those that found no room on the way to their expert and count as zero. No cache.
        """
        moe, real = self.config.moe, documents.real
        routing, _, stats = self.router(x, documents=documents)
        z = project(x, self.down) if moe.latent_width else x
        y, dropped = self._experts(z, routing, real)
        if moe.latent_width:
            if moe.latent_norm:
                y = rms_norm(y, weight(self.norm, y.dtype), self.config.norm_eps)
            y = project(y, self.up)
        if moe.shared_experts:
            y = y + self.shared(x, documents=documents)[0]
        stats = {"router": stats, "dropped_routes": Sum(dropped)}
        return jnp.where(real[..., None], y, 0), cache, stats

    def _experts(
        self, z: jax.Array, routing: Routing, real: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """The weighted sum of the chosen experts' outputs, `[B, T, l]`, and how many were dropped.

        Experts stay on the devices of the expert axis that own them: tokens go there and back.
        """
        moe, mesh = self.config.moe, under_mesh()
        axis = "expert" if mesh else None
        devices = jax.sharding.get_abstract_mesh().shape["expert"] if mesh else 1
        group = Group(axis, devices, moe.experts, moe.buffer_factor)
        transport = choose(moe, group, current_platform())
        act = activation(self.config.ffn)

        def shard(z, indices, weights, valid, *kernels):
            bank = Bank(*map(functools.partial(gathered, dtype=z.dtype), kernels, layouts))
            flat, indices, weights = (a.reshape(-1, a.shape[-1]) for a in (z, indices, weights))
            valid = valid.reshape(-1)
            y, dropped = run_experts(flat, indices, weights, valid, bank, act, transport, group)
            return y.reshape(1, *z.shape), dropped[None]

        kernels = [v[...] for v in (self.expert_gate, self.expert_up, self.expert_down)]
        layouts = [spec_of(kernel) for kernel in kernels]
        out_specs = None
        if mesh:
            spec = spec_of(z)
            real = jax.sharding.reshard(real, PartitionSpec(*spec[:2]))
            # Devices along the tensor axis have a part of each expert's width, so of each sum.
            out_specs = (PartitionSpec("tensor", *spec), PartitionSpec(mesh_axes(spec)))
        parts, dropped = local(
            shard, z, routing.indices, routing.weights, real, *kernels, out_specs=out_specs
        )
        return name_sum(parts.sum(0).astype(z.dtype)), dropped.sum()
