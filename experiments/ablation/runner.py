"""Makes the runs of a study, skipping those that are finished.

A study's folder holds `study.json` (what it is, by which another study is refused) and `runs/NAME`,
one training run each, with a `result.json` in every finished one. A run that was killed goes on
from its checkpoint; what is finished is not touched again, so the report does not depend on
interruptions. Runs that differ in seeds and peak rate alone are trained together, as one program;
they get their results when all of them are at their last checkpoint.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import math
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from queue import Queue
from typing import Any

from experiments.ablation.plan import Run
from experiments.ablation.study import Study
from k3jax.config import ExperimentConfig
from k3jax.cost import parameter_counts
from k3jax.flags import differences, from_json, to_json
from k3jax.train.loop import alike, train_together
from k3jax.train.metrics import read_metrics
from k3jax.train.signals import StopSignal
from k3jax.train.workdir import saved_config, write_whole

RESULT = "result.json"
STUDY = "study.json"
# Where a run is computed, not what: a study goes on with other ones.
FREE = ("mesh.", "model.moe.transport:", "model.moe.buffer_factor:")
STATE = 12  # bytes of a parameter and its optimiser's state, in float32
TOGETHER = 256 << 20  # bytes of training state that are one program, unless --together says more
_PATIENCE = 0.2  # seconds between looks for a signal

log = logging.getLogger("k3jax")


def claim(workdir: Path, name: str, study: Study, runs: Sequence[Run]) -> None:
    """Makes `workdir` the folder of this study, or checks that it is.

    Raises `ValueError` where it holds another study, or the same one with other settings. More
    seeds of the same settings are welcome, and so are other devices: `FREE` settings.
    """
    settings = {run.name: json.loads(to_json(run.config)) for run in runs}
    mine = {"study": name, "question": study.question, "runs": settings}
    path = workdir / STUDY
    with _usable(workdir):
        text = path.read_text() if path.exists() else None
    if text is not None:
        try:
            saved = json.loads(text)
            there, runs_there = saved["study"], saved["runs"]
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise ValueError(f"{path}: damaged, {error}") from error
        if there != name:
            raise ValueError(f"--workdir = {workdir}: holds the study {there!r}, not {name!r}")
        for run in runs:
            if run.name in runs_there:
                try:
                    old = from_json(ExperimentConfig, json.dumps(runs_there[run.name]))
                except ValueError as error:
                    raise ValueError(f"{path}: {run.name}: {error}") from error
                _refuse_other_settings(workdir, run, old)
        mine["runs"] = runs_there | settings
        if mine == saved:
            return  # no write: processes that share the study would cross
    with _usable(workdir):
        workdir.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(mine, indent=1) + "\n")


@contextlib.contextmanager
def _usable(workdir: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OSError(f"--workdir = {workdir}: cannot be used: {error.strerror}") from error


def _refuse_other_settings(workdir: Path, run: Run, old: ExperimentConfig) -> None:
    changed = [line for line in differences(old, run.config) if not line.startswith(FREE)]
    if changed:
        raise ValueError(
            f"--workdir = {workdir}: holds this study with other settings of {run.name}; "
            f"{'; '.join(changed[:8])}"
        )


def groups(runs: Sequence[Run], most: int, devices: int = 1) -> list[list[Run]]:
    """The runs in groups that are trained as one program each, in the order of their first runs.

    Runs that differ in seeds and peak rate alone belong together if they have one device: at most
    `most` of them, or, where that is 0, as many as have `TOGETHER` bytes of training state; and no
    more than one of `devices` has to make, so that none of them is idle.
    """
    share = math.ceil(len(runs) / devices)
    found: dict[ExperimentConfig, list[list[Run]]] = {}
    order: list[list[Run]] = []
    for run in runs:
        parts = found.setdefault(alike(run.config), [])
        if not parts or len(parts[-1]) >= min(_room(run.config, most), share):
            parts.append([])
            order.append(parts[-1])
        parts[-1].append(run)
    return order


def _room(config: ExperimentConfig, most: int) -> int:
    """How many runs of `config` may be one program."""
    if set(dataclasses.astuple(config.mesh)) != {1}:
        return 1
    return most or max(TOGETHER // (STATE * parameter_counts(config.model).total), 1)


def unfinished(groups: Sequence[Sequence[Run]], workdir: Path) -> list[list[Run]]:
    """The groups without the runs that have a result, and without those that have them all.

    Runs of a group get theirs together, so that one that was interrupted is the same group again.
    """
    left = [
        [run for run in group if not (run.folder(workdir) / RESULT).exists()] for group in groups
    ]
    return [group for group in left if group]


def make(group: Sequence[Run], workdir: Path, cache: Path) -> int | None:
    """Trains the runs of `group`, or what is left of them, as one program.

    Records their results; returns the signal that stopped them.
    """
    folders = [run.folder(workdir) for run in group]
    log.info("run %s", ", ".join(run.name for run in group))
    outcomes = train_together([run.config for run in group], folders, cache)
    if outcomes[0].stopped_by is not None:
        return outcomes[0].stopped_by
    for run, folder in zip(group, folders, strict=True):  # all are at their last checkpoint
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


def spread(
    groups: Sequence[Sequence[Run]], workdir: Path, command: Sequence[str], devices: int
) -> int:
    """Makes the groups in processes of their own, each on one of `devices` GPUs.

    `command` is this program's, which gets `--only=NAMES` for each group. A signal that asks this
    process to stop is passed on, and no further process begins. Returns the worst exit code,
    128 + signal for a process that one ended, or for this one. Raises `ValueError` for more devices
    than `CUDA_VISIBLE_DEVICES`, where it is set, lists.
    """
    free: Queue[str] = Queue()
    for device in _visible(devices):
        free.put(device)
    children: set[subprocess.Popen] = set()
    lock = threading.Lock()

    def one(group: Sequence[Run]) -> int:
        device = free.get()
        try:
            only = f"--only={','.join(run.name for run in group)}"
            visible = {"CUDA_VISIBLE_DEVICES": device}
            with lock:  # a signal comes before this child or finds it in `children`
                if stop.received is not None:
                    return 128 + stop.received
                child = subprocess.Popen([sys.executable, *command, only], env=os.environ | visible)
                children.add(child)
            code = child.wait()
            return code if code >= 0 else 128 - code
        finally:
            free.put(device)

    with StopSignal() as stop, ThreadPoolExecutor(devices) as pool:
        waiting = [pool.submit(one, group) for group in groups]
        passed = None
        while not all(future.done() for future in waiting):
            wait(waiting, timeout=_PATIENCE)
            if stop.received != passed:
                passed = stop.received
                with lock:
                    for child in children:  # SIGTERM, as they may have had the same SIGINT
                        child.terminate()  # does nothing to one that has ended
        codes = [future.result() for future in waiting]
    return max(codes, default=0) if passed is None else 128 + passed


def _visible(devices: int) -> list[str]:
    """The names of the first `devices` GPUs that this process may use."""
    allowed = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [str(i) for i in range(devices)] if allowed is None else allowed.split(",")
    if devices > len(names):
        raise ValueError(f"--devices = {devices}: CUDA_VISIBLE_DEVICES lists {len(names)}")
    return names[:devices]


def results(runs: Sequence[Run], workdir: Path) -> list[dict[str, Any]]:
    """The results that are there, in the order of `runs`.

    Nothing else of a run is needed than its `result.json`. Raises `ValueError` where one is damaged
    or of another run, and where the `config.json` beside it is.
    """
    found = []
    for run in runs:
        folder = run.folder(workdir)
        if (folder / RESULT).exists():
            if (old := saved_config(folder)) is not None:
                _refuse_other_settings(workdir, run, old)
            found.append(_read(run, folder / RESULT))
    return found


def _read(run: Run, path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
        label, seed = found["label"], found["seed"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: damaged, {error}; without it the run is made anew") from error
    if (label, seed) != (run.label, run.seed):
        raise ValueError(f"{path}: is of {label!r} with seed {seed}, not of {run.name}")
    return found
