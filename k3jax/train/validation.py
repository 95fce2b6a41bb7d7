"""What a run is measured by on the way: held-out batches, together and by their pools."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

from k3jax.config import DataConfig, ExperimentConfig, MoEConfig
from k3jax.data.pipeline import pool_names
from k3jax.data.tasks import PREFIX
from k3jax.sharding import BATCH, SEQUENCE
from k3jax.train.hosts import placed
from k3jax.train.state import TrainState


def check_drops(moe: MoEConfig, dropped: float, where: str) -> None:
    """Raises `ValueError` where routes were dropped and may not be."""
    if dropped and not moe.allow_drops:
        raise ValueError(
            f"moe.buffer_factor = {moe.buffer_factor}: {where} has no room for "
            f"{dropped:.0f} routes to experts; must be larger, or 0 for any load, or let "
            "moe.allow_drops leave them out"
        )


def validation(
    config: ExperimentConfig,
    evaluate: Callable[..., Any],
    state: TrainState,
    pools: dict[str, list[dict[str, np.ndarray]]],
    share: tuple[int, int],
) -> dict[str, float]:
    """The figures of all held-out batches together and, where there are several, of each pool.

    A text has bits per byte, a task accuracy.
    """
    spec = PartitionSpec(BATCH, SEQUENCE)
    # All are asked for before the first is waited for.
    found = {
        name: [evaluate(state, placed(batch, spec, share)) for batch in batches]
        for name, batches in pools.items()
    }
    sums = {name: _summed(jax.device_get(parts)) for name, parts in found.items()}
    total = _summed([*sums.values()])
    check_drops(config.model.moe, total["dropped"], "validation")
    figures = {
        "validation_bits_per_byte": _ratio(total["bits"], total["bytes"]),
        "validation_accuracy": _ratio(total["correct"], total["targets"]),
    }
    for name, figure in validation_figures(config.data).items():
        if name in sums:
            top, bottom = ("bits", "bytes") if figure.endswith("byte") else ("correct", "targets")
            figures[figure] = _ratio(sums[name][top], sums[name][bottom])
    return figures


def validation_figures(data: DataConfig) -> dict[str, str]:
    """By pool: the figure that validation records of it; empty where one pool is all there is."""
    names = pool_names(data)
    if len(names) == 1:
        return {}
    kinds = ["accuracy" if s.startswith(PREFIX) else "bits_per_byte" for s in data.sources]
    pairs = zip(names, kinds, strict=True)
    return {name: f"validation_{name}_{kind}" for name, kind in pairs}


def _summed(parts: list[dict[str, Any]]) -> dict[str, float]:
    return {name: sum(float(part[name]) for part in parts) for name in parts[0]}


def _ratio(top: float, bottom: float) -> float:
    return top / bottom if bottom else math.nan
