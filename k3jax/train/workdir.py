"""The directory of a run: whose it is."""

from __future__ import annotations

from pathlib import Path

from k3jax.config import ExperimentConfig
from k3jax.flags import differences, from_json, to_json

FILE = "config.json"
FIXED = ("name", "model.", "data.")  # settings that a run keeps for life; others may change


def claim(workdir: Path, config: ExperimentConfig) -> None:
    """Make `workdir` the directory of `config`, whose resolved settings go there, or resume it.

    A run may be resumed with other settings of training, optimiser and mesh. Raises `ValueError`
    for the directory of another run, naming how it differs.
    """
    workdir.mkdir(parents=True, exist_ok=True)
    path = workdir / FILE
    if path.exists():
        try:
            saved = from_json(ExperimentConfig, path.read_text())
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
        changed = [line for line in differences(saved, config) if line.startswith(FIXED)]
        if changed:
            raise ValueError(f"--workdir = {workdir}: holds another run; {'; '.join(changed[:8])}")
    part = path.with_suffix(".part")
    part.write_text(to_json(config))
    part.replace(path)
