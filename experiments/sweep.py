"""A small language of sweeps: points of settings, combined by product, zip and chain.

    over("model.kda_to_full", ["3:1", "1:0"])             two points, labelled by their values
    case("plain", "model.residual.kind=plain")            one point with a label of its own
    product(a, b)    every point of a with every one of b, in order
    zipped(a, b)     the first of a with the first of b, and so on
    chain(a, b)      the points of a, then those of b

A sweep is a tuple of points, so all of this can be printed, compared and iterated over.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Sequence


@dataclasses.dataclass(frozen=True)
class Point:
    """One setting of the axis: what it is called, and its `path.to.leaf=value` assignments."""

    label: str
    assignments: tuple[str, ...]

    def __add__(self, other: Point) -> Point:
        return Point(f"{self.label}, {other.label}", self.assignments + other.assignments)


type Sweep = tuple[Point, ...]


def over(path: str, values: Sequence[object]) -> Sweep:
    """One point for each of `values` of the setting at `path`."""
    return tuple(Point(str(value), (f"{path}={value}",)) for value in values)


def case(label: str, *assignments: str) -> Sweep:
    """One point with a name of its own; without assignments it is the base configuration."""
    return (Point(label, assignments),)


def product(*sweeps: Sweep) -> Sweep:
    """Every combination, the last sweep running fastest."""
    return tuple(_sum(points) for points in itertools.product(*sweeps))


def zipped(*sweeps: Sweep) -> Sweep:
    """Points side by side. Raises `ValueError` where the sweeps differ in length."""
    return tuple(_sum(points) for points in zip(*sweeps, strict=True))


def chain(*sweeps: Sweep) -> Sweep:
    """One sweep after another. Raises `ValueError` where two points share a label."""
    points = tuple(itertools.chain(*sweeps))
    labels = [point.label for point in points]
    if twice := {label for label in labels if labels.count(label) > 1}:
        raise ValueError(f"sweep: two points are called {', '.join(sorted(twice))}")
    return points


def _sum(points: Iterable[Point]) -> Point:
    first, *rest = points
    return sum(rest, first)
