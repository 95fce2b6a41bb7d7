"""The Triton kernels as machine code for every target, on a host without a GPU: registers, spills
and shared memory within what is stated here, and no operand left undefined.
"""

import importlib.util
import json
import os
import subprocess
import sys

import pytest

from pallas_kernels.kda.triton.launch import target_of
from tests.pallas_kernels.kda_triton_offline import undefined

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="needs triton (pip install 'triton==3.6.*')"
)
# Bytes per thread that may live in memory: tf32x3 products take three times the operands.
SPILLED = {"bfloat16": 256, "float32": 1024}
KERNELS = ["prepare", "scan", "prepare", "reverse_scan", "value_gradients", "key_gradients"]


@pytest.mark.full
@pytest.mark.parametrize("capability", ["8.0", "9.0", "10.0", "gfx942", "gfx950"])
@pytest.mark.parametrize(
    "dtype, width", [("bfloat16", 64), ("bfloat16", 128), ("bfloat16", 256), ("float32", 128)]
)
def test_machine_code(capability, dtype, width):
    command = (sys.executable, "-m", "tests.pallas_kernels.kda_triton_offline")
    done = subprocess.run(
        (*command, capability, dtype, str(width)),
        env=os.environ | {"TRITON_INTERPRET": "0", "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [kernel["kernel"] for kernel in found] == KERNELS
    for kernel in found:
        assert kernel["registers"] <= (512 if capability.startswith("gfx") else 255), kernel
        assert kernel["spilled"] <= SPILLED[dtype], kernel
        assert kernel["shared"] <= target_of(capability).shared, kernel
        assert kernel["undefined"] == [], kernel


def test_an_undefined_uniform_register_is_seen():
    sass = """
        /*0010*/ UMOV UR5, 0x400 ;
        /*0020*/ UIADD3 UR15, UP0, UR15, 0x40, URZ ;
        /*0030*/ @P0 UIADD3.64 UR18, UR4, 0x40, URZ ;
        /*0040*/ HGMMA.64x32x16.F32 R24, R40, gdesc[UR16].tnspB, RZ, !UPT ;
        /*0050*/ STS.128 [R10+UR5], R24 ;
    """
    assert [line.split()[0] for line in undefined(sass)] == ["UIADD3", "UIADD3.64"]
