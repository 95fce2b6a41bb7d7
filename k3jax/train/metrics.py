"""The record of a run: one JSON object a line, and TensorBoard where it is asked for."""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tensorboardX import SummaryWriter

from k3jax.train.workdir import write_whole

FILE = "metrics.jsonl"


class MetricsLog:
    """Writes `metrics.jsonl` in `workdir`, from `step` on; a context manager.

    A run that is resumed at `step` drops what was recorded beyond it, so no step is there twice.
    """

    def __init__(self, workdir: Path, step: int, tensorboard: bool):
        self._path = workdir / FILE
        kept = [record for record in read_metrics(workdir) if record["step"] <= step]
        with self._one_line_errors():
            write_whole(self._path, "".join(map(_line, kept)))
            self._file = self._path.open("a")
        self._board = None
        if tensorboard:
            self._board = SummaryWriter(str(workdir / "tensorboard"), purge_step=step + 1)

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        ignored = () if kind is None else (OSError,)  # what could not be written fails once more
        for file in (self._file, self._board):
            if file is not None:
                with contextlib.suppress(*ignored):
                    file.close()

    def write(self, step: int, metrics: dict[str, float]) -> None:
        """Record `metrics` under `step`; figures that are not finite are null.

        Raises `OSError` with one line where they cannot be written.
        """
        with self._one_line_errors():
            self._file.write(_line({"step": step, **metrics}))
            self._file.flush()
        if self._board is not None:
            for name, value in metrics.items():
                self._board.add_scalar(name, value, step)

    @contextlib.contextmanager
    def _one_line_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise OSError(f"{self._path}: cannot be written: {error.strerror}") from error


def read_metrics(workdir: Path) -> list[dict[str, Any]]:
    """The records in `workdir`, in order; a line cut short by a kill, or damaged, is left out."""
    path, records = workdir / FILE, []
    text = path.read_text("utf-8", errors="replace") if path.exists() else ""
    for line in text.splitlines():
        with contextlib.suppress(json.JSONDecodeError):
            record = json.loads(line)
            if isinstance(record, dict) and isinstance(record.get("step"), int):
                records.append(record)
    return records


class Stopwatch:
    """Steps per second since it was last started."""

    def __init__(self) -> None:
        self.start()

    def start(self, steps: int = 0) -> None:
        self._steps, self._began = steps, time.perf_counter()

    def rate(self, steps: int) -> float:
        """Steps per second from the start, at step count `steps`; starts anew."""
        elapsed, done = time.perf_counter() - self._began, steps - self._steps
        self.start(steps)
        return done / max(elapsed, 1e-9)


def _line(record: dict[str, Any]) -> str:
    finite = {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in record.items()
    }
    return json.dumps(finite) + "\n"
