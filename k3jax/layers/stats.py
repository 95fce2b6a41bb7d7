"""What layers report about themselves: sums, maxima and whole rows, combined by one function.

A layer returns `stats`, a dict whose leaves are `Sum`, `Max` or `Gather`. Stacked along a leading
axis by a scan over layers they stay what they are; stacked by a scan over micro-batches,
`reduce_stats` combines them. Under Explicit axes a sum over tokens is one over all devices already.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from k3jax.sharding import under_mesh

type Stats = dict[str, Any]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sum:
    """A total over tokens: adds up over micro-batches."""

    value: jax.Array

    def over(self, axis: int) -> Sum:
        return Sum(self.value.sum(axis))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Max:
    """A largest value over tokens: the largest one over micro-batches."""

    value: jax.Array

    def over(self, axis: int) -> Max:
        return Max(self.value.max(axis))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Gather:
    """One row per token, `[..., N, width]`, on every device: joined over micro-batches."""

    value: jax.Array

    def over(self, axis: int) -> Gather:
        value = jnp.moveaxis(self.value, axis, -3)
        if under_mesh():
            value = jax.sharding.reshard(value, PartitionSpec())
        *lead, parts, rows, width = value.shape
        return Gather(value.reshape(*lead, parts * rows, width))


def reduce_stats(stats: Stats, axis: int = 0) -> Stats:
    """`stats` with the stacking axis `axis` of every leaf combined."""
    return jax.tree.map(
        lambda leaf: leaf.over(axis),
        stats,
        is_leaf=lambda leaf: isinstance(leaf, Sum | Max | Gather),
    )
