"""What a study is: a question, an axis, and what is held equal along it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Literal

from experiments.sweep import Sweep
from k3jax.config import ExperimentConfig
from k3jax.train.validation import validation_figures

Equal = Literal["tokens", "parameters", "active", "flops"]


@dataclasses.dataclass(frozen=True)
class Metric:
    """A figure of a finished run, by its name in `result.json`, and which way is better."""

    name: str
    better: Literal["lower", "higher"]


BITS = Metric("validation_bits_per_byte", "lower")
ACCURACY = Metric("validation_accuracy", "higher")


@dataclasses.dataclass(frozen=True)
class Study:
    """A comparison that one command makes.

    question: what it asks, in one sentence.
    axis: what differs, for the report's table and plots.
    points: the sweep; every point starts from the configuration that `--config` names.
    reference: the label of the point that others are compared with.
    base: assignments for all points, before those of the point.
    budgets: more of them, by the name of the configuration: what a run may take at its size.
    equal: what is held equal. `tokens`: every run sees the same batches. `parameters`, `active`:
      that too, and the widths of the feed-forward layers are chosen so that the total or active
      parameters are closest to those of the reference. `flops`: the number of steps is, so that the
      training FLOPs are.
    metric: what decides; where a run's data are several pools (`deciding`), the figure of each.
    seeds: how many runs a point gets, unless `--seeds` says otherwise; a seed fixes first values
      and the order of the data, so runs of one seed are compared in pairs.
    """

    question: str
    axis: str
    points: Sweep
    reference: str
    base: tuple[str, ...] = ()
    budgets: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    equal: Equal = "tokens"
    metric: Metric = BITS
    seeds: int = 2

    def __post_init__(self) -> None:
        labels = [point.label for point in self.points]
        if self.reference not in labels:
            raise ValueError(f"study: reference = {self.reference!r}: must be among {labels}")


def deciding(study: Study, config: ExperimentConfig) -> tuple[Metric, ...]:
    """What decides: the study's metric or, where `config` mixes pools of data, one for each pool.

    Of a text that is its bits per byte, of a task its accuracy.
    """
    names = validation_figures(config.data).values()
    return tuple(
        dataclasses.replace(BITS if name.endswith("byte") else ACCURACY, name=name)
        for name in names
    ) or (study.metric,)
