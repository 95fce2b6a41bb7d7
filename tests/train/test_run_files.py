"""The files of a run: records without repeats, a directory that belongs to one run, signals."""

import dataclasses
import json
import os
import signal

import pytest

from k3jax.config import DataConfig, ExperimentConfig, ModelConfig, TrainConfig
from k3jax.flags import from_json, override
from k3jax.train.hosts import join
from k3jax.train.metrics import MetricsLog, read_metrics
from k3jax.train.report import plot
from k3jax.train.signals import StopSignal
from k3jax.train.workdir import occupy, record_config

CONFIG = ExperimentConfig()


def test_a_resumed_run_records_no_step_twice(tmp_path):
    with MetricsLog(tmp_path, 0, tensorboard=False) as log:
        for step in range(1, 8):
            log.write(step, {"loss": 1.0 / step})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('null\n\0\n{"step": 8, "lo')  # damaged, then killed while writing
    with MetricsLog(tmp_path, 5, tensorboard=False) as log:
        log.write(6, {"loss": float("nan")})
        assert len(read_metrics(tmp_path)) == 6  # at once on disk
    records = read_metrics(tmp_path)
    assert [record["step"] for record in records] == [1, 2, 3, 4, 5, 6]
    assert records[-1]["loss"] is None and records[1]["loss"] == 0.5
    for line in (tmp_path / "metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


def test_tensorboard_gets_the_same_figures(tmp_path):
    with MetricsLog(tmp_path, 0, tensorboard=True) as log:
        log.write(1, {"loss": 2.0})
    (events,) = (tmp_path / "tensorboard").iterdir()
    assert b"loss" in events.read_bytes()


def test_the_plot_needs_no_particular_record(tmp_path):
    with MetricsLog(tmp_path, 0, tensorboard=False) as log:
        log.write(1, {"tokens": 10, "bits_per_byte": float("nan")})
        log.write(2, {"tokens": 20, "bits_per_byte": 3.0})
        log.write(2, {"tokens": 20, "validation_bits_per_byte": 3.5})
    assert plot(tmp_path, baseline=2.5).read_bytes().startswith(b"\x89PNG")


def claim(workdir, config):
    with occupy(workdir, config):
        record_config(workdir, config)


def test_a_directory_belongs_to_one_run(tmp_path):
    path = tmp_path / "runs" / "a" / "config.json"
    with occupy(path.parent, CONFIG):
        pass  # a run that failed before it began
    other = dataclasses.replace(CONFIG, name="other")
    claim(path.parent, other)
    assert from_json(ExperimentConfig, path.read_text()) == other
    path.unlink()
    claim(path.parent, CONFIG)
    longer = dataclasses.replace(CONFIG, train=TrainConfig(steps=999))
    claim(path.parent, longer)
    assert from_json(ExperimentConfig, path.read_text()) == longer
    claim(path.parent, override(longer, ["model.moe.buffer_factor=0", "model.moe.transport=ring"]))
    claim(path.parent, longer)
    for other, words in [
        (dataclasses.replace(CONFIG, name="mini"), "name: 'nano', now 'mini'"),
        (dataclasses.replace(CONFIG, model=ModelConfig(layers=5)), "model.layers: 4, now 5"),
        (dataclasses.replace(CONFIG, data=DataConfig(seed=1)), "data.seed: 0, now 1"),
    ]:
        with pytest.raises(ValueError, match="holds another run") as error:
            claim(path.parent, other)
        assert words in str(error.value) and "\n" not in str(error.value)
        assert from_json(ExperimentConfig, path.read_text()) == longer
    path.write_text("{")
    with pytest.raises(ValueError, match=r"config\.json: .*not JSON"):
        claim(path.parent, CONFIG)
    with pytest.raises(OSError, match=r"--workdir = .*config\.json: cannot be used: ") as error:
        claim(path, CONFIG)
    assert "\n" not in str(error.value)


def test_one_process_at_a_time(tmp_path):
    with (
        occupy(tmp_path, CONFIG),
        pytest.raises(ValueError, match="another process is training there"),
        occupy(tmp_path, CONFIG),
    ):
        pass
    claim(tmp_path, CONFIG)


def test_signals_are_noted_and_handlers_restored():
    interrupt = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job may ignore it
    try:
        _signals_are_noted()
    finally:
        signal.signal(signal.SIGINT, interrupt)


def _signals_are_noted():
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    with StopSignal() as stop:
        assert stop.received is None
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.received == signal.SIGTERM
    with StopSignal() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.received == signal.SIGINT
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert before == (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT))


@pytest.mark.parametrize(
    ("place", "words"),
    [
        (("a:1", 2, None), "give all three, or none"),
        ((None, None, 0), "give all three, or none"),
        (("a:1", 2, 2), r"--process = 2: must be in \[0, 2\)"),
        (("a", 2, 1), "--coordinator = 'a': must read host:port"),
    ],
)
def test_a_place_among_processes_is_whole(place, words):
    with pytest.raises(ValueError, match=words):
        join(*place)
