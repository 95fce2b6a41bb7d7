"""A call of `grouped_matmul` as data: its shapes and dtype, and every check with its message."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike


class Inputs(NamedTuple):
    """The arrays of a call, as in `grouped_matmul`'s docstring."""

    rows: jax.Array
    weights: jax.Array
    group_sizes: jax.Array


@dataclasses.dataclass(frozen=True)
class Spec:
    """What is static about a call: `rows [N, K]`, `weights [G, K, M]`, one dtype for both."""

    rows: int
    groups: int
    inner: int
    outer: int
    dtype: str


def check(rows: ArrayLike, weights: ArrayLike, group_sizes: ArrayLike) -> tuple[Spec, Inputs]:
    """Judges the arguments and describes the call; raises ValueError in one line.

    The values of `group_sizes` are judged only where they are concrete.
    """
    rows, weights = (
        _floating("rows", rows, 2, "[N, K]"),
        _floating("weights", weights, 3, "[G, K, M]"),
    )
    (n, inner), (groups, _, outer) = rows.shape, weights.shape
    if weights.shape[1] != inner or groups < 1:
        _fail("weights", f"shape {list(weights.shape)} is not [G >= 1, K = {inner}, M]")
    if weights.dtype != rows.dtype:
        _fail("weights", f"dtype {weights.dtype} is not that of rows, {rows.dtype}")
    sizes = jnp.asarray(group_sizes)
    if sizes.dtype != jnp.int32 or sizes.shape != (groups,):
        _fail("group_sizes", f"{sizes.dtype}{list(sizes.shape)} is not int32[G] = [{groups}]")
    if not isinstance(sizes, jax.core.Tracer) and sizes.is_fully_addressable:
        values = np.asarray(sizes)
        if values.min() < 0 or values.sum() > n:
            _fail("group_sizes", f"{values.tolist()} must be >= 0 and sum to at most N = {n}")
    return Spec(n, groups, inner, outer, rows.dtype.name), Inputs(rows, weights, sizes)


def _floating(argument: str, x: ArrayLike, rank: int, letters: str) -> jax.Array:
    array = jnp.asarray(x)
    if array.ndim != rank or not jnp.issubdtype(array.dtype, jnp.floating):
        _fail(argument, f"{array.dtype}{list(array.shape)} is not floating {letters}")
    return array


def _fail(argument: str, problem: str) -> None:
    raise ValueError(f"{argument}: {problem}")
