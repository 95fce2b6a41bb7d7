"""Runs a test module as a program that sees eight CPU devices."""

import os
import subprocess
import sys
from pathlib import Path


def run_on_eight_devices(module: str, *arguments: str) -> None:
    """Fails unless `python -m module arguments` ends well and says that eight devices agree."""
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout == "8 devices agree\n"
