"""Tokens to experts and back: the transports of a mixture of experts.

A bank of experts is split over the devices of a mesh axis; a transport takes each token's routes to
the devices that own its experts, and the weighted sum of their outputs back. It is a module with

    make_plan(indices [N, k], valid [N], group) -> plan
    spread(x, plan, group, repeat) -> rows      what each row's token (or route) has in x
    collect(rows, plan, group, repeat) -> sums  per token (or route), the sum of its rows

`plan` has at least `sizes [owned]`, the rows of each expert of this device, and `dropped`, how many
of this device's own routes found no room. Rows are sorted by expert; those past the last, and what
was dropped, are zero. `repeat` is k where x has tokens, 1 where it has
routes. `spread` and `collect` are linear and each other's transposes, so each is the other's
gradient: no scatter, and the same collectives back as forth.

Combination weights travel with the rows and multiply the hidden layer of the experts; what comes
back is summed as it is. So the backward pass needs neither the experts' outputs nor another product
to have the gradient of the weights.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from k3jax.config import MoEConfig
from k3jax.cost import exchange_bytes
from k3jax.parallel.experts import local, padded, ragged, ring
from k3jax.parallel.experts.names import NAMES, name_plan, name_sum
from k3jax.parallel.experts.routes import Group
from pallas_kernels.grouped_matmul import grouped_matmul

__all__ = ["NAMES", "TRANSPORTS", "Bank", "Group", "choose", "name_sum", "run_experts"]

TRANSPORTS = {"local": local, "ring": ring, "padded": padded, "ragged": ragged}


class Bank(NamedTuple):
    """This device's experts, in the tokens' dtype: `gate, up [owned, l, m]`, `down [owned, m, l]`.

    A device may have a part of the hidden width m only: it then computes a part of the sum.
    """

    gate: jax.Array
    up: jax.Array
    down: jax.Array


def choose(moe: MoEConfig, group: Group, platform: str) -> ModuleType:
    """The module of `moe.transport`; "auto" is the one that sends the fewest bytes on `platform`.

    Without a mesh there is one device and nothing to move. Raises `ValueError` in one line where
    the transport cannot serve.
    """
    name = moe.transport
    if name == "auto":
        if group.devices == 1:
            return local
        able = ("ragged" if platform == "tpu" else "padded", "ring")
        return TRANSPORTS[
            min(able, key=functools.partial(exchange_bytes, moe, 1, 1, group.devices))
        ]
    if name == "local" and group.devices > 1:
        raise ValueError(
            f"moe.transport = 'local': mesh.expert = {group.devices} splits the experts, "
            "and only ring, padded and ragged move tokens"
        )
    if group.axis is None:
        return local
    if name == "ragged" and platform not in ragged.PLATFORMS:
        raise ValueError(
            f"moe.transport = 'ragged': XLA has no ragged all-to-all for {platform}, only for "
            f"{' and '.join(ragged.PLATFORMS)}; ring and padded serve anywhere"
        )
    return TRANSPORTS[name]


def run_experts(
    z: jax.Array,
    indices: jax.Array,
    weights: jax.Array,
    valid: jax.Array,
    bank: Bank,
    activation: Callable[[jax.Array, jax.Array], jax.Array],
    transport: ModuleType,
    group: Group,
) -> tuple[jax.Array, jax.Array]:
    """`sum_j weights[n, j] E(z[n])` over the k experts `indices[n]`; inside `shard_map`.

    Args:
      z: this device's tokens `[N, l]`; N may be zero, on all devices at once.
      indices: `[N, k]` int32, in 0 .. E-1 of all devices' experts and distinct within a token.
      weights: `[N, k]`, at least float32.
      valid: `[N]` bool. Other tokens go to no expert and get zero.
      bank: this device's experts.
      activation: of gate and up pre-activations `[rows, m]`, elementwise.
      transport: what `choose` found.
      group: the devices that share the bank.

    Returns:
      The sums `[N, l]`, in at least float32, and how many of this device's routes were dropped, a
      scalar int32.
    """
    tokens, k = indices.shape
    wide = jnp.promote_types(z.dtype, jnp.float32)
    if not tokens:
        return z.astype(wide), jnp.int32(0)
    plan = name_plan(transport.make_plan(indices, valid, group))
    move = _Move(transport, group, k, z.dtype)
    rows = _spread(move, z, plan)
    per_route = _Move(transport, group, 1, weights.dtype)
    scale = _spread(per_route, weights.reshape(-1), plan)

    @jax.checkpoint  # the backward pass saves the products as they came, not widened
    def weighted(gate: jax.Array, up: jax.Array, scale: jax.Array) -> jax.Array:
        hidden = activation(gate.astype(wide), up.astype(wide))
        return (hidden * scale[:, None]).astype(z.dtype)

    gate, up = (grouped_matmul(rows, w, plan.sizes) for w in (bank.gate, bank.up))
    hidden = weighted(gate, up, scale)
    return _collect(move, grouped_matmul(hidden, bank.down, plan.sizes), plan), plan.dropped


@dataclasses.dataclass(frozen=True)
class _Move:
    """What is static about moving rows of `dtype` to experts and back."""

    transport: ModuleType
    group: Group
    repeat: int
    dtype: jnp.dtype

    def spread(self, x: jax.Array, plan: Any) -> jax.Array:
        return self.transport.spread(x.astype(self.dtype), plan, self.group, self.repeat)

    def collect(self, rows: jax.Array, plan: Any) -> jax.Array:
        return self.transport.collect(rows, plan, self.group, self.repeat)


# The forward rules call the functions themselves: a policy sees no names within a custom VJP.
_spread = jax.custom_vjp(_Move.spread, nondiff_argnums=(0,))
_collect = jax.custom_vjp(_Move.collect, nondiff_argnums=(0,))
_spread.defvjp(
    lambda move, x, plan: (move.spread(x, plan), plan),
    lambda move, plan, rows: (move.collect(rows, plan).astype(move.dtype), None),
)
_collect.defvjp(
    lambda move, rows, plan: (move.collect(rows, plan), plan),
    lambda move, plan, y: (move.spread(y, plan), None),
)
