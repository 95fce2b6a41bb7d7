"""Makes the runs of a study, skipping those that are finished.

A study's folder holds `study.json` (what it is, by which another study is refused) and `runs/NAME`,
one training run each, with a `result.json` in every finished one. A run that was killed goes on
from its checkpoint; what is finished is not touched again, so the report does not depend on
interruptions.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from typing import Any

from experiments.ablation.plan import Run
from experiments.ablation.study import Study
from k3jax.config import ExperimentConfig
from k3jax.cost import parameter_counts
from k3jax.flags import differences, from_json, to_json
from k3jax.train.loop import train
from k3jax.train.metrics import read_metrics
from k3jax.train.workdir import write_whole

RESULT = "result.json"
STUDY = "study.json"
# Where a run is computed, not what: a study goes on with other ones.
FREE = ("mesh.", "model.moe.transport:", "model.moe.buffer_factor:")

log = logging.getLogger("k3jax")


def claim(workdir: Path, name: str, study: Study, runs: Sequence[Run]) -> None:
    """Makes `workdir` the folder of this study, or checks that it is.

    Raises `ValueError` where it holds another study, or the same one with other settings. More
    seeds of the same settings are welcome, and so are other devices: `FREE` settings.
    """
    settings = {run.name: json.loads(to_json(run.config)) for run in runs}
    mine = {"study": name, "question": study.question, "runs": settings}
    path = workdir / STUDY
    if path.exists():
        try:
            saved = json.loads(path.read_text())
            there, runs_there = saved["study"], saved["runs"]
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise ValueError(f"{path}: damaged, {error}") from error
        if there != name:
            raise ValueError(f"--workdir = {workdir}: holds the study {there!r}, not {name!r}")
        for run in runs:
            if run.name not in runs_there:
                continue
            old = from_json(ExperimentConfig, json.dumps(runs_there[run.name]))
            changed = [line for line in differences(old, run.config) if not line.startswith(FREE)]
            if changed:
                raise ValueError(
                    f"--workdir = {workdir}: holds this study with other settings of {run.name}; "
                    f"{'; '.join(changed[:8])}"
                )
        mine["runs"] = runs_there | settings
        if mine == saved:
            return  # no write: processes that share the study would cross
    workdir.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(mine, indent=1) + "\n")


def make(run: Run, workdir: Path, cache: Path) -> int | None:
    """Trains `run`, or what is left of it, and records its result; the signal that stopped it."""
    folder = workdir / "runs" / run.name
    if (folder / RESULT).exists():
        return None
    log.info("run %s", run.name)
    outcome = train(run.config, folder, cache)
    if outcome.stopped_by is not None:
        return outcome.stopped_by
    write_whole(folder / RESULT, json.dumps(result(run, folder), indent=1) + "\n")
    return None


def result(run: Run, folder: Path) -> dict[str, Any]:
    """The figures of a finished run: its size and cost, and the last of everything it measured."""
    counts, last = parameter_counts(run.config.model), {}
    for record in read_metrics(folder):
        last |= {name: value for name, value in record.items() if "per_second" not in name}
    return {
        "label": run.label,
        "seed": run.seed,
        "parameters": counts.total,
        "active_parameters": counts.active,
        "flops": run.flops,
        **last,
    }


def spread(runs: Sequence[Run], workdir: Path, command: Sequence[str], devices: int) -> int:
    """Makes the runs in processes of their own, each on one of `devices` GPUs.

    `command` is this program's, which gets `--only=NAME` for each run. Returns the worst exit code,
    128 + signal for a process that one ended. Raises `ValueError` for more devices than
    `CUDA_VISIBLE_DEVICES`, where it is set, lists.
    """
    free: Queue[str] = Queue()
    for device in _visible(devices):
        free.put(device)

    def one(run: Run) -> int:
        if (workdir / "runs" / run.name / RESULT).exists():
            return 0
        device = free.get()
        try:
            visible = {"CUDA_VISIBLE_DEVICES": device}
            arguments = [sys.executable, *command, f"--only={run.name}"]
            code = subprocess.run(arguments, env=os.environ | visible, check=False).returncode
            return code if code >= 0 else 128 - code
        finally:
            free.put(device)

    with ThreadPoolExecutor(devices) as pool:
        return max(pool.map(one, runs), default=0)


def _visible(devices: int) -> list[str]:
    """The names of the first `devices` GPUs that this process may use."""
    allowed = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [str(i) for i in range(devices)] if allowed is None else allowed.split(",")
    if devices > len(names):
        raise ValueError(f"--devices = {devices}: CUDA_VISIBLE_DEVICES lists {len(names)}")
    return names[:devices]


def results(runs: Sequence[Run], workdir: Path) -> list[dict[str, Any]]:
    """The results that are there, in the order of `runs`."""
    paths = [workdir / "runs" / run.name / RESULT for run in runs]
    return [json.loads(path.read_text()) for path in paths if path.exists()]
