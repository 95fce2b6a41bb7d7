"""A call of `grouped_matmul` as data: its shapes and dtype, and every check with its message."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from ..checks import as_array, concrete, fail


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
    rows = _floating("rows", rows, 2, "[N, K]")
    weights = _floating("weights", weights, 3, "[G, K, M]")
    (n, inner), (groups, _, outer) = rows.shape, weights.shape
    if weights.shape[1] != inner or groups < 1:
        fail("weights", f"shape {list(weights.shape)} is not [G >= 1, K = {inner}, M]")
    if weights.dtype != rows.dtype:
        fail("weights", f"dtype {weights.dtype} is not that of rows, {rows.dtype}")
    sizes = as_array("group_sizes", group_sizes)
    if sizes.dtype != jnp.int32 or sizes.shape != (groups,):
        fail("group_sizes", f"{sizes.dtype}{list(sizes.shape)} is not int32[G] = [{groups}]")
    if concrete(sizes):
        values = np.asarray(sizes)
        if values.min() < 0 or values.sum() > n:
            fail("group_sizes", f"{values.tolist()} must be >= 0 and sum to at most N = {n}")
    return Spec(n, groups, inner, outer, rows.dtype.name), Inputs(rows, weights, sizes)


def _floating(argument: str, x: ArrayLike, rank: int, letters: str) -> jax.Array:
    array = as_array(argument, x)
    if array.ndim != rank or not jnp.issubdtype(array.dtype, jnp.floating):
        fail(argument, f"{array.dtype}{list(array.shape)} is not floating {letters}")
    return array
