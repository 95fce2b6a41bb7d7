"""`python -m experiments.train` over eight devices: the losses of one device, and a sample."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import QUICK

SETTINGS = [
    "model.dtype=float32",
    "model.d_model=16",
    "model.layers=2",
    "model.kda_to_full=1:1",
    "model.vocab_size=258",
    "model.moe.experts=4",
    "data.sequence_length=64",
    "data.batch_size=4",
    "train.steps=6",
    "train.log_every=1",
    "train.eval_batches=2",
    "train.checkpoint_every=3",
    "train.sample_tokens=4",
]


def train(home: Path, name: str, *settings: str) -> list[float]:
    """The losses of a run of all steps in `home / name`."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} {QUICK} --xla_force_host_platform_device_count=8"
    command = [sys.executable, "-m", "experiments.train", "--config=nano"]
    command += [f"--workdir={home / name}", f"--cache_dir={home / 'cache'}"]
    command += [f"--set={s}" for s in (*SETTINGS, f"data.sources={home / 'text'}", *settings)]
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "▌" in (home / name / "sample.txt").read_text()
    records = map(json.loads, (home / name / "metrics.jsonl").read_text().splitlines())
    return [record["loss"] for record in records if "loss" in record]


@pytest.mark.full
def test_a_run_on_a_mesh_has_the_losses_of_one_device(tmp_path):
    words = random.Random(0)
    (tmp_path / "text").mkdir()
    for i in range(100):
        lines = (f"{words.choice('abcdef')}{words.randrange(30)} = {i};" for _ in range(20))
        (tmp_path / "text" / f"{i}.txt").write_text("\n".join(lines))
    one = train(tmp_path, "one")
    for mesh in ("mesh.data=2", "mesh.fsdp=2", "mesh.expert=2"):
        eight = train(tmp_path, mesh, mesh, "mesh.context=2", "mesh.tensor=2")
        assert len(one) == len(eight) == 6
        assert max(abs(a / b - 1) for a, b in zip(eight, one, strict=True)) <= 1e-4
