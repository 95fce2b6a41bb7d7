"""`experiments.ablate` and `experiments.evaluate` whole, on models that compile quickly."""

import csv
import json
import os
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
from tests.tiny import SETTINGS, write_corpus

SHORT = [*SETTINGS, "train.steps=6", "train.sample_tokens=0", "train.checkpoint_every=2"]
# What a study needs of the model that it varies.
NEEDS = {
    "kda_mla_ratio": ["model.layers=16"],
    "residual": ["model.layers=4", "model.kda_to_full=3:1"],
    "full_attention": ["model.layers=2", "model.kda_to_full=1:1", "model.gqa.head_dim=8"],
    "latent_width": ["model.d_model=128"],
    "lineage": ["model.kda.heads=1", "model.kda.key_dim=16", "model.kda.value_dim=16"],
    "output_gate": ["model.d_model=64"],
}


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with a small corpus; caches go there too."""
    return write_corpus(tmp_path_factory.mktemp("home"))


def command(program, home, workdir, settings, *options):
    return [
        sys.executable, "-m", f"experiments.{program}", f"--workdir={workdir}",
        f"--cache_dir={home / 'cache'}", *(f"--set={setting}" for setting in settings), *options,
    ]  # fmt: skip


def ablate(home, workdir, study, *more):
    source = [] if study == "lineage" else [f"data.sources={home / 'text'}"]
    settings = [*SHORT, *source, *NEEDS.get(study, [])]
    return command(
        "ablate", home, workdir, settings, f"--study={study}", "--config=nano", "--seeds=1", *more
    )


def run(arguments):
    quick = os.environ | {"JAX_DISABLE_MOST_OPTIMIZATIONS": "true"}
    done = subprocess.run(
        arguments, env=quick, capture_output=True, text=True, timeout=900, check=False
    )
    return done.returncode, done.stdout, done.stderr


def same_but_times(one, other):
    """Whether two finished studies left the same report, table and plots."""
    for name in ("report.md", "results.csv", "loss.png", "axis.png"):
        assert (one / name).read_bytes() == (other / name).read_bytes(), name


def test_a_study_killed_and_started_again_gives_the_same_report(home, tmp_path):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    code, output, errors = run(ablate(home, whole, "decay_gate"))
    assert code == 0, errors
    assert "# decay_gate" in output and "not told apart from it: softplus" in output
    rows = list(csv.DictReader((whole / "results.csv").open()))
    assert [row["label"] for row in rows] == ["softplus", "bounded"]
    assert all(0 < float(row["validation_bits_per_byte"]) < 9 for row in rows)

    killed = subprocess.Popen(
        ablate(home, broken, "decay_gate"),
        env=os.environ | {"JAX_DISABLE_MOST_OPTIMIZATIONS": "true"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    first = broken / "runs" / "softplus-seed0"
    while killed.poll() is None and not (first / "checkpoints" / "2").exists():
        time.sleep(0.02)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    assert not (broken / "report.md").exists()
    code, _, errors = run(ablate(home, broken, "decay_gate"))
    assert code == 0, errors
    same_but_times(whole, broken)

    code, _, errors = run(ablate(home, whole, "activation"))
    assert code == 2 and "holds the study 'decay_gate', not 'activation'" in errors
    assert errors.count("\n") == 1

    evaluated = command(
        "evaluate", home, whole / "runs" / "bounded-seed0", [], "--suite=perplexity,recall",
        "--lengths=1,2", "--rows=6",
    )  # fmt: skip
    code, output, errors = run(evaluated)
    assert code == 0, errors
    folder = whole / "runs" / "bounded-seed0" / "evaluation"
    found = json.loads((folder / "perplexity.json").read_text())
    result = json.loads((whole / "runs" / "bounded-seed0" / "result.json").read_text())
    assert found["step"] == 6
    assert found["bits_per_byte"] == pytest.approx(result["validation_bits_per_byte"], rel=1e-5)
    found = json.loads((folder / "recall.json").read_text())
    assert [entry["length"] for entry in found["lengths"]] == [32, 64]
    assert (folder / "recall.png").exists() and "accuracy" in output


@pytest.mark.full
@pytest.mark.parametrize("study", NAMES)
def test_every_study_runs_to_its_report(home, tmp_path, study):
    code, output, errors = run(ablate(home, tmp_path / study, study))
    assert code == 0, errors
    assert f"# {study}" in output and "By validation_" in output


def refused(run, options, capsys):
    """What the program says within this process; it must be one line, with exit code 2."""
    if "config" not in flags.FLAGS:
        define(CONFIGS)
    with flagsaver.flagsaver():
        flags.FLAGS.unparse_flags()
        assert main(run, flags.FLAGS(["program", *options])) == 2
    output, errors = capsys.readouterr()
    assert not output and errors.startswith("error: ") and errors.count("\n") == 1
    return errors


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--study=ratio", "--config=nano"], "--study = 'ratio': must be one of"),
        (["--study=kda_mla_ratio"], "--config: missing"),
        (["--study=activation", "--config=nano"], "--workdir: missing"),
        (["--study=activation", "--config=nano", "--seeds=-1"], "--seeds = -1"),
        (["--study=activation", "--config=nano", "--devices=0"], "--devices = 0"),
        (
            ["--study=activation", "--config=nano", "--workdir=x", "--only=y"],
            "--only = 'y': must be one of",
        ),
        (
            ["--study=kda_mla_ratio", "--config=nano", "--set=model.layers=8", "--dry_run"],
            "point 15:1: model.kda_to_full = '15:1': needs at least 16 layers",
        ),
    ],
)
def test_a_study_that_cannot_be_is_one_line(options, message, capsys):
    assert message in refused(ablation.run, options, capsys)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "--workdir: missing"),
        (["--workdir=/nowhere/at/all"], "holds no run"),
        (["--workdir=.", "--lengths=0"], "--lengths = 0"),
        (["--workdir=.", "--rows=0"], "--rows = 0"),
    ],
)
def test_a_question_that_cannot_be_asked_is_one_line(options, message, capsys):
    assert message in refused(evaluate.run, options, capsys)
