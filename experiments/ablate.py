"""Run a study: every point of an axis with several seeds, ending in a table, plots and a verdict.

    python -m experiments.ablate --study=kda_mla_ratio --config=mini --workdir=runs/ratio
    python -m experiments.ablate --study=residual --config=nano --workdir=runs/residual \
        --seeds=3 --set train.steps=100

Studies are the files of `experiments/studies`; `--dry_run` prints the runs and their sizes. The
same command goes on where a study was stopped or killed, and skips what is finished. The folder
then holds `report.md`, `results.csv`, `loss.png` and `axis.png`, beside a folder for each run. With
`--devices=N` runs are spread over N local GPUs. Bad input ends in one line and exit code 2.

Runs that differ in seeds and peak learning rate alone are trained as one program, compiled once: as
many as have 256 MiB of parameters and optimiser state (15 of `nano`, one of `mini`), or as
`--together` says, and no more than keep all `--devices` busy; `--together=1` for none. Four runs of
a model of width 32 took 77 s to compile instead of 4 x 45 s, and 2.43 instead of 4 x 0.66 s of CPU
a step (two shared cores, 2026-11-30): on a CPU compilation is what is spared; a GPU is not measured
yet. `--only` makes some of the runs, on whatever machine; where every run's `result.json` and
`metrics.jsonl` are in place, the command writes the report from them alone.
"""

from __future__ import annotations

import sys
from pathlib import Path

from absl import flags

from configs import CONFIGS
from experiments.ablation.plan import Run, plan
from experiments.ablation.report import report
from experiments.ablation.runner import claim, groups, make, results, spread, unfinished
from experiments.options import cache_dir, corpora
from experiments.program import launch
from experiments.studies import NAMES, load
from k3jax.cost import parameter_counts
from k3jax.flags import define, registered

cache_dir()
STUDY = flags.DEFINE_string("study", None, f"One of: {', '.join(NAMES)}.")
SEEDS = flags.DEFINE_integer("seeds", 0, "Runs per point; 0: as many as the study says.")
DEVICES = flags.DEFINE_integer("devices", 1, "Local GPUs to spread the runs over.")
ONLY = flags.DEFINE_list("only", None, "Make just the runs of these names, and no report.")
TOGETHER = flags.DEFINE_integer("together", 0, "Most runs of one program; 0: as fit in 256 MiB.")


def run() -> int:
    name = STUDY.value
    if name not in NAMES:
        raise ValueError(f"--study = {name!r}: must be one of {', '.join(NAMES)}")
    for flag in (SEEDS, DEVICES, TOGETHER):
        least = flag.default
        if flag.value < least:
            raise ValueError(f"--{flag.name} = {flag.value}: must be at least {max(least, 1)}")
    study = load(name)
    seeds = SEEDS.value or study.seeds
    runs = plan(study, registered(CONFIGS), flags.FLAGS.set, seeds)
    if flags.FLAGS.dry_run:
        print("\n".join(_line(r) for r in runs))
        return 0
    if not flags.FLAGS.workdir:
        raise ValueError("--workdir: missing, must name the directory of the study")
    workdir = Path(flags.FLAGS.workdir)
    names = [r.name for r in runs]
    if ONLY.value == []:
        raise ValueError(f"--only: empty, must be of {', '.join(names)}")
    if unknown := [n for n in ONLY.value or [] if n not in names]:
        raise ValueError(f"--only = {','.join(unknown)!r}: must be of {', '.join(names)}")
    claim(workdir, name, study, runs)
    chosen = [r for r in runs if ONLY.value is None or r.name in ONLY.value]
    devices = DEVICES.value if ONLY.value is None else 1
    parts = unfinished(groups(chosen, TOGETHER.value, devices), workdir)
    if devices > 1:
        command = ["-m", "experiments.ablate", *sys.argv[1:]]
        if code := spread(parts, workdir, command, devices):
            return code
    elif parts:
        cache = corpora()
        for part in parts:
            if (signal := make(part, workdir, cache)) is not None:
                print(f"stopped by signal {signal} in {part[0].name}: the same command goes on")
                return 128 + signal
    if ONLY.value is None:
        print(report(name, study, runs, results(runs, workdir), workdir))
    return 0


def _line(run: Run) -> str:
    counts = parameter_counts(run.config.model)
    return (
        f"{run.name}: {counts.total:,} parameters, {counts.active:,} active, "
        f"{run.config.train.steps:,} steps, {run.flops / 1e15:.3g} PFLOPs"
    )


if __name__ == "__main__":
    define(CONFIGS)
    launch(run)
