"""The Hopper kernels of the grouped matmul on a host without a GPU: their bodies interpreted
against the loop over groups, their machine code, and what they refuse."""

import contextlib

import pytest

from pallas_kernels import dispatch
from pallas_kernels.grouped_matmul import Spec, mosaic_gpu
from tests.pallas_kernels import aot_gpu
from tests.pallas_kernels.grouped_matmul_interpreter import interpreted
from tests.pallas_kernels.grouped_matmul_programs import programs
from tests.pallas_kernels.grouped_matmul_suite import Draw, GroupedMatmulSuite, Sizes, both


class TestMosaicGpu(GroupedMatmulSuite):
    implementation = "mosaic_gpu"
    dtypes = ("bfloat16", "float16")
    # A whole tile of 256 columns and part of one; two rows of tiles; widths that are padded.
    widths = ((64, 128), (192, 320), (72, 100))
    # The bodies run eagerly, and what vmap makes of a call is `gradients.py`, the same for all.
    program = staticmethod(both)
    test_vmapped_with_traced_sizes = None

    @contextlib.contextmanager
    def context(self):
        with interpreted(), pytest.MonkeyPatch.context() as patch:
            patch.setattr(dispatch, "current_platform", lambda: "gpu")
            patch.setattr(mosaic_gpu, "_device_kind", lambda: "NVIDIA H200")
            yield

    def test_groups_that_share_eight_rows(self):
        """Copies for the gradient of the weights begin at multiples of 8 rows."""
        self.held(Draw(Sizes("small", (3, 2, 1, 1, 5, 66, 63, 1), 2), 64, 64, "bfloat16"))


def test_refusals_name_the_argument(monkeypatch):
    spec = Spec(1000, 4, 128, 192, "bfloat16")
    assert "platform is cpu" in mosaic_gpu.refuses(spec, "cpu")
    monkeypatch.setattr(mosaic_gpu, "_device_kind", lambda: "NVIDIA A100")
    assert "device is NVIDIA A100" in mosaic_gpu.refuses(spec, "gpu")
    monkeypatch.setattr(mosaic_gpu, "_device_kind", lambda: "NVIDIA H200")
    assert mosaic_gpu.refuses(spec, "gpu") is None
    assert "rows are float32" in mosaic_gpu.refuses(Spec(1000, 4, 128, 192, "float32"), "gpu")


@pytest.fixture(scope="module")
def compiled():
    module = "tests.pallas_kernels.grouped_matmul_programs"
    return aot_gpu.reports(module, tuple(programs()))


@pytest.mark.full
@pytest.mark.parametrize("name", programs())
def test_machine_code(compiled, name):
    kernels = compiled[name]
    assert len(kernels) == 3, kernels
    for report in kernels:
        assert not report["serialised"], report
        assert report["registers"] and not report["spilled"], report
