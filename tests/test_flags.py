"""`--set` and the JSON form of a configuration: typed, with names for what was wrong."""

import dataclasses
from typing import Literal

import pytest
from absl import flags as absl_flags

from k3jax import flags
from k3jax.config import ExperimentConfig, TrainConfig


@dataclasses.dataclass(frozen=True)
class Inner:
    colour: Literal["red", "blue"] = "red"
    pair: tuple[int, float] = (1, 2.0)
    bound: float | None = None


@dataclasses.dataclass(frozen=True)
class Outer:
    name: str = "x"
    inner: Inner = Inner()


@pytest.mark.parametrize(
    ("assignment", "path", "expected"),
    [
        ("train.steps=7", "train.steps", 7),
        ("optimiser.learning_rate=3e-4", "optimiser.learning_rate", 3e-4),
        ("optimiser.weight_decay=1", "optimiser.weight_decay", 1.0),
        ("train.tensorboard=true", "train.tensorboard", True),
        ("train.tensorboard=off", "train.tensorboard", False),
        ("model.kda_to_full=1:1", "model.kda_to_full", "1:1"),
        ("model.mixers=kda,kda,full,full", "model.mixers", ("kda", "kda", "full", "full")),
        ("model.mixers=()", "model.mixers", ()),
        ("data.weights=[0.5]", "data.weights", (0.5,)),
        ("data.sources=a=b.txt", "data.sources", ("a=b.txt",)),
        ("model.kda.gate_form=softplus", "model.kda.gate_form", "softplus"),
        ("name=", "name", ""),
    ],
)
def test_values_are_read_by_their_type(assignment, path, expected):
    changed = dict(flags.leaves(flags.override(ExperimentConfig(), [assignment])))
    assert changed[path] == expected and type(changed[path]) is type(expected)
    unchanged = dict(flags.leaves(ExperimentConfig()))
    assert {k for k in changed if changed[k] != unchanged[k]} <= {path}


def test_unions_pairs_and_literals():
    changed = flags.override(Outer(), ["inner.bound=2", "inner.pair=3,4", "inner.colour=blue"])
    assert changed.inner == Inner("blue", (3, 4.0), 2.0)
    assert flags.override(changed, ["inner.bound=None"]).inner.bound is None


def test_settings_that_must_agree_change_together():
    both = ["train.micro_batches=5", "data.batch_size=10"]
    for order in (both, both[::-1]):
        config = flags.override(ExperimentConfig(), order)
        assert (config.train.micro_batches, config.data.batch_size) == (5, 10)


@pytest.mark.parametrize(
    ("assignment", "words"),
    [
        ("train.step=3", "did you mean train.steps"),
        ("trian.steps=3", "did you mean train.steps"),
        ("steps=3", "did you mean train.steps"),
        ("train.steps.more=3", "unknown"),
        ("model.kda=3", "a group of settings"),
        ("train.steps", "must read path.to.leaf=value"),
        ("train.steps=3.5", "must be an integer"),
        ("train.steps=", "must be an integer"),
        ("train.tensorboard=maybe", "must be true or false"),
        ("optimiser.eps=small", "must be a finite number"),
        ("optimiser.weight_decay=inf", "must be a finite number"),
        ("model.norm_eps=nan", "must be a finite number"),
        ("qqqqqqqqqqq=1", "none of the [0-9]+ settings"),
        ("optimiser.kind=sgd", "must be one of adamw, muon"),
        ("model.mixers=kda,mla", "must be one of kda, full"),
        ("data.weights=1,x", "must be a finite number"),
        ("train.micro_batches=3", "must divide data.batch_size"),
    ],
)
def test_wrong_settings_name_what_is_allowed(assignment, words):
    with pytest.raises(ValueError, match=words) as error:
        flags.override(ExperimentConfig(), [assignment])
    assert "\n" not in str(error.value)


def test_a_pair_has_two_entries():
    with pytest.raises(ValueError, match="2 comma-separated values"):
        flags.override(Outer(), ["inner.pair=3"])


def test_json_round_trip_and_differences():
    changes = ["model.mixers=kda,full,kda,full", "train.steps=9", "data.weights=2"]
    config = flags.override(ExperimentConfig(), changes)
    assert flags.from_json(ExperimentConfig, flags.to_json(config)) == config
    assert flags.differences(ExperimentConfig(), config)[-1] == "train.steps: 300, now 9"
    assert flags.differences(config, config) == []


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "not JSON"),
        ("[]", "must be a JSON object"),
        ('{"train": 3}', "must be a JSON object"),
        ('{"train": {"stepz": 3}}', "did you mean steps"),
        ('{"train": {"steps": true}}', "must be an integer"),
        ('{"train": {"steps": "3"}}', "must be an integer"),
        ('{"data": {"weights": 1}}', "comma-separated list"),
    ],
)
def test_damaged_json_is_refused(text, words):
    with pytest.raises(ValueError, match=words):
        flags.from_json(ExperimentConfig, text)


def test_absl_flags():
    values = absl_flags.FlagValues()
    registry = {"nano": ExperimentConfig}
    flags.define(registry, values)
    values(["program", "--config=nano", "--set", "train.steps=5", "--set=train.keep=2"])
    assert flags.resolve(registry, values).train == TrainConfig(steps=5, keep=2)
    values(["program", "--config=nnao"])
    with pytest.raises(ValueError, match="did you mean nano"):
        flags.resolve(registry, values)
