"""The table program of whole runs: on fake devices, and what it refuses."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

from experiments.bench_train import compare
from tests.tiny import SETTINGS, write_corpus


def bench(home, *arguments):
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"
    settings = [*SETTINGS, "train.micro_batches=1", "train.steps=6", "train.sample_tokens=0"]
    settings.append(f"data.sources={home / 'text'}")
    command = [sys.executable, "-m", "experiments.bench_train", "--config=nano"]
    command += [f"--workdir={home / 'runs'}", f"--cache_dir={home / 'cache'}"]
    command += [f"--set={setting}" for setting in settings]
    return subprocess.run(
        [*command, *arguments],
        env={**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )


def test_curves_are_compared_where_both_have_a_loss():
    def row(losses):
        return {"losses": losses, "devices": 1, "tokens_per_second": 1.0}

    found = {
        "single": row({1: 4.0, 10: 2.0, 20: 1.0}),
        "other log_every": row({1: 4.0, 5: 3.0, 10: 2.1}),
        "diverged": row({1: 4.0, 10: None}),  # as null is read
        "apart": row({7: 3.0}),
    }
    assert len(compare(found).splitlines()) == 5
    apart = [row["apart"] for row in found.values()]
    np.testing.assert_allclose(apart, [0, 0.05, np.nan, np.nan])


@pytest.mark.full
def test_meshes_have_the_curve_of_one_device(tmp_path):
    home, path = write_corpus(tmp_path), tmp_path / "out.json"
    meshes = ["--meshes=data=2,expert=2", "--meshes=fsdp=2"]
    done = bench(home, *meshes, f"--json={path}")
    assert done.returncode == 0, done.stderr
    found = json.loads(path.read_text())
    assert list(found) == ["single", "data=2,expert=2", "fsdp=2"]
    for name, row in found.items():
        assert row["apart"] < 1e-4 and row["efficiency"] > 0 and name in done.stdout, (name, row)
        assert row["devices"] == {"single": 1, "fsdp=2": 2}.get(name, 4)
    # Finished runs are read, not made again: seconds, and the same figures.
    again = bench(home, *meshes)
    assert again.returncode == 0 and again.stdout.endswith(done.stdout[-200:]), again.stdout


@pytest.mark.full
@pytest.mark.parametrize(
    ("mesh", "words"),
    [
        ("context=16", "mesh.context = 16: needs 16 devices"),
        ("row=2", "mesh.row: unknown, did you mean mesh."),
    ],
)
def test_bad_input_is_one_line(tmp_path, mesh, words):
    done = bench(write_corpus(tmp_path), f"--meshes={mesh}")
    assert done.returncode == 2 and done.stderr.startswith("error: "), done.stderr
    assert words in done.stderr and done.stderr.count("\n") == 1, done.stderr
    assert not (tmp_path / "runs").exists()
