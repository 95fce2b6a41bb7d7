"""Two and four processes as one run: they train, stop, die and resume like one process."""

import signal
import time

import numpy as np
import pytest

from k3jax.train.metrics import read_metrics
from k3jax.train.probes import read_records
from tests.multi_process.processes import Job
from tests.tiny import write_corpus


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("home"))


def losses(workdir):
    """The loss of every step on record, each of which must be there once, in order."""
    records = [r for r in read_metrics(workdir) if "loss" in r]
    assert [r["step"] for r in records] == list(range(1, len(records) + 1))
    return [r["loss"] for r in records]


def run(home, name, count, devices, *settings):
    """To the end; what the processes wrote."""
    with Job(home, home / name, count, devices, settings) as job:
        codes, outputs = job.finish()
        assert codes == [0] * count, outputs
    return outputs


def stopped(home, name, count, devices, at, which, *settings):
    """Until process `which` alone is asked to stop after step `at`; the step that is saved."""
    with Job(home, home / name, count, devices, settings) as job:
        job.wait_for_step(at)
        job.processes[which].send_signal(signal.SIGTERM)
        codes, outputs = job.finish()
    assert codes == [128 + signal.SIGTERM] * count, outputs
    said = [[line for line in out.splitlines() if "is saved" in line] for out in outputs]
    assert [len(lines) for lines in said] == [1] + [0] * (count - 1), outputs
    step = int(said[0][0].split()[-3])
    assert step >= at and (home / name / "checkpoints" / str(step)).is_dir()
    assert len(losses(home / name)) == step
    return step


def test_two_processes_stop_together_and_one_goes_on(home):
    settings = ("mesh.data=2", "train.steps=30")
    step = stopped(home, "two", 2, 1, 2, 1, *settings)
    assert step < 30
    run(home, "two", 1, 2, *settings)
    assert len(losses(home / "two")) == 30 and losses(home / "two")[-1] < losses(home / "two")[0]


STAGED = ("train.steps=24", "data.stages=9:64x8", "train.sample_tokens=4")


@pytest.fixture(scope="module")
def whole(home):
    """One process on four devices, uninterrupted: its losses and its sample."""
    run(home, "whole", 1, 4, "mesh.data=2", "mesh.fsdp=2", *STAGED)
    return losses(home / "whole"), (home / "whole" / "sample.txt").read_text()


@pytest.mark.full
@pytest.mark.parametrize(
    ("count", "mesh"),
    [
        (2, ("mesh.data=2", "mesh.fsdp=2")),
        (4, ("mesh.data=2", "mesh.fsdp=2")),
        (2, ("mesh.fsdp=2", "mesh.tensor=2")),
        (4, ("mesh.data=2", "mesh.tensor=2")),  # two processes need the same rows
    ],
)
def test_as_one_process(home, whole, count, mesh):
    name = f"{count}-{'-'.join(mesh)}"
    outputs = run(home, name, count, 4 // count, *mesh, *STAGED)
    expected, sample = whole
    assert losses(home / name) == pytest.approx(expected, rel=1e-5)
    assert (home / name / "sample.txt").read_text() == sample
    assert "sample, after" in outputs[0] and not any("sample" in out for out in outputs[1:])


@pytest.mark.full
def test_probes_of_two_processes_are_those_of_one(home):
    settings = ("mesh.data=2", "train.steps=6", "train.probe_every=4")
    run(home, "probed", 2, 1, *settings)
    run(home, "probed-alone", 1, 2, *settings)
    two, one = (dict(read_records(home / name)) for name in ("probed", "probed-alone"))
    assert list(two) == list(one) == [4, 6]
    for step, record in one.items():
        assert record.keys() == two[step].keys() and "max_logit" in record
        for name, values in record.items():
            if values.dtype.kind == "f":
                np.testing.assert_allclose(two[step][name], values, rtol=1e-4, err_msg=name)


@pytest.mark.full
def test_four_processes_then_two_then_one(home, whole):
    """Stopped by a signal to one process, and resumed on fewer, across a border of stages."""
    settings = ("mesh.data=2", "mesh.fsdp=2", *STAGED)
    first = stopped(home, "fewer", 4, 1, 3, 2, *settings)
    if first < 20:
        stopped(home, "fewer", 2, 2, first + 3, 0, *settings)
    run(home, "fewer", 1, 4, "mesh.fsdp=2", "mesh.tensor=2", *STAGED)
    assert losses(home / "fewer") == pytest.approx(whole[0], rel=1e-4)


@pytest.mark.full
@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_process_ends_the_others_and_a_restart_resumes(home, victim):
    settings = ("mesh.fsdp=2", "train.steps=60")
    if not (home / "unbroken").exists():
        run(home, "unbroken", 2, 1, *settings)
    name = f"without-{victim}"
    with Job(home, home / name, 2, 1, settings) as job:
        job.wait_for_step(12)
        job.processes[victim].kill()
        before = time.monotonic()
        codes, outputs = job.finish()
        assert time.monotonic() - before < 120
    assert codes[victim] == -signal.SIGKILL and codes[1 - victim] not in (0, -signal.SIGKILL)
    if victim == 1:  # the first process also serves the others: they are torn down with it
        (line,) = [line for line in outputs[0].splitlines() if line.startswith("error: ")]
        assert line.startswith("error: process 0: stopped, ")
    run(home, name, 2, 1, *settings)
    assert losses(home / name) == losses(home / "unbroken")


@pytest.mark.full
def test_processes_that_disagree_say_so(home):
    settings = ("mesh.data=2", "train.steps=3")
    last = ("optimiser.beta2=0.9",)
    with Job(home, home / "different", 2, 1, settings, last) as job:
        codes, outputs = job.finish()
    assert codes == [2, 2], outputs
    assert all("error: settings: not the same in all 2 processes" in out for out in outputs)
