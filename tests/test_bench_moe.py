"""The table program of experts: on eight fake devices, and what it refuses."""

import json
import os
import subprocess
import sys

import pytest

SMALL = ["--config=nano", "--tokens=32", "--repeats=2"]


def bench(*arguments):
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
    return subprocess.run(
        [sys.executable, "-m", "experiments.bench_moe", *SMALL, *arguments],
        env={**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.full
def test_eight_devices_equal_one(tmp_path):
    path = tmp_path / "out.json"
    done = bench("--mesh=data=2,expert=4", f"--json={path}", "--set=model.moe.buffer_factor=0")
    assert done.returncode == 0, done.stderr
    found = json.loads(path.read_text())
    assert set(found) == {"single", "ring", "padded"}
    for name in ("ring", "padded"):
        row = found[name]
        assert row["error"] < 1e-5 and row["dropped"] == 0 and row["step"] > 0, (name, row)
        assert row["sent"] > 0 and name in done.stdout


@pytest.mark.parametrize(
    "argument, words",
    [
        ("--mesh=expert=16", "needs 16 devices"),
        ("--transport=ragged", "--transport = ragged: must be of ring, padded"),
        ("--set=model.moe.experts=0", "nothing to measure"),
    ],
)
def test_bad_input_is_one_line(argument, words):
    done = bench(argument)
    assert done.returncode == 2 and done.stderr.startswith("error: "), done.stderr
    assert words in done.stderr and done.stderr.count("\n") == 1, done.stderr
