"""Run a function of arrays on each device's own shard.

Pallas kernels and algorithms that sort, gather or scan a whole row know nothing of meshes. `local`
wraps such a function in a `shard_map` whose input specs are those that the argument types show; off
a mesh, or inside another `shard_map`, it calls the function as it stands.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from k3jax.sharding import spec_of, under_mesh


def local(fn: Callable[..., Any], *args: Any, out_specs: Any) -> Any:
    """`fn(*args)`, shard by shard.

    `args` are pytrees of arrays (None counts as empty); `out_specs` is a pytree of `PartitionSpec`
    that mirrors the result, and is not looked at off a mesh. The function must need nothing from
    other shards along any axis that its arguments are split over.
    """
    if not under_mesh():
        return fn(*args)
    in_specs = jax.tree.map(spec_of, args)
    mapped = jax.shard_map(fn, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    return jax.jit(mapped)(*args)  # outside jit, a shard_map would compile primitive by primitive
