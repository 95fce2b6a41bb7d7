"""`python -m experiments.train` whole: run, killed, resumed, refused."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from absl import flags

from configs import CONFIGS
from experiments import train
from experiments.program import main
from k3jax.data import pipeline
from k3jax.flags import define, override
from k3jax.sharding import make_mesh
from k3jax.train.checkpoint import Checkpoints
from k3jax.train.loop import decoder_blueprint
from k3jax.train.metrics import read_metrics
from k3jax.train.probes import read_records
from tests.tiny import SETTINGS, write_corpus
from tests.train.stub import same_bits

STEPS = 24


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with a small corpus; caches go there too."""
    return write_corpus(tmp_path_factory.mktemp("home"))


def arguments(home, workdir, *more):
    settings = [*SETTINGS, f"train.steps={STEPS}", f"data.sources={home / 'text'}", *more]
    options = ["--config=nano", f"--workdir={workdir}", f"--cache_dir={home / 'cache'}"]
    return options + [f"--set={setting}" for setting in settings]


def start(home, workdir, *more):
    command = [sys.executable, "-m", "experiments.train", *arguments(home, workdir, *more)]
    quick = os.environ | {"JAX_DISABLE_MOST_OPTIMIZATIONS": "true"}  # half the time to compile
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, env=quick, **pipes)


def finish(process):
    output, _ = process.communicate(timeout=300)
    return process.returncode, output


def wait_for_step(process, workdir, step):
    """Until `step` is on record, or the program has ended."""
    while process.poll() is None and not any(r["step"] >= step for r in read_metrics(workdir)):
        time.sleep(0.02)


def final_state(home, workdir, *more):
    settings = [*SETTINGS, f"train.steps={STEPS}", f"data.sources={home / 'text'}", *more]
    config = override(CONFIGS["nano"](), settings)

    class NoData:
        async def load(self, directory):
            async def nothing():
                pass

            return nothing()

        async def save(self, directory): ...

    with (
        jax.set_mesh(make_mesh()),
        Checkpoints(Path(workdir) / "checkpoints", config) as checkpoints,
    ):
        assert checkpoints.steps()[-1] == STEPS
        return checkpoints.restore(decoder_blueprint(config).abstract(), NoData())


@pytest.fixture(scope="module")
def whole(home):
    """A run that nothing interrupts: its directory and final state."""
    extras = ["train.tensorboard=true", "train.profile_start=10", "train.profile_steps=2"]
    code, output = finish(start(home, os.path.relpath(home / "whole"), *extras))
    assert code == 0, output
    return home / "whole", final_state(home, home / "whole"), output


def test_a_run_leaves_what_it_promises(whole):
    workdir, state, output = whole
    records = read_metrics(workdir)
    losses = [r["loss"] for r in records if "loss" in r]
    assert [r["step"] for r in records if "loss" in r] == list(range(1, STEPS + 1))
    assert losses[-1] < losses[0] and int(state.step) == STEPS and int(state.skipped) == 0
    assert [r["step"] for r in records if "validation_bits_per_byte" in r] == [8, 16, 24]
    names = "loss bits_per_byte grad_norm learning_rate expert_load dropped_steps tokens"
    names += " tokens_per_second model_flops_per_second"
    assert set(names.split()) <= set(records[-2])
    assert (workdir / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert "▌" in (workdir / "sample.txt").read_text()
    assert "two-byte contexts: " in output and "Traceback" not in output
    names = {path.name for path in workdir.iterdir() if path.is_file()}
    assert names == {"config.json", "loss.png", "metrics.jsonl", "sample.txt"}
    assert list(workdir.glob("tensorboard/*tfevents*"))
    assert list(workdir.glob("profile/**/*.xplane.pb"))


def terminated(home, workdir):
    """Begin a run in `workdir` and ask it to stop; checks that it saves before it leaves."""
    process = start(home, workdir)
    wait_for_step(process, workdir, 2)
    process.send_signal(signal.SIGTERM)
    code, output = finish(process)
    assert code == 128 + signal.SIGTERM, output
    (step,) = [int(line.split()[-3]) for line in output.splitlines() if "is saved" in line]
    assert 2 <= step < STEPS and (workdir / "checkpoints" / str(step)).is_dir()
    assert read_metrics(workdir)[-1]["step"] == step


def killed(home, workdir, kills, seed, *more):
    """Go on with the run in `workdir`, killed `kills` times at random moments."""
    moments = random.Random(seed)
    for kill in range(kills):
        process = start(home, workdir, *more)
        done = max((r["step"] for r in read_metrics(workdir)), default=0)
        target = done + moments.randint(1, max(1, 2 * (STEPS - done) // (kills - kill + 1)))
        wait_for_step(process, workdir, min(target, STEPS - 1))
        time.sleep(moments.uniform(0, 0.2))
        process.kill()
        process.communicate()


def records_without_times(workdir):
    timed = ("tokens_per_second", "model_flops_per_second")
    return [{k: v for k, v in r.items() if k not in timed} for r in read_metrics(workdir)]


@pytest.mark.parametrize("kills", [3, pytest.param(20, marks=pytest.mark.full)])
def test_a_signal_and_kills_change_nothing(home, whole, kills):
    workdir = home / f"{kills}-kills"
    terminated(home, workdir)
    killed(home, workdir, kills, seed=kills)
    code, output = finish(start(home, workdir))
    assert code == 0, output
    assert same_bits(final_state(home, workdir), whole[1])
    assert records_without_times(workdir) == records_without_times(whole[0])


@pytest.mark.full
def test_probes_change_nothing_and_survive_kills(home, whole):
    """Bit for bit the run without them; their files, too, do not show where it was killed."""
    probes = "train.probe_every=5"
    code, output = finish(start(home, home / "probed", probes))
    assert code == 0 and "probes/expert_load.png" in output, output
    assert same_bits(final_state(home, home / "probed"), whole[1])
    assert records_without_times(home / "probed") == records_without_times(whole[0])
    killed(home, home / "probed-kills", 2, 5, probes)
    code, output = finish(start(home, home / "probed-kills", probes))
    assert code == 0, output
    steps = []
    losses = {r["step"]: r for r in read_metrics(home / "probed") if "loss" in r}
    for step, record in read_records(home / "probed"):
        steps.append(step)
        squares = [record[f"{which}gradient_norm"].astype(float) ** 2 for which in ("", "outer_")]
        norm = sum(map(np.nansum, squares)) ** 0.5
        assert norm == pytest.approx(losses[step]["grad_norm"], rel=1e-5)
        assert record["expert_load"].max() == pytest.approx(losses[step]["expert_load"], rel=1e-6)
    assert steps == [5, 10, 15, 20, STEPS]
    one, other = (
        {path.name: path.read_bytes() for path in (home / name / "probes").iterdir()}
        for name in ("probed", "probed-kills")
    )
    names = [name for name in one if name.endswith(".npz")]
    assert len(names) == 5 and one.keys() == other.keys()
    assert all(one[name] == other[name] for name in names)
    command = [sys.executable, "-m", "experiments.evaluate", f"--workdir={home / 'probed'}"]
    command += [f"--cache_dir={home / 'cache'}", "--suite=probes"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    folder = home / "probed" / "evaluation"
    held_out = np.load(folder / "probes.npz")
    assert set(held_out) == set(record) and held_out["gradient_norm"].any()
    assert (folder / "probes" / "gradient_norm.png").exists()


@pytest.mark.full
def test_kills_across_stages_change_nothing(home):
    # One program a stage is compiled, and none of them needs to be large.
    small = ("model.kda_to_full=0:1", "model.mla.heads=2", "model.moe.experts=0")
    staged = ("data.stages=7:16x6,13:64x4", "train.sample_tokens=0", *small)
    code, output = finish(start(home, home / "staged", *staged))
    assert code == 0, output
    killed(home, home / "staged-kills", 8, 0, *staged)
    code, output = finish(start(home, home / "staged-kills", *staged))
    assert code == 0, output
    one, other = (final_state(home, home / name, *staged) for name in ("staged", "staged-kills"))
    assert same_bits(one, other)
    records = read_metrics(home / "staged")
    assert records_without_times(home / "staged-kills") == records_without_times(home / "staged")
    at = [r["step"] for r in records if "validation_bits_per_byte" in r]
    assert at == [7, 8, 13, 16, 24]
    assert [r["stage"] for r in records if "loss" in r] == [1] * 7 + [2] * 6 + [3] * 11
    assert records[-1]["tokens"] == 7 * 4 * 32 + 6 * 6 * 16 + 11 * 4 * 64


@pytest.mark.full
def test_four_devices(home, monkeypatch):
    devices = "--xla_force_host_platform_device_count=4"
    monkeypatch.setenv("XLA_FLAGS", f"{os.environ.get('XLA_FLAGS', '')} {devices}")
    mesh = ["mesh.data=2", "mesh.fsdp=2", "train.micro_batches=1"]
    code, output = finish(start(home, home / "mesh", *mesh))
    assert code == 0, output
    assert "▌" in (home / "mesh" / "sample.txt").read_text()


@pytest.mark.full
def test_dropped_routes_end_a_run_unless_allowed(home, monkeypatch):
    devices = "--xla_force_host_platform_device_count=4"
    monkeypatch.setenv("XLA_FLAGS", f"{os.environ.get('XLA_FLAGS', '')} {devices}")
    tight = ["mesh.expert=4", "train.micro_batches=1", "model.moe.buffer_factor=1"]
    tight += ["train.steps=3", "train.sample_tokens=2"]
    code, output = finish(start(home, home / "tight", *tight))
    assert code == 2 and "error: moe.buffer_factor = 1.0: step 1 has no room" in output, output
    (record,) = read_metrics(home / "tight")
    assert record["dropped_routes"] > 0
    code, output = finish(start(home, home / "loose", *tight, "model.moe.allow_drops=true"))
    assert code == 0, output
    records = [r for r in read_metrics(home / "loose") if "loss" in r]
    assert len(records) == 3 and records[0]["dropped_routes"] == record["dropped_routes"]


@pytest.fixture
def call(home, capsys):
    """The program within this process: its exit code, and what it wrote to either stream."""
    if "config" not in flags.FLAGS:
        define(CONFIGS)

    def run(*options):
        flags.FLAGS.unparse_flags()
        flags.FLAGS["set"].value = []
        code = main(train.run, flags.FLAGS(["train", *options]))
        return code, *capsys.readouterr()

    return run


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("model.d_modell=3", "did you mean model.d_model"),
        ("train.steps=many", "must be an integer"),
        ("model.kda_to_full=9:1", "needs at least 10 layers"),
        ("model.moe.top_k=9", "must be at most moe.experts = 4"),
        ("model.vocab_size=256", "must be at least 257"),
        ("data.sources=/nowhere", "/nowhere"),
        ("mesh.data=2", "needs 2 devices"),
        ("mesh.expert=3", "must divide moe.experts = 4"),
        ("model.moe.buffer_factor=0.5", "must be at least 1, or 0 for any load"),
        ("mesh.data=64", "must divide by the 64 of mesh.data x mesh.fsdp x mesh.expert"),
    ],
)
def test_bad_input_is_one_line(home, call, tmp_path, setting, words):
    code, _, err = call(*arguments(home, tmp_path / "new", setting))
    assert code == 2 and err.startswith("error: ") and words in err and err.count("\n") == 1
    assert not (tmp_path / "new" / "config.json").exists()  # corrected, it may run there


def test_a_forgotten_set_is_not_passed_over(home, call, tmp_path):
    code, _, err = call(*arguments(home, tmp_path / "new"), "train.steps=3")
    assert code == 2 and "train.steps=3: not understood" in err and err.count("\n") == 1


def test_other_runs_directories_are_refused(home, whole, call):
    workdir, state, _ = whole
    code, _, err = call(*arguments(home, workdir, "model.d_model=8"))
    assert code == 2 and "holds another run; model.d_model: 16, now 8" in err
    code, _, err = call(*arguments(home, workdir, "optimiser.kind=adamw"))
    assert code == 2 and "another configuration" in err and "opt_state/" in err
    assert err.count("\n") == 1 and "optimiser.kind: 'muon', now 'adamw'" in err
    code, _, err = call(*arguments(home, workdir, "train.steps=9", "train.sample_tokens=0"))
    assert code == 2 and "train.steps = 9: " in err and f"is at step {STEPS}" in err
    assert same_bits(final_state(home, workdir), state)


def test_another_corpus_is_refused(home, whole, call):
    more = home / "text" / "more.txt"
    more.write_text("new text\n" * 100)
    pipeline._load_corpus.cache_clear()
    code, _, err = call(*arguments(home, whole[0]))
    more.unlink()
    pipeline._load_corpus.cache_clear()
    assert code == 2 and "data position" in err and err.count("\n") == 1
    assert same_bits(final_state(home, whole[0]), whole[1])


def test_dry_run(home, call, tmp_path):
    code, out, _ = call(*arguments(home, tmp_path / "new"), "--dry_run")
    assert code == 0 and not (tmp_path / "new").exists()
    (table,) = [line for line in out.splitlines() if line.startswith("embedding")]
    assert "257 x 16" in table and "adamw" in table and "16,448" in table
    rules = {line.split("  ")[0]: line for line in out.splitlines() if line.startswith("blocks")}
    mixer = "blocks/0/layers/0/mixer/"
    assert "muon per head, 16 x 8  " in rules[f"{mixer}stream/q"]
    assert "muon, 16 x 16  " in rules[f"{mixer}out"] and "adamw" in rules[f"{mixer}beta"]
    assert "steps 1 to 24: 4 rows of 32 tokens, 128 tokens a step" in out
    assert "bytes per device, of 1: " in out
    assert "FLOPs per token" in out and "parameters: " in out and '"d_model": 16' in out
