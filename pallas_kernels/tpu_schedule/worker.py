"""Compiles one case for a topology in a process of its own, with libtpu's dump of its schedules on.

libtpu reads its flags once, when it is loaded, and ends the process on some errors.
"""

import importlib
import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from .operands import kernel_calls

_START = "import sys; from pallas_kernels.tpu_schedule import worker; worker.main(sys.argv[1])"
HLO, FACTS, CALLS = "compiled.hlo", "facts.json", "calls.json"
LIBTPU = "0.0.52"  # whose dumps are read, and whose latencies are in `chips`
_FLAGS = (
    "--xla_jf_dump_to={directory}",
    "--xla_jf_dump_llo_text=true",
    "--xla_jf_dump_llo_pass_label_regex=final|dedup",
)


def missing() -> str | None:
    """Why nothing can be compiled here, in one line, or None."""
    try:
        found = metadata.version("libtpu")
    except metadata.PackageNotFoundError:
        found = "none"
    if found.startswith(LIBTPU):
        return None
    return f"libtpu {LIBTPU} is needed, found {found}: pip install 'k3jax[tpu-aot]'"


def compile_case(case: str, settings: dict[str, Any], topology: str, directory: Path) -> None:
    """Fills `directory` with what libtpu dumps, and HLO, FACTS and CALLS beside it.

    Raises:
      ModuleNotFoundError: with `missing`.
      RuntimeError: the case does not trace or compile; the message ends with the compiler's.
    """
    if (reason := missing()) is not None:
        raise ModuleNotFoundError(reason)
    flags = " ".join(_FLAGS).format(directory=directory)
    environment = {
        **os.environ,
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # no chip is opened, so processes need not take turns
        "JAX_PLATFORMS": "cpu",
        "LIBTPU_INIT_ARGS": f"{flags} {os.environ.get('LIBTPU_INIT_ARGS', '')}",
        "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_WORKER_HOSTNAMES": "localhost",
    }
    task = json.dumps([case, settings, topology, str(directory)])
    command = [sys.executable, "-c", _START, task]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        said = done.stderr.strip()[-4000:]
        raise RuntimeError(f"{case} {settings} does not compile for {topology}:\n{said}")


def main(task: str) -> None:
    """What the process runs: a list of `compile_case`'s arguments in JSON."""
    case, settings, topology, place = json.loads(task)
    directory = Path(place)
    module, _, name = case.partition(":")
    chips = topologies.get_topology_desc(platform="tpu", topology_name=topology)
    devices: list[Any] = chips.devices[:1]
    mesh = Mesh(np.array(devices), ("core",))
    sharding = NamedSharding(mesh, PartitionSpec())
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        fn, args = getattr(importlib.import_module(module), name)(**settings)
        shapes = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), args
        )
        compiled = jax.jit(fn).lower(*shapes).compile()
        traced = jax.make_jaxpr(fn)(*args)
    (directory / HLO).write_text(compiled.as_text() or "")
    memory = compiled.memory_analysis()
    facts = {
        "device": devices[0].device_kind,
        "temporary_bytes": getattr(memory, "temp_size_in_bytes", 0),
    }
    (directory / FACTS).write_text(json.dumps(facts))
    calls = [
        [call.shapes, [None if x is None else x.tolist() for x in call.values]]
        for call in kernel_calls(traced, args)
    ]
    (directory / CALLS).write_text(json.dumps(calls))
