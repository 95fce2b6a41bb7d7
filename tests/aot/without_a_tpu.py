"""Test modules as programs that compile for TPUs which are not there.

Each compiles in a process of its own: libtpu is loaded once in one, and keeps what it allocates.
"""

import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from jax.experimental import topologies

from pallas_kernels.tpu_schedule import worker

needs_libtpu = pytest.mark.skipif(worker.missing() is not None, reason=f"{worker.missing()}")


def run(module: str, argument: str) -> subprocess.CompletedProcess:
    """`python -m module argument`, with libtpu and no TPU."""
    return subprocess.run(
        [sys.executable, "-m", module, argument],
        cwd=Path(__file__).parents[2],
        env={
            **os.environ,
            "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
            "JAX_PLATFORMS": "cpu",
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            "TPU_SKIP_MDS_QUERY": "1",
            "TPU_WORKER_HOSTNAMES": "localhost",
        },
        capture_output=True,
        text=True,
        check=False,
    )


def compile_cases(
    cases: Iterable[str], compile_case: Callable[[str, list[Any]], Any], topology: str
) -> None:
    """The program: compiles every case, and prints a line of JSON for each, with its error if any.

    `compile_case` takes the case and the devices of `topology`.
    """
    devices = list(topologies.get_topology_desc(platform="tpu", topology_name=topology).devices)
    for case in cases:
        try:
            compile_case(case, devices)
            said = ""
        except Exception as error:
            said = f"{type(error).__name__}: {error}"[:2000]
        print(json.dumps([case, said]), flush=True)


@functools.cache
def said(module: str, topology: str) -> Callable[[str], str]:
    """What the program `module` said of a case for `topology`; empty where it compiles."""
    done = run(module, topology)
    lost = f"the process ended with {done.returncode}: {done.stderr[-2000:]}"
    lines = dict(json.loads(line) for line in done.stdout.splitlines())
    return lambda case: lines.get(case, lost)
