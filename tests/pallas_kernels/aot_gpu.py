"""Compiles programs to sm_90a machine code on a host without a GPU, and says what ptxas said.

XLA's CUDA compiler is in jax's plugin wheels and ptxas in NVIDIA's; neither asks for a device. They
are the optional group `aot-gpu` of pyproject.toml, kept in a folder of their own (build/aot_gpu, or
what AOT_GPU names): installed beside jax they would make every CPU run look for a GPU. As a
program, for a process that has that folder on its path:

    python -m tests.pallas_kernels.aot_gpu MODULE NAME ...

compiles `MODULE.programs()[NAME]`, a function and its arguments' shapes each, and prints one JSON
object: for every name the kernels' reports.
"""

import functools
import importlib
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import tomllib

import pytest

ROOT = pathlib.Path(__file__).parents[2]
FOLDER = pathlib.Path(os.environ.get("AOT_GPU", ROOT / "build" / "aot_gpu"))
DUMPS = ("MOSAIC_GPU_DUMP_PTXAS",)
# What XLA asks of a device: an H200, as it describes itself.
TARGET = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: 233472 threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 4800000000000 l2_cache_size: 62914560 clock_rate_ghz: 1.98
  device_memory_size: 150000000000 shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 minor: 0 }
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}
platform_name: "CUDA" dnn_version_info { major: 9 minor: 10 patch: 0 }
device_description_str: "NVIDIA H200"
"""


@functools.cache
def folder() -> pathlib.Path:
    """The folder of the wheels, filled at the first call; skips the test where that fails."""
    if not (FOLDER / "jax_plugins").is_dir():
        group = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        wheels = group["optional-dependencies"]["aot-gpu"]
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
        done = subprocess.run(
            [*command, "--target", FOLDER, *wheels], capture_output=True, text=True, timeout=600
        )
        if done.returncode:
            last = done.stderr.strip().splitlines()[-1:]
            pytest.skip(f"the aot-gpu wheels are not here and cannot be fetched: {last}")
    return FOLDER


def reports(module: str, names: tuple[str, ...]) -> dict[str, list[dict]]:
    """For every name of `module.programs()` its kernels: name, registers, spilled bytes and ptxas's
    warnings."""
    path = [str(folder()), str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
        "PATH": os.pathsep.join([*map(str, FOLDER.glob("nvidia/*/bin")), os.environ["PATH"]]),
    }
    done = subprocess.run(
        [sys.executable, "-m", "tests.pallas_kernels.aot_gpu", module, *names],
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def read(log: str) -> dict:
    """One kernel's ptxas log. C7510 to C7514 say why wgmma was serialised."""

    def largest(pattern):
        return max(map(int, re.findall(pattern, log)), default=0)

    return {
        "registers": largest(r"Used (\d+) registers"),
        "spilled": largest(r"(\d+) bytes spill stores"),
        "serialised": re.findall(r"C751[0-6][^\n]*", log),
    }


def compile_all(module: str, names: list[str]) -> dict[str, list[dict]]:
    dump = pathlib.Path(tempfile.mkdtemp())
    os.environ |= dict.fromkeys(DUMPS, "1") | {"MOSAIC_GPU_DUMP_TO": str(dump)}
    import jax
    from jax.experimental import topologies
    from jax.sharding import SingleDeviceSharding

    topology = topologies.get_topology_desc(
        platform="cuda", topology_name="1x1x1", topology="1x1x1", target_config=TARGET
    )
    sharding = SingleDeviceSharding(topology.devices[0])
    programs = importlib.import_module(module).programs()
    out = {}
    for name in names:
        function, arguments = programs[name]
        traced = jax.jit(function, in_shardings=sharding, out_shardings=sharding).trace(*arguments)
        traced.lower(lowering_platforms=("cuda",)).compile()
        logs = sorted(dump.glob("*.ptxas"))
        out[name] = [{"kernel": x.stem.rsplit("_", 1)[0]} | read(x.read_text()) for x in logs]
        for log in logs:
            log.unlink()
    return out


if __name__ == "__main__":
    print(json.dumps(compile_all(sys.argv[1], sys.argv[2:])))
