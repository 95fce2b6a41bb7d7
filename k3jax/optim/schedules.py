"""Learning-rate schedules: linear warm-up, then cosine, or stable and decay (WSD)."""

from __future__ import annotations

from typing import Any

import jax
import optax

from k3jax.config import OptimiserConfig


def learning_rate(
    config: OptimiserConfig, steps: int, peak: jax.Array | None = None
) -> optax.Schedule:
    """The rate as a function of the number of updates made, for a run of `steps` updates.

    `peak` takes the place of `config.learning_rate` and may be traced.

    The warm-up rises linearly and never rests at zero: with `w` warm-up steps the first update uses
    peak / (w + 1) and update `w` the peak. The last update uses `final_fraction` of the peak.
    `cosine` falls from the end of the warm-up on (K3R §3); `wsd` stays at the peak and falls
    linearly over the last `decay_fraction` of the steps (KLR §5).
    """
    top: Any = config.learning_rate if peak is None else peak
    final = top * config.final_fraction
    last = steps - 1
    warmup = min(round(config.warmup_fraction * steps), last)
    rise = optax.linear_schedule(top / (warmup + 1), top, max(warmup, 1))
    if config.schedule == "cosine":
        fall = optax.cosine_decay_schedule(top, max(last - warmup, 1), config.final_fraction)
        return optax.join_schedules([rise, fall], [warmup])
    start = max(last - round(config.decay_fraction * steps), warmup)
    fall = optax.linear_schedule(top, final, max(last - start, 1))
    stable = optax.constant_schedule(top)
    return optax.join_schedules([rise, stable, fall], [warmup, start])
