"""Train a decoder.

    python -m experiments.train --config=nano --workdir=runs/nano --set train.steps=300

The same command resumes a run that was stopped or killed. `--dry_run` prints the settings, the
parameters and the cost of a token, and trains nothing. Bad input ends in one line and exit code 2.

On many hosts every process runs the same command, with one `--workdir` that all of them see:
`--distributed` under SLURM, GKE, Open MPI or on a TPU pod, else with `--coordinator=host:port
--processes=N --process=i`. `experiments/jobs/` has job scripts. The mesh must take all devices.
"""

from __future__ import annotations

from pathlib import Path

from absl import flags

from configs import CONFIGS
from experiments.options import cache_dir, corpora
from experiments.program import launch
from k3jax.flags import define, resolve
from k3jax.train.describe import describe
from k3jax.train.hosts import join, leading
from k3jax.train.loop import train

cache_dir()
DISTRIBUTED = flags.DEFINE_bool("distributed", False, "Join the other processes of this job.")
COORDINATOR = flags.DEFINE_string("coordinator", None, "host:port of the first process.")
PROCESSES = flags.DEFINE_integer("processes", None, "How many processes there are.")
PROCESS = flags.DEFINE_integer("process", None, "The number of this one, from 0.")


def run() -> int:
    config = resolve(CONFIGS)
    place = (COORDINATOR.value, PROCESSES.value, PROCESS.value)
    if not flags.FLAGS.dry_run and (DISTRIBUTED.value or place != (None,) * 3):
        join(*place)
    if flags.FLAGS.dry_run:
        print(describe(config))
        return 0
    if not flags.FLAGS.workdir:
        raise ValueError("--workdir: missing, must name the directory of the run")
    outcome = train(config, Path(flags.FLAGS.workdir), corpora())
    if outcome.stopped_by is None:
        return 0
    saved = f"step {outcome.step} is saved" if outcome.step else "before the first step"
    if leading():
        print(f"stopped by signal {outcome.stopped_by}: {saved}")
    return 128 + outcome.stopped_by


if __name__ == "__main__":
    define(CONFIGS)
    launch(run)
