"""`experiments.ablate` and `experiments.evaluate` whole, on models that compile quickly."""

import csv
import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
from absl import flags
from absl.testing import flagsaver

from configs import CONFIGS
from experiments import ablate as ablation
from experiments import evaluate
from experiments.program import main
from experiments.studies import NAMES
from k3jax.flags import define
from k3jax.train.metrics import read_metrics
from tests.tiny import SETTINGS, write_corpus

SHORT = [*SETTINGS, "train.steps=6", "train.sample_tokens=0", "train.checkpoint_every=2"]
# What a study needs of the model that it varies, and which of them need experts in it.
NEEDS = {
    "kda_mla_ratio": ["model.layers=16"],
    "residual": ["model.layers=4", "model.kda_to_full=3:1"],
    "full_attention": ["model.layers=2", "model.kda_to_full=1:1", "model.gqa.head_dim=8"],
    "latent_width": ["model.d_model=128"],
    "lineage": ["model.kda.heads=1", "model.kda.key_dim=16", "model.kda.value_dim=16"],
    "output_gate": ["model.d_model=64"],
}
EXPERTS = ("latent_width", "activation", "balancing", "optimiser")
# What makes a model compile in half the time, where only the programs around it matter.
PLAIN = [f"--set={s}" for s in ("model.moe.experts=0", "optimiser.kind=adamw")]
FILES = ("report.md", "results.csv", "loss.png", "axis.png")


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with a small corpus; caches go there too."""
    return write_corpus(tmp_path_factory.mktemp("home"))


def options(home, workdir, settings, *more):
    return [
        f"--workdir={workdir}", f"--cache_dir={home / 'cache'}",
        *(f"--set={setting}" for setting in settings), *more,
    ]  # fmt: skip


def ablate(home, workdir, study, *more):
    sources = [f"data.sources={home / 'text'},task:recall", "data.weights=3,1"]
    settings = [*SHORT, *([] if study == "lineage" else sources), *NEEDS.get(study, [])]
    settings += [] if study in EXPERTS else ["model.moe.experts=0"]
    return options(home, workdir, settings, f"--study={study}", "--config=nano", *more)


def here(run, arguments, capsys):
    """The program within this process: its exit code, and what it says."""
    if "config" not in flags.FLAGS:
        define(CONFIGS)
    with flagsaver.flagsaver():
        flags.FLAGS.unparse_flags()
        code = main(run, flags.FLAGS(["program", *arguments]))
    return code, *capsys.readouterr()


def start(arguments):
    command = [sys.executable, "-m", "experiments.ablate", *arguments]
    quick = os.environ | {"JAX_DISABLE_MOST_OPTIMIZATIONS": "true"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, env=quick, **pipes)


def finish(process):
    output, _ = process.communicate(timeout=900)
    return process.returncode, output


def same_but_times(one, other):
    """Whether two finished studies left the same report, table and plots."""
    for name in FILES:
        assert (one / name).read_bytes() == (other / name).read_bytes(), name


@pytest.fixture(scope="module")
def whole(home):
    """Where the studies of this file are made."""
    return home / "whole"


def test_two_studies_from_the_command_to_the_report(home, whole, tmp_path, capsys, monkeypatch):
    arguments = ablate(home, whole, "decay_gate", *PLAIN)
    code, output, _ = here(ablation.run, arguments, capsys)
    assert code == 0 and "# decay_gate" in output
    # Two seeds of a point are one program, and a text and a task are judged apart.
    assert "softplus-seed1, step 6: validation" in output
    assert "By validation_text_bits_per_byte over 2 seeds, better than bounded" in output
    assert "By validation_recall_accuracy over 2 seeds" in output
    rows = list(csv.DictReader((whole / "results.csv").open()))
    found = [(row["label"], row["seed"]) for row in rows]
    assert found == [(label, seed) for seed in "01" for label in ("softplus", "bounded")]
    assert all(0 < float(row["validation_text_bits_per_byte"]) < 9 for row in rows)

    # Elsewhere, from what is small of each run, without the data.
    for run in (whole / "runs").iterdir():
        (tmp_path / "runs" / run.name).mkdir(parents=True)
        for name in ("result.json", "metrics.jsonl"):
            shutil.copy(run / name, tmp_path / "runs" / run.name)
    with monkeypatch.context() as patch:
        patch.setattr(ablation, "make", None)
        elsewhere = [f"--workdir={tmp_path}", f"--cache_dir={tmp_path / 'none'}"]
        assert here(ablation.run, [*arguments, *elsewhere], capsys)[0] == 0
    same_but_times(whole, tmp_path)
    assert not (tmp_path / "none").exists()

    other = ablate(home, home / "other", "activation", "--seeds=1", *PLAIN)
    code, output, _ = here(ablation.run, other, capsys)
    assert code == 0 and "not told apart from it: swiglu" in output
    errors = refused(ablation.run, ablate(home, whole, "activation"), capsys)
    assert "holds the study 'decay_gate', not 'activation'" in errors


def test_a_run_of_a_study_can_be_asked(home, whole, capsys):
    folder = whole / "runs" / "bounded-seed0"
    asked = options(home, folder, [], "--suite=perplexity,recall", "--lengths=1,2", "--rows=6")
    code, output, _ = here(evaluate.run, asked, capsys)
    assert code == 0
    folder = folder / "evaluation"
    found = json.loads((folder / "perplexity.json").read_text())
    result = json.loads((folder.parent / "result.json").read_text())
    assert found["step"] == 6
    assert found["bits_per_byte"] == pytest.approx(result["validation_bits_per_byte"], rel=1e-5)
    found = json.loads((folder / "recall.json").read_text())
    assert [entry["length"] for entry in found["lengths"]] == [32, 64]
    assert (folder / "recall.png").exists() and "accuracy" in output


@pytest.mark.full
def test_a_study_killed_and_started_again_gives_the_same_report(home, tmp_path):
    """Killed at the sight of a checkpoint or of a result, and once asked to stop."""
    unbroken, broken = tmp_path / "unbroken", tmp_path / "broken"
    code, output = finish(start(ablate(home, unbroken, "decay_gate", *PLAIN)))
    assert code == 0, output
    runs = broken / "runs"
    sights = [
        (lambda: (runs / "softplus-seed0" / "checkpoints" / "2").exists(), signal.SIGKILL),
        (lambda: (runs / "softplus-seed1" / "checkpoints" / "4").exists(), signal.SIGKILL),
        (lambda: (runs / "softplus-seed0" / "result.json").exists(), signal.SIGKILL),
        (lambda: read_metrics(runs / "bounded-seed1"), signal.SIGTERM),
        (lambda: (runs / "bounded-seed0" / "checkpoints" / "6").exists(), signal.SIGKILL),
    ]
    for sight, number in sights:
        process = start(ablate(home, broken, "decay_gate", *PLAIN))
        while process.poll() is None and not sight():
            time.sleep(0.005)
        process.send_signal(number)
        code, output = finish(process)
        assert code in (-signal.SIGKILL, 128 + signal.SIGTERM, 0), output
        assert not (broken / "report.md").exists() or code == 0
    code, output = finish(start(ablate(home, broken, "decay_gate", *PLAIN)))
    assert code == 0, output
    same_but_times(unbroken, broken)


@pytest.mark.full
@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("study", NAMES)
def test_every_study_runs_to_its_report(home, tmp_path, study, capsys):
    arguments = ablate(home, tmp_path / study, study, "--seeds=1")
    code, output, _ = here(ablation.run, arguments, capsys)
    assert code == 0 and f"# {study}" in output and "By validation_" in output


def refused(run, arguments, capsys):
    """What the program says within this process; it must be one line, with exit code 2."""
    code, output, errors = here(run, arguments, capsys)
    assert code == 2 and not output
    assert errors.startswith("error: ") and errors.count("\n") == 1
    return errors


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--study=ratio", "--config=nano"], "--study = 'ratio': must be one of"),
        (["--study=kda_mla_ratio"], "--config: missing"),
        (["--study=activation", "--config=nano"], "--workdir: missing"),
        (["--study=activation", "--config=nano", "--seeds=-1"], "--seeds = -1"),
        (["--study=activation", "--config=nano", "--devices=0"], "--devices = 0"),
        (
            ["--study=activation", "--config=nano", "--workdir=x", "--only=y"],
            "--only = 'y': must be of swiglu-seed0, situ-seed0, swiglu-seed1",
        ),
        (
            ["--study=activation", "--config=nano", "--workdir=/dev/null/x"],
            "--workdir = /dev/null/x: cannot be used: Not a directory",
        ),
        (["--study=activation", "--config=nano", "--together=-1"], "--together = -1"),
        (
            ["--study=kda_mla_ratio", "--config=nano", "--set=model.layers=8", "--dry_run"],
            "point 15:1: model.kda_to_full = '15:1': needs at least 16 layers",
        ),
    ],
)
def test_a_study_that_cannot_be_is_one_line(arguments, message, capsys):
    assert message in refused(ablation.run, arguments, capsys)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--workdir: missing"),
        (["--workdir=/nowhere/at/all"], "holds no run"),
        (["--workdir=.", "--lengths=0"], "--lengths = 0"),
        (["--workdir=.", "--rows=0"], "--rows = 0"),
    ],
)
def test_a_question_that_cannot_be_asked_is_one_line(arguments, message, capsys):
    assert message in refused(evaluate.run, arguments, capsys)
