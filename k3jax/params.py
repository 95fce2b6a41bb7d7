"""Parameters, each declared once.

A layer declares a parameter by a `ParamSpec`; initialisation, sharding, the optimiser's rule,
weight decay, checkpoints, Hugging Face names and the parameter table of `--dry_run` derive from it.
The spec travels with the variable as its metadata, so every `nnx` state knows how it came to be.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from k3jax.config import OptimiserRule
from k3jax.sharding import Rules, spec_of, under_mesh

Init = Callable[[jax.Array, tuple[int, ...], jnp.dtype], jax.Array]  # (key, shape, dtype)


FLOAT32 = jnp.dtype(jnp.float32)


@dataclasses.dataclass(frozen=True)
class ParamSpec:
    """What there is to know about one parameter before it exists.

    `axes` has one logical axis of `k3jax.sharding.Rules`, or None, per dimension of `shape`. `rule`
    is the optimiser's when Muon is on; `decay` says whether weight decay applies. The columns (last
    axis) are those of `heads` equal blocks, each of which Muon per head takes for a matrix of its
    own. Where a head's columns make queries or keys of softmax attention, `qk_clip` has `(width,
    power)` of each stretch of them: QK clip scales it by gamma to that power. `hf_name` is the name
    in an official checkpoint, relative to its layer, with `{expert}` where each expert has its own
    tensor; None where there is none.
    """

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    init: Init
    rule: OptimiserRule = "adamw"
    decay: bool = False
    hf_name: str | None = None
    dtype: jnp.dtype = FLOAT32
    heads: int = 1
    qk_clip: tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        if len(self.axes) != len(self.shape):
            raise ValueError(f"axes = {self.axes}: one entry for each dimension of {self.shape}")
        if self.rule == "muon" and len(self.shape) < 2:
            raise ValueError(f"rule = 'muon': shape {self.shape} of {self.hf_name} is no matrix")
        if self.heads > 1 and self.shape[-1] % self.heads:
            raise ValueError(f"heads = {self.heads}: must divide the columns of {self.shape}")
        if self.qk_clip and sum(width for width, _ in self.qk_clip) * self.heads != self.shape[-1]:
            raise ValueError(f"qk_clip = {self.qk_clip}: must add up to a head of {self.shape}")

    def stacked(self, layers: int) -> ParamSpec:
        """The same parameter of `layers` equal layers, on a leading axis."""
        shape, axes = (layers, *self.shape), ("layers", *self.axes)
        return dataclasses.replace(self, shape=shape, axes=axes)


class BalancingState(nnx.Variable):
    """A router's state: learned by rule, never by gradient, and part of a checkpoint."""


def declare(
    spec: ParamSpec, rngs: nnx.Rngs | None, variable: type[nnx.Variable] = nnx.Param
) -> nnx.Variable:
    """The variable of `spec`: initialised, or only its shape and dtype where `rngs` is None."""
    if rngs is None:
        return variable(jax.ShapeDtypeStruct(spec.shape, spec.dtype), spec=spec)
    return variable(spec.init(rngs.params(), spec.shape, spec.dtype), spec=spec)


def stack[M: nnx.Module](module: M, layers: int) -> M:
    """`layers` modules equal to the abstract `module` as one, on a leading `layers` axis.

    Slices of the result's state along that axis are states of single modules: `jax.lax.scan` over
    it runs the stack.
    """
    graphdef, state = nnx.split(module)
    return nnx.merge(
        graphdef,
        jax.tree.map(
            lambda v: declare(spec_of_variable(v).stacked(layers), None, type(v)),
            state,
            is_leaf=lambda v: isinstance(v, nnx.Variable),
        ),
    )


def initialise(module: nnx.Module, rngs: nnx.Rngs) -> None:
    """Gives every variable of the abstract `module` its first value, in place.

    A variable's random key depends on its path alone, so that two models share the values of what
    they have in common: an ablation compares like with like.
    """
    key, (_, state) = rngs.params(), nnx.split(module)
    values = []
    for path, variable in nnx.to_flat_state(state):
        spec = spec_of_variable(variable)
        own = jax.random.fold_in(key, zlib.crc32("/".join(map(str, path)).encode()))
        values.append((path, variable.replace(spec.init(own, spec.shape, spec.dtype))))
    nnx.update(module, nnx.from_flat_state(values))


def spec_of_variable(variable: nnx.Variable) -> ParamSpec:
    """The `ParamSpec` that `variable` was declared with."""
    return variable.get_metadata("spec")


def specs(state: nnx.State) -> Iterator[tuple[str, ParamSpec]]:
    """`(path, spec)` of every variable of `state`, in order; a path reads `a/b/0/c`."""
    for path, variable in nnx.to_flat_state(state):
        yield "/".join(map(str, path)), spec_of_variable(variable)


def map_specs[R](fn: Callable[[ParamSpec], R], state: nnx.State) -> nnx.State:
    """`state` with `fn(spec)` in place of every value."""
    return jax.tree.map(
        lambda v: v.replace(fn(spec_of_variable(v))),
        state,
        is_leaf=lambda v: isinstance(v, nnx.Variable),
    )


def partition_specs(state: nnx.State, rules: Rules = Rules()) -> nnx.State:
    """`state` with the `PartitionSpec` of each variable in place of its value."""
    return map_specs(lambda spec: rules.spec(spec.axes), state)


def check_layout(state: nnx.State, rules: Rules = Rules()) -> None:
    """Raises `ValueError` for the first parameter that the current mesh does not divide."""
    devices = jax.sharding.get_abstract_mesh().shape
    for path, spec in specs(state):
        for size, logical, axis in zip(spec.shape, spec.axes, rules.spec(spec.axes), strict=True):
            if axis is not None and size % devices[axis]:
                raise ValueError(
                    f"mesh.{axis} = {devices[axis]}: does not divide axis {logical!r} of {path}, "
                    f"which has size {size}"
                )


def count(state: nnx.State) -> int:
    """Number of parameters in `state`, concrete or abstract."""
    return sum(leaf.size for leaf in jax.tree.leaves(state))


def weight(variable: nnx.Variable, dtype: jnp.dtype) -> jax.Array:
    """The value to compute with: cast to `dtype`, then gathered over the fsdp axis.

    The cast comes first, so that the gather moves the narrow type.
    """
    value = variable[...].astype(dtype)
    if not under_mesh():
        return value
    return jax.sharding.reshard(value, _without_fsdp(spec_of(value)))


def _without_fsdp(spec: PartitionSpec) -> PartitionSpec:
    return PartitionSpec(*(None if axis == "fsdp" else axis for axis in spec))
