"""vmap of kernels whose arrays lead with rows: one call with more of them.

Pallas does not batch these kernels. What a call needs of every row leads with an axis of B (or
B HV, rows first), so mapped arrays are folded into it; only if the gate's parameters, which rows
share, are mapped too do the calls come one after another.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from ...vma import vary_together
from .chunks import Chunks


def by_rows(call: Callable) -> Callable:
    """Makes `call(c, options, shared, rows)` mappable: trees of arrays `shared`, without an axis of
    rows, and `rows`, and outputs, with one."""

    @functools.wraps(call)
    def mapped(c: Chunks, options: tuple, shared, rows):
        @jax.custom_batching.custom_vmap
        def one(shared, rows):
            return call(c, options, shared, rows)

        @one.def_vmap
        def many(size, in_batched, shared, rows):
            shared_mapped, rows_mapped = in_batched

            def spread(is_mapped, x):
                return x if is_mapped else jnp.broadcast_to(x, (size, *x.shape))

            rows = jax.tree.map(spread, rows_mapped, rows)
            if any(jax.tree.leaves(shared_mapped)):
                shared = jax.tree.map(spread, shared_mapped, shared)
                out = jax.lax.map(lambda x: mapped(c, options, *x), (shared, rows))
            else:
                wide = dataclasses.replace(c, batch=size * c.batch)
                rows = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), rows)
                out = mapped(wide, options, shared, rows)
                out = jax.tree.map(lambda x: x.reshape(size, -1, *x.shape[1:]), out)
            return out, jax.tree.map(lambda _: True, out)

        # Under shard_map kernels do not say over which axes their outputs vary.
        return vary_together((one(shared, rows), (shared, rows)))[0]

    return mapped
