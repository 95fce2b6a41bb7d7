"""Run a function of arrays on each device's own shard.

Pallas kernels and algorithms that sort, gather or scan a whole row know nothing of meshes. `local`
wraps such a function in a `shard_map` whose input specs are those that the argument types show; off
a mesh, or inside another `shard_map`, it calls the function as it stands. A parameter that is split
over fsdp may come in as it is, for `gathered` to complete.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

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


def gathered(w: jax.Array, spec: PartitionSpec, dtype: jnp.dtype) -> jax.Array:
    """A parameter as a `local` function computes with it: cast to `dtype`, whole along fsdp.

    `w` is this device's part of a parameter laid out as `spec`. Its gradient is summed over devices
    in the parameter's own dtype, not rounded at every step, and scattered over fsdp, so that none
    holds all of it. Off a mesh this is the cast alone.
    """
    mesh = jax.sharding.get_abstract_mesh()
    split = "fsdp" in spec and mesh.shape["fsdp"] > 1
    return _gather(spec.index("fsdp"), dtype, w) if split else w.astype(dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _gather(dim: int, dtype: jnp.dtype, w: jax.Array) -> jax.Array:
    return jax.lax.all_gather(w.astype(dtype), "fsdp", axis=dim, tiled=True)


def _gather_forward(dim: int, dtype: jnp.dtype, w: jax.Array) -> tuple[jax.Array, jax.Array]:
    return _gather(dim, dtype, w), jnp.zeros(0, w.dtype)


def _gather_backward(dim: int, dtype: jnp.dtype, like: jax.Array, d: jax.Array) -> tuple[jax.Array]:
    wide = d.astype(like.dtype)
    return (jax.lax.psum_scatter(wide, "fsdp", scatter_dimension=dim, tiled=True),)


_gather.defvjp(_gather_forward, _gather_backward)
