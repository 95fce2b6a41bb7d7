"""What the recipes of faults (`test_kda_cases*.py`) share: inputs, and the ways to run them.

The numbers are those of the collection of reports that this project keeps. Shapes are cut to what
shows the fault on a CPU, and few, so that most tests share a compilation; those that need their
length or width are marked `full`. Not repeated is what the shared suite covers already (12, 47, 48,
77, 78: every T, odd widths, grouped heads, narrow V) and what arrays of jax cannot have (strides:
62, 75, 76).
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.kda import kda
from pallas_kernels.kda.tolerances import TOLERANCES, relative_rms
from tests.pallas_kernels.kda_suite import (
    FLOATS,
    QUICK,
    compare,
    evaluate,
    oracle,
    rng,
    rounded,
)

BOUNDED = {"gate_form": "bounded", "beta_form": "logit", "return_final_state": True}
SLOTS = BOUNDED | {"max_documents": 6}
PACKED = {"T": 190, "B": 2, "documents": 6}
READY = {"gate_form": "log_decay", "beta_form": "value", "return_final_state": True}


def inputs(name: object, T: int = 127, H: int = 1, D: int = 16, B: int = 1, documents: int = 1):
    """Normal inputs and cotangents; tests overwrite what their recipe says."""
    r = rng("cases", name)
    x = {n: r.normal(size=(B, T, H, D)) for n in ("q", "k", "v", "gate", "do")}
    x["beta"] = r.normal(size=(B, T, H))
    for n in ("initial_state", "dfinal_state"):
        x[n] = r.normal(size=(B, documents, H, D, D))
    return x


def ready(x, log_decay):
    """The same inputs with a ready log decay and write strengths in (0, 1)."""
    gate = np.broadcast_to(np.asarray(log_decay, np.float64), x["gate"].shape)
    return x | {"gate": np.array(gate), "beta": rng("beta").uniform(0.1, 1, x["beta"].shape)}


def packed(x, *lengths: int):
    ids = np.repeat(np.arange(1, len(lengths) + 1), lengths)
    ids = np.pad(ids, (0, x["q"].shape[1] - len(ids)))
    return x | {"segment_ids": np.broadcast_to(ids.astype(np.int32), x["q"].shape[:2])}


class Way(NamedTuple):
    """How a recipe is run: an implementation and the dtype of its tokens."""

    implementation: str
    dtype: str = "float32"

    def __call__(self, x, **options):
        return evaluate(x, self.implementation, self.dtype, **options)

    def oracle(self, x, **options):
        return oracle(x, self.dtype, **options)

    def held(self, x, slack_of_half=1.0, **options):
        actual = self(x, **options)
        slack = slack_of_half if self.dtype == "bfloat16" else 1.0
        compare(actual, self.oracle(x, **options), self.dtype, slack=slack)
        return actual

    def held_forward(self, x, **options):
        """For rows that are too long for the oracle's gradient."""
        actual = forward(x, self.implementation, self.dtype, **options)
        x = {n: y.astype(np.float64) for n, y in rounded(x, self.dtype).items()}
        expected = forward(x, "recurrent", "float64", **options)
        for a, e, name in zip(actual, expected, ("o", "final_state"), strict=True):
            assert relative_rms(a, e) < self.bound(name, 1e-5)

    def bound(self, name, figure):
        """A recipe's own figure for an output in float32; the table's in narrower dtypes."""
        return figure if self.dtype == "float32" else TOLERANCES[self.dtype][name]


WAYS = (
    Way("chunked"),
    Way("mosaic_tpu"),
    pytest.param(Way("mosaic_tpu", "bfloat16"), marks=pytest.mark.full),
)


def bits(a, b, rows=slice(None)):
    np.testing.assert_array_equal(np.asarray(a)[:, rows], np.asarray(b)[:, rows])


@functools.cache
def _forward(implementation, options):
    return jax.jit(
        lambda x: kda(**x, implementation=implementation, **dict(options)),
        compiler_options=QUICK,
    )


def forward(x, implementation, dtype, **options):
    """o and the final state alone, for rows that are too long for the oracle's gradient."""
    with jax.enable_x64(dtype == "float64"):
        floats = {n: jnp.asarray(y) for n, y in rounded(x, dtype).items() if n in FLOATS}
        call = _forward(implementation, tuple(sorted(options.items())))
        return jax.tree.map(np.asarray, call(floats))
