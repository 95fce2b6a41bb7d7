"""Rows sorted by group x one matrix per group: what a bank of experts computes.

Implementations are registered here, fastest first, one file each; `pallas_kernels.dispatch` says
what each must offer.
"""

import jax
from jax.typing import ArrayLike

from .. import dispatch
from ..vma import vary_together
from .spec import Inputs, Spec, check

__all__ = ["Inputs", "Spec", "check", "grouped_matmul"]

for _name, _platforms in (
    ("mosaic_gpu", ("gpu",)),
    ("triton", ("gpu",)),
    ("megablox", ("tpu",)),
    ("blocked", ("cpu", "gpu", "tpu")),
):
    dispatch.register(
        "grouped_matmul", dispatch.Implementation(_name, f"{__name__}.{_name}", _platforms)
    )


def grouped_matmul(
    rows: ArrayLike,
    weights: ArrayLike,
    group_sizes: ArrayLike,
    *,
    implementation: str | None = None,
) -> jax.Array:
    """`out[i] = rows[i] @ weights[g]` for every row i of group g; differentiable in both.

    Group g owns the `group_sizes[g]` rows that follow those of groups 0 .. g-1. Empty groups are
    allowed and get a zero gradient. Rows past the last group are inert, whatever stands in them:
    their output and their gradient are zero. Products accumulate in float32 (float64 for float64).

    Args:
      rows: `[N, K]`, any N >= 0.
      weights: `[G, K, M]` of the same dtype.
      group_sizes: `[G]` int32, summing to at most N (checked where the values are concrete).
      implementation: a name of `dispatch.names("grouped_matmul")`, or None for the fastest.

    Returns:
      `[N, M]` in the dtype of `rows`.

    Raises:
      ValueError: one line that names the argument, its value and what is allowed.
    """
    spec, inputs = check(rows, weights, group_sizes)
    return dispatch.choose("grouped_matmul", spec, implementation).run(spec, vary_together(inputs))
