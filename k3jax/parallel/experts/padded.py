"""All-to-all with a buffer of one static size for every pair of devices. Runs anywhere.

A device sends D buffers of C rows, sorted by expert and padded; what arrives is regrouped by expert
with one gather of rows. Routes past C of a pair are dropped and counted.
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
    sort_routes,
    starts_of,
    sum_rows,
    take_rows,
    total,
)


class Plan(NamedTuple):
    """Of buffers of D x C rows: `route` of each row that is sent, `slot` of each route there.

    `arrived`: of each row sorted by expert, where it came in; `grouped` is its inverse.
    """

    sizes: jax.Array
    dropped: jax.Array
    route: jax.Array
    slot: jax.Array
    arrived: jax.Array
    grouped: jax.Array


def make_plan(indices: jax.Array, valid: jax.Array, group: Group) -> Plan:
    capacity, devices = group.pair_rows(*indices.shape), group.devices
    order, _, sizes = sort_routes(indices, valid, group.experts)
    routes, rows = order.shape[0], devices * capacity
    buffers = capacity * jnp.arange(devices, dtype=jnp.int32)

    counts = sizes.reshape(devices, group.owned)  # [destination, expert]
    ends = jnp.minimum(total(counts), capacity)
    starts, kept = starts_of(counts.sum(1, dtype=jnp.int32)), ends[:, -1]
    sent = chunk_sources(rows, routes, buffers, starts, kept)
    slot = chunk_sources(routes, rows, starts, buffers, kept)

    counts = _exchange(jnp.diff(ends, axis=1, prepend=0), group)  # [source, expert]
    within, start = buffers[:, None] + starts_of(counts), by_expert(counts)
    by_source = tuple(a.reshape(-1) for a in (within, start, counts))
    to, back, size = (a.T.reshape(-1) for a in (start, within, counts))
    return Plan(
        sizes=counts.sum(0, dtype=jnp.int32),
        dropped=(sizes.sum() - kept.sum()).astype(jnp.int32),
        route=order.at[sent].get(mode="fill", fill_value=routes),
        slot=jnp.zeros(routes, jnp.int32).at[order].set(slot),
        arrived=chunk_sources(rows, rows, to, back, size),
        grouped=chunk_sources(rows, rows, *by_source),
    )


def spread(x: jax.Array, plan: Plan, group: Group, repeat: int) -> jax.Array:
    received = name_rows(_exchange(take_rows(x, plan.route // repeat), group))
    return take_rows(received, plan.arrived)


def collect(rows: jax.Array, plan: Plan, group: Group, repeat: int) -> jax.Array:
    return sum_rows(_exchange(take_rows(rows, plan.grouped), group), plan.slot, repeat)


def _exchange(x: jax.Array, group: Group) -> jax.Array:
    """Part d of D along the first axis goes to device d."""
    return jax.lax.all_to_all(x, group.axis, 0, 0, tiled=True)
