"""What `--dry_run` prints: settings, the table of parameters, and what tokens and devices bear."""

from __future__ import annotations

import math

import jax
from jax.sharding import NamedSharding

from k3jax.config import ExperimentConfig, OptimiserConfig
from k3jax.cost import flops_per_token, parameter_counts
from k3jax.flags import to_json
from k3jax.optim import rule_of
from k3jax.params import ParamSpec, specs
from k3jax.sharding import Rules, abstract_mesh
from k3jax.train.loop import decoder_blueprint
from k3jax.train.state import bytes_per_device


def describe(config: ExperimentConfig) -> str:
    """The resolved configuration as JSON, one line per parameter, totals and FLOPs per token.

    Nothing is allocated, and the mesh needs no devices. Raises `ValueError` where it does not
    divide the model.
    """
    mesh = abstract_mesh(config.mesh)
    with jax.sharding.use_abstract_mesh(mesh):
        plan = decoder_blueprint(config)
        state = plan.abstract()
    ruled = [
        *((path, spec, _rule(spec, config.optimiser)) for path, spec in specs(plan.params)),
        *((path, spec, "balancing") for path, spec in specs(plan.balancing)),
    ]
    rows = [("parameter", "shape", "axes", "rule", "decay", "bytes", "split", "bytes per device")]
    size = 0
    for path, spec, rule in ruled:
        nbytes = math.prod(spec.shape) * spec.dtype.itemsize
        axes = ", ".join(axis or "-" for axis in spec.axes)
        layout = NamedSharding(mesh, Rules().spec(spec.axes))
        split = ", ".join(axis if mesh.shape.get(axis, 1) > 1 else "-" for axis in layout.spec)
        own = math.prod(layout.shard_shape(spec.shape)) * spec.dtype.itemsize
        figures = f"{nbytes:,}", split, f"{own:,}"
        decay = "yes" if spec.decay else "no"
        rows.append((path, " x ".join(map(str, spec.shape)), axes, rule, decay, *figures))
        size += nbytes
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    table = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    counts = parameter_counts(config.model)
    learned = bytes_per_device((state.params, state.balancing))
    devices = math.prod(mesh.shape.values())
    return "\n".join(
        [
            to_json(config),
            *table,
            "",
            f"parameters: {counts.total:,} in total, {counts.active:,} active, {size:,} bytes",
            f"bytes per device, of {devices}: {learned:,} of parameters, "
            f"{bytes_per_device(state.opt_state):,} of optimiser state",
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
