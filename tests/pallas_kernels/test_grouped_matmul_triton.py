"""The Triton kernels of the grouped matmul: in Triton's interpreter against the loop over groups,
and as machine code for every target, on a host without a GPU. Skipped where Triton is missing.
"""

import importlib.util
import json
import os
import subprocess
import sys

import pytest

from pallas_kernels.kda.triton.launch import target_of
from tests.pallas_kernels.grouped_matmul_suite import GroupedMatmulSuite

# Not imported to find out: Triton reads the variable below when it is first imported.
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="needs triton (pip install 'triton==3.6.*')"
)


@pytest.fixture(autouse=True, scope="module")
def interpreted():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        yield


class TestTriton(GroupedMatmulSuite):
    implementation = "triton"
    dtypes = ("bfloat16", "float32", "float16")
    widths = ((40, 33), (128, 64))


@pytest.mark.full
@pytest.mark.parametrize("capability", ["8.0", "9.0", "10.0", "gfx942", "gfx950"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_machine_code(capability, dtype):
    command = (sys.executable, "-m", "tests.pallas_kernels.grouped_matmul_triton_offline")
    done = subprocess.run(
        (*command, capability, dtype),
        env=os.environ | {"TRITON_INTERPRET": "0", "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [kernel["kernel"] for kernel in found] == 2 * ["by_rows", "by_rows", "by_group"]
    for kernel in found:
        assert kernel["registers"] <= (512 if capability.startswith("gfx") else 255), kernel
        assert kernel["spilled"] == 0, kernel
        assert kernel["shared"] <= target_of(capability).shared, kernel
        assert kernel["undefined"] == [], kernel
