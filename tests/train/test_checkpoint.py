"""Checkpoints: exact, atomic, checked; of another configuration refused."""

import dataclasses
import logging
import os
import shutil
import subprocess
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from orbax.checkpoint._src.metadata import checkpoint as orbax_metadata

from k3jax.config import MoEConfig, OptimiserConfig, TrainConfig
from k3jax.sharding import make_mesh
from k3jax.train import checkpoint
from k3jax.train.checkpoint import Checkpoints
from k3jax.train.state import blueprint
from tests.train.stub import STEPS, Stub, same_bits


@pytest.fixture
def lines(caplog):
    """A function that returns the lines logged since its last call."""
    caplog.set_level(logging.WARNING, "k3jax")

    def take():
        found = [record.getMessage() for record in caplog.records if record.name == "k3jax"]
        caplog.clear()
        return found

    return take


@pytest.fixture(scope="module")
def saved(run, tmp_path_factory):
    """A directory with checkpoints 1 to 3, and the states they hold."""
    directory = tmp_path_factory.mktemp("run") / "checkpoints"
    state, data, states = run.plan.create(0), run.data(), {}
    with Checkpoints(directory, run.config) as checkpoints:
        for step in (1, 2, 3):
            state, _ = run.advance(state, data, 1)
            checkpoints.save(state, data)
            states[step] = jax.tree.map(jnp.copy, state)
    return directory, states


@pytest.fixture
def copy(saved, tmp_path):
    shutil.copytree(saved[0], tmp_path / "checkpoints")
    return tmp_path / "checkpoints"


def restore(run, directory, config=None):
    data = run.data()
    with Checkpoints(directory, config or run.config) as checkpoints:
        return checkpoints.restore(run.plan.abstract(), data), data


def test_resume_is_bitwise_exact(run, tmp_path):
    whole, losses = run.advance(run.plan.create(0), run.data(), STEPS)
    data, state = run.data(), run.plan.create(0)
    with Checkpoints(tmp_path, run.config) as checkpoints:
        assert checkpoints.restore(run.plan.abstract(), data) is None
        state, _ = run.advance(state, data, 5)
        checkpoints.save(state, data)
        run.advance(state, data, 3)  # lost work, while the checkpoint is being written
    state, data = restore(run, tmp_path)
    assert int(state.step) == 5 and jax.tree.structure(state) == jax.tree.structure(whole)
    state, rest = run.advance(state, data, STEPS - 5)
    assert rest == losses[5:] and same_bits(state, whole)


def test_resume_on_a_mesh_of_one_device(run, copy, saved):
    with jax.set_mesh(make_mesh()):
        abstract = run.plan.abstract()
        with Checkpoints(copy, run.config) as checkpoints:
            state = checkpoints.restore(abstract, run.data())
        fresh = run.plan.create(0)
        assert [a.sharding for a in jax.tree.leaves(state)] == [
            a.sharding for a in jax.tree.leaves(fresh)
        ]
    assert same_bits(state, saved[1][3])


def test_keeps_the_newest_and_every_nth(run, tmp_path):
    config = dataclasses.replace(run.config, train=TrainConfig(keep=2, keep_every=4))
    state, data = run.plan.create(0), run.data()
    with Checkpoints(tmp_path, config) as checkpoints:
        for _ in range(7):
            state, _ = run.advance(state, data, 1)
            checkpoints.save(state, data)
        checkpoints.wait()
        assert checkpoints.steps() == [4, 6, 7]


def files_of(path):
    return sorted(file for file in path.rglob("*") if file.is_file())


def damage(file, how, rng):
    content = bytearray(file.read_bytes())
    if how == "delete":
        file.unlink()
    elif how == "truncate":
        file.write_bytes(content[: rng.integers(len(content))])
    else:
        content[rng.integers(len(content))] ^= 1 << int(rng.integers(8))
        file.write_bytes(content)


@pytest.mark.parametrize("how", ["delete", "truncate", "flip"])
def test_a_damaged_file_makes_the_checkpoint_before_it_count(run, saved, copy, lines, how):
    rng = np.random.default_rng(len(how))
    files = [file for file in files_of(copy / "3") if file.name != "commit_success.txt"]
    for file in files:
        shutil.copytree(saved[0], copy, dirs_exist_ok=True)
        damage(file, how, rng)
        state, data = restore(run, copy)
        found = lines()
        if file.name == checkpoint.MANIFEST and not found:
            assert same_bits(state, saved[1][3])  # the time of writing, of no consequence
            continue
        assert len(found) == 1 and found[0].startswith("checkpoint 3 skipped: "), (file, found)
        assert same_bits(state, saved[1][2]) and not (copy / "3").exists()
        assert (copy / "3.damaged").is_dir()
        same_place = run.data()
        next(same_place), next(same_place)
        assert data.get_state() == same_place.get_state()


def test_a_manifest_that_is_late_is_waited_for(run, tmp_path, lines, monkeypatch):
    """orbax writes its manifest in a thread of its own, beside the one that calls `_seal`."""
    write = orbax_metadata._MetadataStoreImpl.write

    def late(*args, **kwargs):
        time.sleep(0.3)
        write(*args, **kwargs)

    monkeypatch.setattr(orbax_metadata._MetadataStoreImpl, "write", late)
    with Checkpoints(tmp_path, run.config) as checkpoints:
        checkpoints.save(run.plan.create(0), run.data())
    assert restore(run, tmp_path)[0] is not None and not lines()


def test_every_half_written_directory_is_skipped(run, copy, saved, lines):
    shutil.copytree(copy / "3", copy / f"4{checkpoint.PART}")
    shutil.rmtree(copy / "3" / "state")
    (copy / "2" / checkpoint.RECORD).unlink()
    state, _ = restore(run, copy)
    assert same_bits(state, saved[1][1])
    assert [line.split(":")[0] for line in lines()] == [
        f"checkpoint {step} skipped" for step in (4, 3, 2)
    ]
    assert not list(copy.glob(f"*{checkpoint.PART}*"))


def test_names_that_are_no_steps(run, copy, saved, lines):
    """Copies under other names are not taken for steps, nor are files; the rest is left alone."""
    for name in ("007", "9", "\u0663"):
        shutil.copytree(copy / "2", copy / name)
    (copy / "8").write_text("a file")
    (copy / f"5{checkpoint.PART}").write_text("a file")
    for name in ("README", "best", "-1", "step_4", "3.5"):
        (copy / name).mkdir()
    with Checkpoints(copy, run.config) as checkpoints:
        data = run.data()
        state = checkpoints.restore(run.plan.abstract(), data)
        assert same_bits(state, saved[1][3])
        checkpoints.save(run.advance(state, data, 1)[0], data)
        checkpoints.wait()
        assert checkpoints.steps() == [2, 3, 4]
    reasons = {
        "007": "not the name of a step",
        "5": "half-written",
        "9": "it is that of step 2",
        "8": f"damaged or missing: [Errno 20] Not a directory: '{copy}/8/record.json'",
        "\u0663": "not the name of a step",
    }
    assert sorted(lines()) == sorted(
        f"checkpoint {name} skipped: {reason}" for name, reason in reasons.items()
    )


def test_training_goes_on_past_damaged_checkpoints(run, copy, saved, lines):
    """A damaged one is not counted among those kept, and its step may be saved again."""
    for step in (2, 3):
        (copy / str(step) / checkpoint.RECORD).write_text("{}")
    config = dataclasses.replace(run.config, train=TrainConfig(keep=1))
    data = run.data()
    with Checkpoints(copy, config) as checkpoints:
        state = checkpoints.restore(run.plan.abstract(), data)
        assert int(state.step) == 1
        state, _ = run.advance(state, data, 1)
        checkpoints.save(state, data)
        checkpoints.wait()
        assert checkpoints.steps() == [2]
    assert same_bits(restore(run, copy)[0], saved[1][2])


def test_nothing_intact_leaves_nothing_loaded(run, copy, lines):
    for step in (1, 2, 3):
        shutil.rmtree(copy / str(step) / "data")
    state, data = restore(run, copy)
    assert state is None and len(lines()) == 3
    assert data.get_state() == run.data().get_state()


def test_another_configuration_is_refused_by_its_leaves(run, copy):
    config = dataclasses.replace(run.config, optimiser=OptimiserConfig(kind="adamw"))
    plan = blueprint(Stub, config.optimiser, STEPS)
    with (
        Checkpoints(copy, config) as checkpoints,
        pytest.raises(ValueError, match="another configuration") as error,
    ):
        checkpoints.restore(plan.abstract(), run.data())
    message = str(error.value)
    assert "\n" not in message and "optimiser.kind: 'muon', now 'adamw'" in message
    assert "adamw/mu/mix/value: absent, now float32[2, 8, 8]" in message.replace("inner_state/", "")
    assert sorted(p.name for p in copy.iterdir()) == ["1", "2", "3"]


def test_the_same_leaves_may_be_of_another_run(run, copy):
    model = dataclasses.replace(run.config.model, moe=MoEConfig(top_k=3))
    config = dataclasses.replace(run.config, model=model)
    with pytest.raises(ValueError, match=r"another configuration: model\.moe\.top_k: 2, now 3$"):
        restore(run, copy, config)


def test_a_failed_write_is_one_line_and_leaves_the_others(run, copy, saved, monkeypatch):
    def full(path):
        raise OSError(28, "No space left on device")

    state, data = restore(run, copy)
    state, _ = run.advance(state, data, 1)
    with (
        monkeypatch.context() as patch,
        pytest.raises(OSError, match="no space left on the disk") as error,
        Checkpoints(copy, run.config) as checkpoints,
    ):
        patch.setattr(checkpoint, "file_digest", full)
        checkpoints.save(state, data)
    assert "\n" not in str(error.value) and "intact ones: 1, 2, 3" in str(error.value)
    assert same_bits(restore(run, copy)[0], saved[1][3])


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_a_full_disk(run, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=192k", "none", disk]).returncode:
        pytest.skip("no right to mount")
    try:
        state, data = run.plan.create(0), run.data()
        with (
            pytest.raises(OSError, match="no space left on the disk") as error,
            Checkpoints(disk / "checkpoints", run.config) as checkpoints,
        ):
            for _ in range(STEPS):
                state, _ = run.advance(state, data, 1)
                checkpoints.save(state, data)
                checkpoints.wait()
        assert "\n" not in str(error.value)
        assert int(restore(run, disk / "checkpoints")[0].step) == int(state.step) - 1 > 0
    finally:
        subprocess.run(["umount", disk], check=True)
