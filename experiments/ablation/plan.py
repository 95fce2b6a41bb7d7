"""The runs of a study: a configuration for each point and seed, equal in what the study says."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable
from pathlib import Path

from experiments.ablation.study import Study
from experiments.sweep import Point
from k3jax.config import ExperimentConfig
from k3jax.cost import flops_per_token, parameter_counts
from k3jax.flags import override

_MULTIPLE = 8  # of a width that is chosen, for matrix units; models narrower than
_NARROW = 128  # this are too small to be equal in such steps


@dataclasses.dataclass(frozen=True)
class Run:
    """One training run."""

    name: str
    label: str
    seed: int
    config: ExperimentConfig

    def folder(self, workdir: Path) -> Path:
        """Where it is made in the directory of a study."""
        return workdir / "runs" / self.name

    @property
    def flops(self) -> float:
        """Of the whole run, forward and backward."""
        return flops_after(self.config, self.config.train.steps)


def flops_after(config: ExperimentConfig, steps: int) -> float:
    """Of the first `steps` steps, forward and backward, in all their stages."""
    return sum(
        max(min(end, steps) - start, 0) * step_flops for start, end, step_flops in _stages(config)
    )


def _steps_for(config: ExperimentConfig, flops: float) -> int:
    """The number of steps, at least 1, whose `flops_after` is nearest to `flops`."""
    for start, end, step_flops in _stages(config):
        steps = start + flops / step_flops
        if steps <= end:
            break
        flops -= (end - start) * step_flops
    return max(round(steps), 1)


def _stages(config: ExperimentConfig) -> list[tuple[int, float, float]]:
    """Of each stage: the steps before it and at its end, and the FLOPs of a step."""
    stages = config.data.schedule()
    ends = [*(stage.start for stage in stages[1:]), math.inf]
    return [
        (s.start, end, s.tokens * flops_per_token(config.model, s.sequence_length))
        for s, end in zip(stages, ends, strict=True)
    ]


def plan(study: Study, base: ExperimentConfig, assignments: list[str], seeds: int) -> list[Run]:
    """All runs, seed by seed. They draw no samples, unless `assignments` say so.

    Raises `ValueError` with one line for a point that the configuration cannot realise.
    """
    settings = ["train.sample_tokens=0", *study.base, *study.budgets.get(base.name, ())]
    base = override(override(base, settings), assignments)
    reference = _config(base, next(p for p in study.points if p.label == study.reference))
    runs = []
    for seed in range(seeds):
        for point in study.points:
            config = _equalised(_config(base, point), reference, study)
            seeded = [f"train.seed={base.train.seed + seed}", f"data.seed={base.data.seed + seed}"]
            name = f"{_slug(point.label)}-seed{seed}"
            config = dataclasses.replace(override(config, seeded), name=name)
            runs.append(Run(name, point.label, seed, config))
    names = [run.name for run in runs]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"study: labels give the same folder: {', '.join(sorted(twice))}")
    return runs


def _config(base: ExperimentConfig, point: Point) -> ExperimentConfig:
    try:
        return override(base, point.assignments)
    except ValueError as error:
        raise ValueError(f"point {point.label}: {error}") from error


def _equalised(
    config: ExperimentConfig, reference: ExperimentConfig, study: Study
) -> ExperimentConfig:
    match study.equal:
        case "tokens":
            return config
        case "flops":
            target = flops_after(reference, reference.train.steps)
            return override(config, [f"train.steps={_steps_for(config, target)}"])
    target = _size(reference, study)
    for path in _dials(config):  # the first one roughly, the next one what is left
        config = _turned(config, path, lambda c: _size(c, study), target)
    return config


def _dials(config: ExperimentConfig) -> list[str]:
    """Settings that change the size and nothing else, the coarser first."""
    model = config.model
    moe = [model.is_moe(layer) for layer in range(model.layers)]
    experts = ["model.moe.expert_width"] if any(moe) else []
    return experts + ([] if all(moe) else ["model.ffn.dense_width"])


def _size(config: ExperimentConfig, study: Study) -> int:
    counts = parameter_counts(config.model)
    return counts.active if study.equal == "active" else counts.total


def _turned(
    config: ExperimentConfig, path: str, size: Callable[[ExperimentConfig], int], target: int
) -> ExperimentConfig:
    """`config` with the width at `path` whose `size` is nearest to `target`.

    `size` grows with the width, so that halving finds it.
    """

    multiple = _MULTIPLE if config.model.d_model >= _NARROW else 1

    def at(n: int) -> ExperimentConfig:
        return override(config, [f"{path}={n * multiple}"])

    low, high = 1, 2
    while size(at(high)) < target:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if size(at(middle)) < target else (low, middle)
    return min(at(low), at(high), key=lambda c: abs(size(c) - target))


def _slug(label: str) -> str:
    return re.sub(r"[^A-Za-z0-9.]+", "-", label).strip("-").lower()
