"""The transport that moves nothing between devices: each has its own tokens and the whole bank.

Exact for any load: the buffer has a row for every route.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from k3jax.parallel.experts.routes import Group, invert, sort_routes, sum_rows, take_rows


class Plan(NamedTuple):
    """`route [R]`: of each row; `slot [R]`: of each route."""

    sizes: jax.Array
    dropped: jax.Array
    route: jax.Array
    slot: jax.Array


def make_plan(indices: jax.Array, valid: jax.Array, group: Group) -> Plan:
    order, ends, sizes = sort_routes(indices, valid, group.experts)
    routes = order.shape[0]
    order = jnp.where(jnp.arange(routes) < ends[-1], order, routes)
    return Plan(sizes, jnp.int32(0), order, invert(order, routes))


def spread(x: jax.Array, plan: Plan, group: Group, repeat: int) -> jax.Array:
    return take_rows(x, plan.route // repeat)


def collect(rows: jax.Array, plan: Plan, group: Group, repeat: int) -> jax.Array:
    return sum_rows(rows, plan.slot, repeat)
