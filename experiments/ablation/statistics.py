"""What a few runs per point can and cannot say.

Runs that share a seed share their first values and their data, so that two points are compared by
the differences within a seed: the spread from seed to seed, which is common to both, drops out.
What is left after the means of points and of seeds, a randomised block design's residual, is taken
to spread alike at all points, so that each comparison is judged by the runs of all of them; of two
points alone that is the paired t-test. Intervals are Student's t at 95 %; with one seed there is
none, and nothing is claimed.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from scipy import stats

from experiments.ablation.study import Metric

type Figures = dict[str, dict[int, float]]  # by label, then seed

CONFIDENCE = 0.95


@dataclasses.dataclass(frozen=True)
class Difference:
    """The mean difference of two points and the half width of its interval, infinite for none."""

    mean: float
    half: float

    @property
    def decided(self) -> bool:
        """Whether the interval leaves out zero."""
        return abs(self.mean) > self.half

    def __str__(self) -> str:
        if np.isinf(self.half):
            return f"{self.mean:+.4f} (no interval)"
        return f"{self.mean:+.4f} ± {self.half:.4f}"


@dataclasses.dataclass(frozen=True)
class Residual:
    """The standard deviation of a run around its point's and its seed's means, and its freedom."""

    deviation: float
    freedom: int

    def half(self, variance: float) -> float:
        """Half the width of the interval of what has `variance` times that of a run."""
        if not self.freedom:
            return float("inf")
        quantile = stats.t.ppf((1 + CONFIDENCE) / 2, self.freedom)
        return float(quantile * self.deviation * np.sqrt(variance))


def residual(figures: Figures) -> Residual:
    """That of `figures`, by least squares; of too few of them its freedom is 0."""
    cells = [(label, seed) for label, values in figures.items() for seed in values]
    marks = [*figures, *sorted({seed for _, seed in cells})]
    design = np.array([[mark in cell for mark in marks] for cell in cells], float)
    values = np.array([figures[label][seed] for label, seed in cells])
    freedom = len(cells) - int(np.linalg.matrix_rank(design)) if cells else 0
    if freedom < 1:
        return Residual(float("inf"), 0)
    left = values - design @ np.linalg.lstsq(design, values)[0]
    return Residual(float(np.linalg.norm(left) / np.sqrt(freedom)), freedom)


def paired(
    values: dict[int, float], reference: dict[int, float], spread: Residual
) -> Difference | None:
    """The mean difference `values - reference` over the seeds of both; None where there is none.

    Its interval is by `spread`, the residual of all points.
    """
    seeds = sorted(values.keys() & reference.keys())
    if not seeds:
        return None
    mean = float(np.mean([values[seed] - reference[seed] for seed in seeds]))
    return Difference(mean, spread.half(2 / len(seeds)))


def verdict(figures: Figures, reference: str, metric: Metric) -> str:
    """What `figures` (by label, then seed) support about each point against the reference."""
    names = [label for label in figures if label != reference]
    spread = residual(figures)
    differences = {label: paired(figures[label], figures[reference], spread) for label in names}
    groups: dict[str, list[str]] = {"lower": [], "higher": [], "": []}
    for label, difference in differences.items():
        if difference is None or not difference.decided:
            groups[""].append(label)
        else:
            groups["lower" if difference.mean < 0 else "higher"].append(f"{label} ({difference})")
    worse = "higher" if metric.better == "lower" else "lower"
    parts = [
        f"{effect} than {reference}: {', '.join(groups[direction]) or 'none'}"
        for effect, direction in (("better", metric.better), ("worse", worse))
    ]
    parts.append(f"not told apart from it: {', '.join(groups['']) or 'none'}")
    seeds = len(figures[reference])
    said = f"By {metric.name} over {seeds} seed{'s' * (seeds != 1)}, {'; '.join(parts)}. "
    if not spread.freedom:
        return said + "Too few runs for intervals."
    return said + (
        f"Intervals are of 95 % each, by the spread that points and seeds leave "
        f"({spread.deviation:.4f}, {spread.freedom} degrees of freedom); "
        f"{len(names)} comparison{'s were' if len(names) != 1 else ' was'} made."
    )
