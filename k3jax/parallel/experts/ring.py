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
    chunk_sources,
    invert,
    placement,
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
    start, kept = placement(counts, rows, group)
    sources = routes * jnp.arange(group.devices, dtype=jnp.int32)[:, None]
    mine = (sources + starts_of(counts)).reshape(kept.shape)

    def to_me(a: jax.Array) -> jax.Array:  # [source, device, expert], in order of my rows
        return jax.lax.dynamic_index_in_dim(a, group.me(), 1, keepdims=False).T.reshape(-1)

    where = chunk_sources(rows, order.size, to_me(start), to_me(mine), to_me(kept))
    route = (order + sources).reshape(-1).at[where].get(mode="fill", fill_value=order.size)
    return Plan(
        sizes=to_me(kept).reshape(group.owned, group.devices).sum(1, dtype=jnp.int32),
        dropped=(counts[group.me()].sum() - kept[group.me()].sum()).astype(jnp.int32),
        route=route,
        slot=invert(route, order.size),
    )


def spread(x: jax.Array, plan: Plan, group: Group, repeat: int) -> jax.Array:
    everyone = name_rows(jax.lax.all_gather(x, group.axis, tiled=True))
    return take_rows(everyone, plan.route // repeat)


def collect(rows: jax.Array, plan: Plan, group: Group, repeat: int) -> jax.Array:
    parts = sum_rows(rows, plan.slot, repeat)
    return jax.lax.psum_scatter(parts, group.axis, tiled=True)
