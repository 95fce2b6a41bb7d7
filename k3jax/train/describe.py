"""What `--dry_run` prints: settings, the table of parameters, and what a token costs."""

from __future__ import annotations

import math

from flax import nnx

from k3jax.config import ExperimentConfig, OptimiserConfig
from k3jax.cost import flops_per_token, parameter_counts
from k3jax.flags import to_json
from k3jax.model import Decoder
from k3jax.optim import rule_of
from k3jax.params import BalancingState, ParamSpec, specs


def describe(config: ExperimentConfig) -> str:
    """The resolved configuration as JSON, one line per parameter, totals and FLOPs per token.

    Nothing is allocated.
    """
    model = Decoder(config.model, rngs=None)
    _, *states = nnx.split(model, nnx.Param, BalancingState)
    params, balancing = states
    ruled = [
        *((path, spec, _rule(spec, config.optimiser)) for path, spec in specs(params)),
        *((path, spec, "balancing") for path, spec in specs(balancing)),
    ]
    rows = [("parameter", "shape", "axes", "rule", "decay", "bytes")]
    size = 0
    for path, spec, rule in ruled:
        nbytes = math.prod(spec.shape) * spec.dtype.itemsize
        axes = ", ".join(axis or "-" for axis in spec.axes)
        shape = " x ".join(map(str, spec.shape))
        rows.append((path, shape, axes, rule, "yes" if spec.decay else "no", f"{nbytes:,}"))
        size += nbytes
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    table = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    counts = parameter_counts(config.model)
    return "\n".join(
        [
            to_json(config),
            *table,
            "",
            f"parameters: {counts.total:,} in total, {counts.active:,} active, {size:,} bytes",
            *_stages(config),
        ]
    )


def _stages(config: ExperimentConfig) -> list[str]:
    """Rows, tokens and FLOPs of each stage, and the tokens of all steps together."""
    stages, steps = config.data.schedule(), config.train.steps
    ends = [*(min(stage.start, steps) for stage in stages[1:]), steps]
    return [
        *(
            f"steps {stage.start + 1} to {end}: {stage.batch_size:,} rows of "
            f"{stage.sequence_length:,} tokens, {stage.tokens:,} tokens a step; "
            f"{flops_per_token(config.model, stage.sequence_length):,.0f} FLOPs per token, "
            "forward and backward"
            if stage.start < end
            else f"after step {stage.start}: not reached"
            for stage, end in zip(stages, ends, strict=True)
        ),
        f"{steps:,} steps, {config.data.tokens_after(steps):,} tokens",
    ]


def _rule(spec: ParamSpec, config: OptimiserConfig) -> str:
    """The optimiser's rule, and under Muon the matrices that it takes."""
    rule = rule_of(spec, config)
    if rule == "adamw":
        return rule
    rows, columns = spec.shape[-2:]
    if config.muon_per_head and spec.heads > 1:
        return f"{rule} per head, {rows} x {columns // spec.heads}"
    return f"{rule}, {rows} x {columns}"
