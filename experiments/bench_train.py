"""Whole training runs on several meshes: the curve of one device, and how much faster.

    python -m experiments.bench_train --config=k3_1b --workdir=runs/meshes \
        --meshes=expert=2 --meshes=fsdp=2 --meshes=context=2 \
        --set data.tokenizer=bytes --set data.sources=installed --set train.steps=50

`experiments.train` runs the configuration on a single device and then on each mesh, with the same
batches, in directories of its own under `--workdir`; what is finished there is not run again.
`--dry_run` prints their names. A line of the table has

  devices     of the mesh
  loss        after the last step, nats per token
  apart       largest difference of a step's loss from that of the single device, relative
  tokens/s    of all devices, median of the records after the first; and of one device
  efficiency  tokens/s of one device over those of the single device

The batch stays the same, so this is strong scaling: each device has less to do. Bad input ends in
one line and exit code 2.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from pathlib import Path
from typing import Any

import numpy as np
from absl import flags

from configs import CONFIGS
from experiments.options import cache_dir, corpora, json_file, write_json
from experiments.program import launch
from k3jax.config import ExperimentConfig, MeshConfig
from k3jax.flags import define, override, resolve
from k3jax.sharding import AXES, make_mesh
from k3jax.train.loop import train
from k3jax.train.metrics import read_metrics

SINGLE = "single"

cache_dir()
json_file()
MESHES = flags.DEFINE_multi_string("meshes", [], "Axes of one mesh: data=2,expert=2; may repeat.")


def measure(config: ExperimentConfig, workdir: Path, cache: Path) -> dict[str, Any] | int:
    """Trains `config` in `workdir`; its losses and tokens/s, or the signal that stopped it."""
    if (signal := train(config, workdir, cache).stopped_by) is not None:
        return signal
    records = [record for record in read_metrics(workdir) if "loss" in record]
    # The first record of a process says nothing of its speed: it has none, or few steps.
    speeds = [r["tokens_per_second"] for r in records if "tokens_per_second" in r]
    return {
        "devices": math.prod(getattr(config.mesh, axis) for axis in AXES),
        "losses": {r["step"]: r["loss"] for r in records},
        "tokens_per_second": statistics.median(speeds[1:] or speeds or [math.nan]),
    }


def compare(found: dict[str, dict[str, Any]]) -> str:
    """Adds to every row of `found` what the single device says of it; the table.

    Steps that only one of two runs has on record are not compared; a loss that is not finite makes
    `apart` NaN.
    """
    single = found[SINGLE]
    lines = ["mesh              devices      loss     apart    tokens/s  of a device  efficiency"]
    for name, row in found.items():
        both = row["losses"].keys() & single["losses"].keys()
        loss, alone = (np.array([of["losses"][i] for i in both], float) for of in (row, single))
        apart = np.abs(loss / alone - 1)  # NaN where a loss was not finite
        row["apart"] = float(apart.max()) if both else math.nan
        last = np.array([*row["losses"].values()], float)[-1]
        speed = row["tokens_per_second"] / row["devices"]
        row["efficiency"] = speed / single["tokens_per_second"]
        lines.append(
            f"{name:<16}{row['devices']:>9}{last:>10.4f}{row['apart']:>10.1e}"
            f"{row['tokens_per_second']:>12,.0f}{speed:>13,.0f}{row['efficiency']:>12.0%}"
        )
    return "\n".join(lines)


def run() -> int:
    config = resolve(CONFIGS)
    if not flags.FLAGS.workdir:
        raise ValueError("--workdir: missing, must name the directory of the runs")
    single = dataclasses.replace(config, mesh=MeshConfig())
    runs = {SINGLE: single}
    for name in MESHES.value:
        runs[name] = override(single, [f"mesh.{size}" for size in name.split(",")])
    for on_mesh in runs.values():
        make_mesh(on_mesh.mesh)  # what has too few devices is refused before anything runs
    if flags.FLAGS.dry_run:
        print("\n".join(runs))
        return 0
    found = {}
    for name, on_mesh in runs.items():
        row = measure(on_mesh, Path(flags.FLAGS.workdir) / name, corpora())
        if isinstance(row, int):
            print(f"stopped by signal {row} in {name}: the same command goes on")
            return 128 + row
        found[name] = row
    print(compare(found))
    write_json(found)
    return 0


if __name__ == "__main__":
    define(CONFIGS)
    launch(run)
