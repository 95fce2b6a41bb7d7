"""Train a decoder.

    python -m experiments.train --config=nano --workdir=runs/nano --set train.steps=300

The same command resumes a run that was stopped or killed. `--dry_run` prints the settings, the
parameters and the cost of a token, and trains nothing. Bad input ends in one line and exit code 2.

On many hosts every process runs the same command, with one `--workdir` that all of them see:
`--distributed` under SLURM, GKE, Open MPI or on a TPU pod, else with `--coordinator=host:port
--processes=N --process=i`. `experiments/jobs/` has job scripts. The mesh must take all devices.
"""

from __future__ import annotations

import contextlib
import logging as python_logging
import os
import sys
import traceback
from pathlib import Path

import jax
from absl import app, flags, logging

from configs import CONFIGS
from k3jax.flags import define, resolve
from k3jax.train.describe import describe
from k3jax.train.hosts import join, leading
from k3jax.train.loop import train

CACHE = flags.DEFINE_string(
    "cache_dir", "~/.cache/k3jax", "Where tokenised corpora and compiled programs are kept."
)
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
    cache = Path(CACHE.value).expanduser()
    if jax.config.jax_compilation_cache_dir is None:
        jax.config.update("jax_compilation_cache_dir", str(cache / "compiled"))
    outcome = train(config, Path(flags.FLAGS.workdir), cache / "corpora")
    if outcome.stopped_by is None:
        return 0
    saved = f"step {outcome.step} is saved" if outcome.step else "before the first step"
    if leading():
        print(f"stopped by signal {outcome.stopped_by}: {saved}")
    return 128 + outcome.stopped_by


def main(arguments: list[str]) -> int:
    verbose = flags.FLAGS["verbosity"].present
    if not verbose:  # libraries log at length the errors that are one line here
        logging.set_verbosity(logging.FATAL)
        logging.get_absl_handler().setFormatter(python_logging.Formatter("%(message)s"))
    python_logging.getLogger("k3jax").setLevel(python_logging.INFO)
    try:
        if stray := arguments[1:]:
            raise ValueError(f"{' '.join(stray)}: not understood, each setting needs its own --set")
        return run()
    except BaseException as error:
        together = jax.distributed.is_initialized()
        lost = together and isinstance(error, jax.errors.JaxRuntimeError)
        expected = lost or isinstance(error, ValueError | OSError | MemoryError)
        if not together and (verbose or not expected):
            raise
        line = str(error).splitlines()[0] if lost else str(error)
        where = f"process {jax.process_index()}: stopped, " if lost else ""
        with contextlib.suppress(OSError):  # whoever read the output may be gone too
            if verbose or not expected:
                traceback.print_exc()
            print(f"error: {where}{line}", file=sys.stderr, flush=True)
        if together:  # leaving in good order would mean to wait for the others
            os._exit(2)
        return 2


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="replace")  # a sample may be any text, a terminal may be ASCII
    define(CONFIGS)
    app.run(main)
