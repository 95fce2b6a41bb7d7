"""Tokens of all devices gathered, each device its own experts, results reduce-scattered.

Both collectives are rings on the wire: a device sends `(D - 1) N l` elements each way, however many
experts a token takes. For few devices that is less than sending every route (`k3jax.cost`). Partial
sums travel in at least float32, so that the result does not depend on D.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from k3jax.parallel.experts.names import name_rows
from k3jax.parallel.experts.routes import (
    Group,
    by_expert,
    chunk_sources,
    invert,
    sort_routes,
    starts_of,
    sum_rows,
    take_rows,
)


class Plan(NamedTuple):
    """`route`: of each row, counted over the tokens of all devices; `slot`: of each such route."""

    sizes: jax.Array
    dropped: jax.Array
    route: jax.Array
    slot: jax.Array


def make_plan(indices: jax.Array, valid: jax.Array, group: Group) -> Plan:
    rows = group.device_rows(*indices.shape)
    order, _, counts = sort_routes(indices, valid, group.experts)
    routes = order.shape[0]
    order, counts = (jax.lax.all_gather(a, group.axis) for a in (order, counts))
    sources = jnp.arange(group.devices, dtype=jnp.int32)[:, None] * routes  # [source, 1]

    def mine(a: jax.Array) -> jax.Array:
        return jax.lax.dynamic_slice_in_dim(a, group.me() * group.owned, group.owned, 1)

    found = mine(counts)
    start = by_expert(found)
    kept = jnp.clip(rows - start, 0, found)
    chunks = (start, sources + mine(starts_of(counts)), kept)
    where = chunk_sources(rows, order.size, *(c.T.reshape(-1) for c in chunks))
    route = (order + sources).reshape(-1).at[where].get(mode="fill", fill_value=order.size)
    sizes = kept.sum(0, dtype=jnp.int32)
    dropped = (found.sum() - sizes.sum()).astype(jnp.int32)
    return Plan(sizes, dropped, route, invert(route, order.size))


def spread(x: jax.Array, plan: Plan, group: Group, repeat: int) -> jax.Array:
    everyone = name_rows(jax.lax.all_gather(x, group.axis, tiled=True))
    return take_rows(everyone, plan.route // repeat)


def collect(rows: jax.Array, plan: Plan, group: Group, repeat: int) -> jax.Array:
    parts = sum_rows(rows, plan.slot, repeat)
    return jax.lax.psum_scatter(parts, group.axis, tiled=True)
