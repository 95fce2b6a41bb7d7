"""All-to-all of just the rows there are, with `jax.lax.ragged_all_to_all`: TPUs and GPUs.

All devices know how many routes each has for every expert (one small gather), so each of them
computes where in a receiver's buffer its rows belong: one chunk per expert, so that they arrive
sorted by expert and then by source, and no row is moved again. Routes past a buffer's end are
dropped and counted; experts of high number lose first.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from k3jax.parallel.experts.names import name_rows
from k3jax.parallel.experts.routes import (
    Group,
    invert,
    placement,
    sort_routes,
    starts_of,
    sum_rows,
    take_rows,
)

ragged_all_to_all = jax.lax.ragged_all_to_all
PLATFORMS = ("tpu", "gpu")  # that XLA has it for


class Chunks(NamedTuple):
    """The last four arguments of `ragged_all_to_all` `[E]`, in order of the other device."""

    input_offsets: jax.Array
    send_sizes: jax.Array
    output_offsets: jax.Array
    recv_sizes: jax.Array


class Plan(NamedTuple):
    """`route [R]`: of each sorted row; `slot`: its inverse. `there` and `back` move sorted rows.

    `space [rows]` has the length of the receive buffer.
    """

    sizes: jax.Array
    dropped: jax.Array
    route: jax.Array
    slot: jax.Array
    there: Chunks
    back: Chunks
    space: jax.Array


def make_plan(indices: jax.Array, valid: jax.Array, group: Group) -> Plan:
    rows = group.device_rows(*indices.shape)
    order, ends, sizes = sort_routes(indices, valid, group.experts)
    routes = order.shape[0]
    order = jnp.where(jnp.arange(routes) < ends[-1], order, routes)

    counts = jax.lax.all_gather(sizes, group.axis)  # [source, all experts]
    mine = starts_of(counts)  # where a source has an expert's routes, sorted
    start, kept = placement(counts, rows, group)
    start = jnp.minimum(start, rows)  # of what does not fit, and is not sent

    def pick(a: jax.Array, axis: int) -> jax.Array:
        part = jax.lax.dynamic_index_in_dim(a.reshape(kept.shape), group.me(), axis, keepdims=False)
        return part.reshape(-1)

    to_me, from_me = (lambda a: pick(a, 1)), (lambda a: pick(a, 0))
    return Plan(
        sizes=to_me(kept).reshape(group.devices, group.owned).sum(0, dtype=jnp.int32),
        dropped=(sizes.sum() - from_me(kept).sum()).astype(jnp.int32),
        route=order,
        slot=invert(order, routes),
        there=Chunks(from_me(mine), from_me(kept), from_me(start), to_me(kept)),
        back=Chunks(to_me(start), to_me(kept), to_me(mine), from_me(kept)),
        space=jnp.zeros(rows, bool),
    )


def spread(x: jax.Array, plan: Plan, group: Group, repeat: int) -> jax.Array:
    rows = take_rows(x, plan.route // repeat)
    return name_rows(_exchange(rows, plan.space.shape[0], plan.there, group))


def collect(rows: jax.Array, plan: Plan, group: Group, repeat: int) -> jax.Array:
    returned = _exchange(rows, plan.route.shape[0], plan.back, group)
    return sum_rows(returned, plan.slot, repeat)


def _exchange(x: jax.Array, rows: int, chunks: Chunks, group: Group) -> jax.Array:
    """`x` in its new places among `rows`; those that nothing comes to are zero."""
    return ragged_all_to_all(
        x, jnp.zeros((rows, *x.shape[1:]), x.dtype), *chunks, axis_name=group.axis
    )
