"""From logical axes to mesh axes: one table for parameters, one for activations.

Every program runs under `jax.set_mesh` of a mesh with the five Explicit axes below, on one device
too, so that an array's type says how it is laid out. A parameter names its axes logically
(`ParamSpec.axes`); `Rules` says which mesh axis each of them is split over.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec

from k3jax.config import MeshConfig

AXES = ("data", "fsdp", "expert", "context", "tensor")
BATCH = ("data", "fsdp", "expert")  # the mesh axes a batch of rows is split over
SEQUENCE = "context"


@dataclasses.dataclass(frozen=True)
class Rules:
    """Mesh axes of each logical axis; an axis that is not listed here is not split."""

    embed: str | None = "fsdp"
    latent: str | None = "fsdp"
    lora: str | None = None
    heads: str | None = "tensor"
    mlp: str | None = "tensor"
    vocab: str | None = "tensor"
    experts: str | None = "expert"
    layers: str | None = None

    def spec(self, axes: tuple[str | None, ...]) -> PartitionSpec:
        """The `PartitionSpec` of a parameter with logical `axes`.

        Raises `ValueError` when two of its axes would be split over the same mesh axis.
        """
        mesh_axes = tuple(None if axis is None else getattr(self, axis) for axis in axes)
        used = [axis for axis in mesh_axes if axis is not None]
        if len(used) != len(set(used)):
            raise ValueError(f"axes = {axes}: two of them map to one mesh axis, {mesh_axes}")
        return PartitionSpec(*mesh_axes)


def make_mesh(config: MeshConfig = MeshConfig(), devices: list[jax.Device] | None = None) -> Mesh:
    """The mesh of `config`, all axes Explicit, over the first devices that it needs."""
    shape = tuple(getattr(config, axis) for axis in AXES)
    devices = jax.devices() if devices is None else devices
    needed = math.prod(shape)
    if needed > len(devices):
        sizes = ", ".join(
            f"mesh.{axis} = {n}" for axis, n in zip(AXES, shape, strict=True) if n > 1
        )
        raise ValueError(f"{sizes}: needs {needed} devices, there are {len(devices)}")
    grid = np.asarray(devices[:needed]).reshape(shape)
    return Mesh(grid, AXES, axis_types=(AxisType.Explicit,) * len(AXES))


def abstract_mesh(config: MeshConfig) -> AbstractMesh:
    """The mesh of `config` without devices: for shapes, layouts and ahead-of-time compilation."""
    shape = tuple(getattr(config, axis) for axis in AXES)
    return AbstractMesh(shape, AXES, axis_types=(AxisType.Explicit,) * len(AXES))


def spec_of(x: jax.Array) -> PartitionSpec:
    """How the type of `x` says it is laid out over the current mesh, one entry per axis."""
    spec = jax.typeof(x).sharding.spec
    return PartitionSpec(*spec, *(None,) * (x.ndim - len(spec)))


def mesh_axes(spec: PartitionSpec) -> tuple[str, ...]:
    """The mesh axes that an array with `spec` is split over, in order."""
    entries = (entry if isinstance(entry, tuple) else (entry,) for entry in spec if entry)
    return tuple(axis for entry in entries for axis in entry)


def activation_spec(ndim: int) -> PartitionSpec:
    """`[B, T, ...]`: rows over the batch axes, tokens over context, the rest whole."""
    return PartitionSpec(BATCH, SEQUENCE, *(None,) * (ndim - 2))


def sequence_axis(x: jax.Array) -> str | None:
    """The mesh axis that the rows of `x [B, T, ...]` are split over; None where they are whole."""
    if not under_mesh() or spec_of(x)[1] != SEQUENCE:
        return None
    return SEQUENCE if jax.sharding.get_abstract_mesh().shape[SEQUENCE] > 1 else None


def under_mesh() -> bool:
    """Whether Explicit axes are in force: a mesh is set and this is not inside a `shard_map`."""
    mesh = jax.sharding.get_abstract_mesh()
    return not mesh.empty and any(kind == AxisType.Explicit for kind in mesh.axis_types)
