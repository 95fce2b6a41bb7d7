"""Routes as data: who shares a bank of experts, routes sorted by expert, rows moved by index.

With N tokens of k routes each, route r is choice `r % k` of token `r // k`. Indices that stand for
"nowhere" lie just past the end of what they index: a gather there gives zero, a scatter does
nothing.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Group:
    """The devices along mesh axis `axis`, each with an equal share of a bank of `experts`.

    `buffer_factor` sizes what a device receives into, over its share of a balanced load; 0 asks for
    the worst case, which holds any load. One device has no axis.
    """

    axis: str | None
    devices: int
    experts: int
    buffer_factor: float = 2.0

    def __post_init__(self) -> None:
        if self.experts % self.devices:
            raise ValueError(
                f"mesh.{self.axis} = {self.devices}: must divide moe.experts = {self.experts}"
            )

    @property
    def owned(self) -> int:
        """Experts of one device."""
        return self.experts // self.devices

    def pair_rows(self, tokens: int, top_k: int) -> int:
        """Rows of a buffer for what one device, with `tokens`, sends to one device."""
        worst = tokens * min(top_k, self.owned)  # a token's experts are distinct
        if not self.buffer_factor:
            return worst
        return min(math.ceil(self.buffer_factor * tokens * top_k / self.devices), worst)

    def device_rows(self, tokens: int, top_k: int) -> int:
        """Rows of a buffer for what all devices, each with `tokens`, send to one device."""
        worst = self.devices * tokens * min(top_k, self.owned)
        if not self.buffer_factor:
            return worst
        return min(math.ceil(self.buffer_factor * tokens * top_k), worst)

    def me(self) -> jax.Array:
        """This device's place along the axis."""
        assert self.axis is not None
        return jax.lax.axis_index(self.axis)


def sort_routes(
    indices: jax.Array, valid: jax.Array, experts: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Routes in the order of their experts, stably: `(order [R], ends [experts], sizes)`, int32.

    `indices [N, k]`, `valid [N]`. The routes of expert e are `order[ends[e] - sizes[e] : ends[e]]`;
    those of tokens that are not valid come last.
    """
    expert = jnp.where(valid[:, None], indices, experts).reshape(-1)
    routes = jnp.arange(expert.size, dtype=jnp.int32)
    expert, order = jax.lax.sort((expert, routes), num_keys=1, is_stable=True)
    ends = jnp.searchsorted(expert, jnp.arange(experts), side="right").astype(jnp.int32)
    return order, ends, jnp.diff(ends, prepend=0)


def chunk_sources(
    rows: int, missing: int, destination: jax.Array, source: jax.Array, sizes: jax.Array
) -> jax.Array:
    """For each of `rows` rows, the source row that chunks of consecutive rows bring to it.

    Chunk q moves the `sizes[q]` rows from `source[q]` on to where `destination[q]` begins. They do
    not overlap, and are given in order of destination. Rows that none covers get `missing`.
    """
    marks = jnp.zeros(rows, jnp.int32).at[destination].add(1, mode="drop")
    chunk = total(marks) - 1  # of chunks that begin at one row, the last: others are empty
    at = lambda values: values.at[chunk].get(mode="fill", fill_value=0)  # noqa: E731
    offset = jnp.arange(rows, dtype=jnp.int32) - at(destination)
    return jnp.where((chunk >= 0) & (offset < at(sizes)), at(source) + offset, missing)


def invert(source: jax.Array, size: int) -> jax.Array:
    """`[size]` int32: where `source [rows]` names each number below `size`, else `rows`."""
    rows = source.shape[0]
    nowhere = jnp.full(size, rows, jnp.int32)
    return nowhere.at[source].set(jnp.arange(rows, dtype=jnp.int32), mode="drop")


def starts_of(sizes: jax.Array) -> jax.Array:
    """Exclusive running sums along the last axis: where chunks laid end to end begin."""
    return total(sizes) - sizes


def total(counts: jax.Array) -> jax.Array:
    """Running sums along the last axis, in int32 whatever jax's default is."""
    return jnp.cumsum(counts, axis=-1, dtype=jnp.int32)


def by_expert(counts: jax.Array) -> jax.Array:
    """Where chunks begin in a buffer sorted by expert, then by source.

    `counts [..., source, expert]`, and so is the result.
    """
    turned = jnp.swapaxes(counts, -1, -2)
    starts = starts_of(turned.reshape(*turned.shape[:-2], -1))
    return jnp.swapaxes(starts.reshape(turned.shape), -1, -2)


def placement(counts: jax.Array, rows: int, group: Group) -> tuple[jax.Array, jax.Array]:
    """Where routes go in buffers of `rows`, one for each device, and how many of them fit.

    `counts [D, experts]` are those of every source. Buffers are sorted by expert, then by source;
    both results are `[source, device, owned]`.
    """
    counts = counts.reshape(group.devices, group.devices, group.owned)
    start = jnp.swapaxes(by_expert(jnp.swapaxes(counts, 0, 1)), 0, 1)
    return start, jnp.clip(rows - start, 0, counts)


def take_rows(x: jax.Array, index: jax.Array) -> jax.Array:
    """`x[index]`, and zero where that is past the end."""
    return x.at[index].get(mode="fill", fill_value=0)


def sum_rows(rows: jax.Array, slots: jax.Array, repeat: int) -> jax.Array:
    """Per token, the sum of the `rows` at its `repeat` slots, in at least float32.

    `slots [N * repeat]`; the result is `[N, ...]`.
    """
    parts = take_rows(rows, slots)
    parts = parts.reshape(-1, repeat, *parts.shape[1:])
    return parts.sum(axis=1, dtype=jnp.promote_types(rows.dtype, jnp.float32))
