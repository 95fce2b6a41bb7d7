"""Train a decoder.

    python -m experiments.train --config=nano --workdir=runs/nano --set train.steps=300

The same command resumes a run that was stopped or killed. `--dry_run` prints the settings, the
parameters and the cost of a token, and trains nothing. Bad input ends in one line and exit code 2.
"""

from __future__ import annotations

from pathlib import Path

from absl import flags

from configs import CONFIGS
from experiments.program import corpora, launch
from k3jax.flags import define, resolve
from k3jax.train.describe import describe
from k3jax.train.loop import train


def run() -> int:
    config = resolve(CONFIGS)
    if flags.FLAGS.dry_run:
        print(describe(config))
        return 0
    if not flags.FLAGS.workdir:
        raise ValueError("--workdir: missing, must name the directory of the run")
    outcome = train(config, Path(flags.FLAGS.workdir), corpora())
    if outcome.stopped_by is None:
        return 0
    place = f"step {outcome.step} is saved" if outcome.step else "before the first step"
    print(f"stopped by signal {outcome.stopped_by}: {place}")
    return 128 + outcome.stopped_by


if __name__ == "__main__":
    define(CONFIGS)
    launch(run)
