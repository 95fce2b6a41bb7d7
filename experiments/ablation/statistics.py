"""What a few runs per point can and cannot say.

Runs that share a seed share their first values and their data, so that two points are compared by
the differences within a seed: the spread from seed to seed, which is common to both, drops out.
Intervals are Student's t at 95 %; with one seed there is none, and nothing is claimed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from scipy import stats

from experiments.ablation.study import Metric

CONFIDENCE = 0.95


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A mean of `count` values and the half width of its interval, infinite for one value."""

    mean: float
    half: float
    count: int

    @property
    def decided(self) -> bool:
        """Whether the interval leaves out zero."""
        return abs(self.mean) > self.half

    def __str__(self) -> str:
        if np.isinf(self.half):
            return f"{self.mean:.4f} (one seed)"
        return f"{self.mean:.4f} ± {self.half:.4f}"


def estimate(values: Sequence[float]) -> Estimate:
    """The mean of `values` and its interval."""
    array = np.asarray(values, float)
    if len(array) < 2:
        return Estimate(float(array.mean()), float("inf"), len(array))
    spread = array.std(ddof=1) / np.sqrt(len(array))
    quantile = stats.t.ppf((1 + CONFIDENCE) / 2, len(array) - 1)
    return Estimate(float(array.mean()), float(quantile * spread), len(array))


def paired(values: dict[int, float], reference: dict[int, float]) -> Estimate | None:
    """The mean difference `values - reference` over the seeds of both; None where there is none."""
    seeds = sorted(values.keys() & reference.keys())
    if not seeds:
        return None
    return estimate([values[seed] - reference[seed] for seed in seeds])


def verdict(figures: dict[str, dict[int, float]], reference: str, metric: Metric) -> str:
    """What `figures` (by label, then seed) support about each point against the reference."""
    names = [label for label in figures if label != reference]
    differences = {label: paired(figures[label], figures[reference]) for label in names}
    groups: dict[str, list[str]] = {"lower": [], "higher": [], "": []}
    for label, difference in differences.items():
        if difference is None or not difference.decided:
            groups[""].append(label)
        else:
            groups["lower" if difference.mean < 0 else "higher"].append(
                f"{label} ({difference.mean:+.4f} ± {difference.half:.4f})"
            )
    worse = "higher" if metric.better == "lower" else "lower"
    parts = [
        f"{effect} than {reference}: {', '.join(groups[direction]) or 'none'}"
        for effect, direction in (("better", metric.better), ("worse", worse))
    ]
    parts.append(f"not told apart from it: {', '.join(groups['']) or 'none'}")
    seeds = len(figures[reference])
    return (
        f"By {metric.name} over {seeds} seed{'s' * (seeds != 1)}, {'; '.join(parts)}. "
        f"Each interval is of 95 % by itself; {len(names)} comparisons were made."
    )
