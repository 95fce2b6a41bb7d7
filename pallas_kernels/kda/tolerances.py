"""What every implementation is held to, per dtype of the inputs and output: relative RMS error
against the recurrence in float64. The bfloat16 figures are those of kernels in the field; a
plain-JAX form, which computes in float32 whatever it is given, is far inside them.
"""

from collections.abc import Mapping

import jax
import numpy as np

_GRADIENTS = ("dq", "dk", "dv", "dgate", "dbeta", "da_log", "ddt_bias", "dinitial_state")


def _table(forward: float, gradients: float, **others: float) -> dict[str, float]:
    table = {"o": forward, "final_state": forward}
    return table | dict.fromkeys(_GRADIENTS, gradients) | others


_HALF = _table(forward=5e-3, gradients=8e-3, dgate=2e-2, dbeta=2e-2, da_log=1e-2, ddt_bias=8e-3)

# dtype of q, k, v -> output -> bound; "d" + name is the gradient of that argument.
TOLERANCES: Mapping[str, Mapping[str, float]] = {
    "float64": _table(forward=1e-11, gradients=1e-10),
    "float32": _table(forward=1e-5, gradients=1e-4),
    "bfloat16": _HALF,
    "float16": _HALF,
}


def relative_rms(
    actual: jax.typing.ArrayLike, expected: jax.typing.ArrayLike, at_least: float = 0.0
) -> float:
    """RMS of the difference over RMS of `expected`, in float64. An `expected` smaller than
    `at_least`, or than any float32, counts as that; one NaN in `actual` makes the result NaN."""
    a, e = np.asarray(actual).astype(np.float64), np.asarray(expected).astype(np.float64)
    if a.shape != e.shape:
        raise ValueError(f"shapes differ: {a.shape} and {e.shape}")
    if a.size == 0:
        return 0.0
    scale = max(np.sqrt(np.mean(e**2)), at_least, float(np.finfo(np.float32).tiny))
    return float(np.sqrt(np.mean((a - e) ** 2)) / scale)
