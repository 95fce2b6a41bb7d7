"""The directory of a run: whose it is, and that one process at a time works there."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from k3jax.config import ExperimentConfig
from k3jax.flags import differences, from_json, to_json
from k3jax.train.hosts import leading

FILE = "config.json"
FIXED = ("name", "model.", "data.")  # settings that a run keeps for life; others may change
# How experts are reached, and what is done about a buffer that is full: a run goes on after that.
FREE = tuple(f"model.moe.{name}:" for name in ("transport", "buffer_factor", "allow_drops"))


@contextlib.contextmanager
def occupy(workdir: Path, config: ExperimentConfig) -> Iterator[None]:
    """Hold `workdir`, made where it is missing, against other runs, for one of `config`.

    A run may be resumed with other settings of training, optimiser and mesh. Raises `ValueError`
    for the directory of another run, naming how it differs, and `OSError` for one that cannot be
    used. The lock goes with the process, however it ends.
    """
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        handle = os.open(workdir, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise _unusable(workdir, error) from error
    try:
        if leading():
            _lock(workdir, handle)
        _refuse_other_run(workdir, config)
        yield
    finally:
        os.close(handle)


def record_config(workdir: Path, config: ExperimentConfig) -> None:
    """Write the resolved settings to `workdir`: from here on it is the directory of this run."""
    try:
        write_whole(workdir / FILE, to_json(config))
    except OSError as error:
        raise _unusable(workdir, error) from error


def saved_config(workdir: Path) -> ExperimentConfig | None:
    """The settings of the run in `workdir`; None where there is none.

    Raises `ValueError` with one line for a file that holds no settings.
    """
    path = workdir / FILE
    if not path.exists():
        return None
    try:
        return from_json(ExperimentConfig, path.read_text())
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def write_whole(path: Path, content: str | bytes) -> None:
    """Put `content` in `path`, all of it or nothing."""
    part = path.with_suffix(".part")
    part.write_bytes(content.encode() if isinstance(content, str) else content)
    part.replace(path)


def changed_for_life(old: ExperimentConfig, new: ExperimentConfig) -> list[str]:
    """The settings that make `new` another run than `old`, as `differences` writes them."""
    changed = [line for line in differences(old, new) if line.startswith(FIXED)]
    return [line for line in changed if not line.startswith(FREE)]


def _lock(workdir: Path, handle: int) -> None:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise ValueError(f"--workdir = {workdir}: another process is training there") from error
    except OSError:
        pass  # a file system without locks


def _refuse_other_run(workdir: Path, config: ExperimentConfig) -> None:
    saved = saved_config(workdir)
    if saved is not None and (changed := changed_for_life(saved, config)):
        raise ValueError(f"--workdir = {workdir}: holds another run; {'; '.join(changed[:8])}")


def _unusable(workdir: Path, error: OSError) -> OSError:
    return OSError(f"--workdir = {workdir}: cannot be used: {error.strerror}")
