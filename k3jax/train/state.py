"""What a training run carries from step to step, and how it comes to be."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import (
    AbstractMesh,
    Mesh,
    NamedSharding,
    PartitionSpec,
    SingleDeviceSharding,
)

from k3jax.config import OptimiserConfig
from k3jax.optim import make_optimiser
from k3jax.params import BalancingState, partition_specs
from k3jax.sharding import under_mesh

type Build = Callable[[nnx.Rngs | None], nnx.Module]  # the model; abstract without rngs


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """All that a step reads and replaces, and that a checkpoint holds.

    `step` counts the batches taken, `skipped` those of them whose update was dropped because it was
    not finite (int32 scalars). `rng` is a typed key that no step consumes.
    """

    params: nnx.State
    balancing: nnx.State
    opt_state: Any
    step: jax.Array
    skipped: jax.Array
    rng: jax.Array


@dataclasses.dataclass(frozen=True, eq=False)
class Blueprint:
    """A model and its optimiser before any array exists.

    Every state of a run is a tree of the structure of `params` and `balancing` here: variables
    carry their specs, and trees compare equal only where those are the same objects.
    """

    build: Build
    graphdef: nnx.GraphDef
    params: nnx.State
    balancing: nnx.State
    optimiser: optax.GradientTransformation

    def create(self, seed: int) -> TrainState:
        """The state at step 0, by one compiled function, laid out as the specs say."""
        return _create(self, jax.random.key(seed))

    def abstract(self) -> TrainState:
        """The shapes, dtypes and shardings of `create`'s result; an abstract mesh will do."""
        mesh: Mesh | AbstractMesh = jax.sharding.get_mesh()
        if mesh.empty:
            mesh = jax.sharding.get_abstract_mesh()

        def placed(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            if not under_mesh():
                return leaf.update(sharding=SingleDeviceSharding(jax.devices()[0]))
            spec = PartitionSpec() if leaf.sharding is None else leaf.sharding.spec
            return leaf.update(sharding=NamedSharding(mesh, spec))

        key = jax.eval_shape(lambda: jax.random.key(0))
        return jax.tree.map(placed, jax.eval_shape(self._create, key))

    def _create(self, key: jax.Array) -> TrainState:
        rng, init = jax.random.split(key)
        _, *fresh = nnx.split(self.build(nnx.Rngs(params=init)), nnx.Param, BalancingState)
        params, balancing = (
            _laid_out(old, new)
            for old, new in zip((self.params, self.balancing), fresh, strict=True)
        )
        zero = jnp.zeros((), jnp.int32)
        return TrainState(params, balancing, self.optimiser.init(params), zero, zero, rng)


# One program for all seeds of a blueprint, which is known by its identity.
_create = jax.jit(Blueprint._create, static_argnums=0)


def blueprint(build: Build, config: OptimiserConfig, steps: int) -> Blueprint:
    """The blueprint of a run of `steps` updates."""
    graphdef, *states = nnx.split(build(None), nnx.Param, BalancingState)
    params, balancing = states
    return Blueprint(build, graphdef, params, balancing, make_optimiser(config, steps, params))


def bytes_per_device(tree: Any) -> int:
    """Of the arrays of `tree`, or of shapes with shardings, on the device that holds most."""

    def size(leaf: Any) -> int:
        shape = leaf.shape if leaf.sharding is None else leaf.sharding.shard_shape(leaf.shape)
        return math.prod(shape) * leaf.dtype.itemsize

    return sum(map(size, jax.tree.leaves(tree)))


def _laid_out(like: nnx.State, state: nnx.State) -> nnx.State:
    """The values of `state` in the structure of `like`, split over the mesh as its specs say."""
    state = jax.tree.unflatten(jax.tree.structure(like), jax.tree.leaves(state))
    if not under_mesh():
        return state
    return jax.tree.map(jax.sharding.reshard, state, partition_specs(like))
