"""The Triton kernels on a GPU, at the shared suite's cases and at the widths of a model.

python -m pytest tests/gpu/test_kda_triton_gpu.py -m "full or not full"
"""

import jax
import numpy as np
import pytest

from tests.pallas_kernels.kda_suite import Case, KdaSuite, draw, evaluate


@pytest.fixture(autouse=True)
def gpu():
    # Not asked at import: that would start a backend in every process that collects tests.
    if jax.default_backend() != "gpu":
        pytest.skip("needs a GPU")


_DOCUMENTS = ((0, 3), (1, 50), (2, 100), (4, 7), (5, 64), (0, 9), (5, 1), (6, 1), (8, 30))
WIDE = (
    Case(
        "wide", T=500, H=1, HV=2, K=128, V=128, dtypes=("bfloat16", "float32"),
        data=("normal", "saturated", "collinear", "mixed"),
    ),
    Case("wider", T=100, H=1, HV=2, K=256, V=256, dtypes=("bfloat16",)),
    Case(
        "wide softplus", T=300, HV=2, K=128, V=128, gate_form="softplus", dtypes=("bfloat16",),
        data=("normal", "mixed"),
    ),
    Case(
        "wide packed", T=300, B=2, H=1, K=128, V=64, lengths=_DOCUMENTS, documents=9,
        dtypes=("bfloat16",),
    ),
    Case(
        "wide negative eigenvalues", T=300, H=1, K=128, V=128, beta_form="value",
        dtypes=("bfloat16",), data=("normal", "collinear"),
    ),
    Case(
        "wide, no norm", T=300, H=1, K=128, V=128, dtypes=("bfloat16",),
        options=(("qk_l2norm", False),),
    ),
)  # fmt: skip
_ROWS = [(c, t, d) for c in WIDE for t in c.dtypes for d in c.data]


class TestTritonOnGPU(KdaSuite):
    implementation = "triton"

    @pytest.mark.parametrize("case, dtype, data", _ROWS, ids=lambda x: getattr(x, "name", x))
    def test_wide(self, case: Case, dtype: str, data: str) -> None:
        self.held_to_oracle(case, dtype, data)


def test_a_run_repeats_bit_for_bit():
    case = Case("repeat", T=2048, H=8, HV=8, K=128, V=128)
    x = draw(case)
    runs = [evaluate(x, "triton", "bfloat16", **case.arguments()) for _ in range(20)]
    for run in runs[1:]:
        jax.tree.map(np.testing.assert_array_equal, run, runs[0])
