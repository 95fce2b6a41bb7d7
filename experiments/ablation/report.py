"""A study's `report.md`, `results.csv` and plots, from the results of its runs.

Nothing in them depends on when or how often the study was interrupted: times are left out.
"""

from __future__ import annotations

import csv
import io
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from experiments.ablation.plan import Run, flops_after
from experiments.ablation.statistics import estimate, paired, verdict
from experiments.ablation.study import Study
from k3jax.flags import differences
from k3jax.train.metrics import read_metrics
from k3jax.train.workdir import write_whole

EQUAL = {
    "tokens": "tokens (every run sees as many, and those of one seed the same)",
    "parameters": "total parameters (by the width of the feed-forward layers), and tokens",
    "active": "active parameters (by the width of the feed-forward layers), and tokens",
    "flops": "training FLOPs (by the number of steps)",
}


def report(
    name: str, study: Study, runs: Sequence[Run], found: list[dict[str, Any]], workdir: Path
) -> str:
    """Writes everything to `workdir`; returns the text of `report.md`."""
    _csv(found, workdir / "results.csv")
    _curves(study, runs, workdir)
    figures = by_label(study, found)
    _against_axis(study, figures, workdir / "axis.png")
    text = _text(name, study, runs, found, figures)
    write_whole(workdir / "report.md", text)
    return text


def by_label(study: Study, found: list[dict[str, Any]]) -> dict[str, dict[int, float]]:
    """The deciding metric, by label in the order of the sweep and by seed."""
    figures: dict[str, dict[int, float]] = {point.label: {} for point in study.points}
    for record in found:
        value = record.get(study.metric.name)
        if value is not None:
            figures[record["label"]][record["seed"]] = value
    return {label: by_seed for label, by_seed in figures.items() if by_seed}


def _text(
    name: str,
    study: Study,
    runs: Sequence[Run],
    found: list[dict[str, Any]],
    figures: dict[str, dict[int, float]],
) -> str:
    first = runs[0].config
    data = first.data
    stages = f", then {', '.join(data.stages)} (steps:lengthxrows)" if data.stages else ""
    lines = [
        f"# {name}",
        "",
        study.question,
        "",
        f"Held equal: {EQUAL[study.equal]}. {len(found)} of {len(runs)} runs are finished: "
        f"{len(study.points)} points, {len({run.seed for run in runs})} seeds; rows of "
        f"{data.sequence_length} tokens, {data.batch_size} a step{stages}.",
        "",
    ]
    if study.reference in figures:
        lines += [verdict(figures, study.reference, study.metric), ""]
    else:
        lines += [f"No run of {study.reference}, the reference, is finished: no verdict yet.", ""]
    without = [record for record in found if record.get(study.metric.name) is None]
    if without:
        names = ", ".join(f"{record['label']} (seed {record['seed']})" for record in without)
        lines += [f"Left out, as {study.metric.name} is not finite or not there: {names}.", ""]
    lines += _table(study, runs, found, figures)
    lines += ["", "![loss](loss.png)", "", "![axis](axis.png)", ""]
    lines += ["Settings in which the points differ from the reference:", ""]
    reference = next(run for run in runs if run.label == study.reference)
    for run in runs:
        if run.seed == reference.seed and run is not reference:
            changed = [d for d in differences(reference.config, run.config) if "name:" not in d]
            lines.append(f"- {run.label}: {'; '.join(changed) or 'nothing'}")
    return "\n".join(lines) + "\n"


def _table(
    study: Study,
    runs: Sequence[Run],
    found: list[dict[str, Any]],
    figures: dict[str, dict[int, float]],
) -> list[str]:
    head = [study.axis, "parameters", "active", "steps", "PFLOPs", "seeds", study.metric.name]
    rows = [[*head, f"minus {study.reference}, paired"]]
    for label, by_seed in figures.items():
        run = next(run for run in runs if run.label == label)
        record = next(record for record in found if record["label"] == label)
        difference = paired(by_seed, figures.get(study.reference, {}))
        rows.append(
            [
                label,
                f"{record['parameters']:,}",
                f"{record['active_parameters']:,}",
                f"{run.config.train.steps:,}",
                f"{record['flops'] / 1e15:.3g}",
                str(len(by_seed)),
                str(estimate(list(by_seed.values()))),
                "-" if label == study.reference or difference is None else str(difference),
            ]
        )
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return [lines[0], "|" + "---|" * len(rows[0]), *lines[1:]]


def _csv(found: list[dict[str, Any]], path: Path) -> None:
    columns = list(dict.fromkeys(column for record in found for column in record))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(found)
    write_whole(path, text.getvalue())


def _curves(study: Study, runs: Sequence[Run], workdir: Path) -> None:
    """Training loss against tokens and against FLOPs: the mean over seeds, and their spread."""
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    for point in study.points:
        curves, flops = defaultdict(list), {}
        for run in runs:
            if run.label != point.label:
                continue
            for record in read_metrics(workdir / "runs" / run.name):
                if record.get("bits_per_byte") is not None:
                    curves[record["tokens"]].append(record["bits_per_byte"])
                    flops[record["tokens"]] = flops_after(run.config, record["step"])
        if not curves:
            continue
        tokens = np.array(sorted(curves))
        mean, low, high = np.array(
            [(np.mean(c), np.min(c), np.max(c)) for c in (curves[t] for t in tokens)]
        ).T
        for axes, x in ((left, tokens), (right, [flops[t] for t in tokens])):
            (line,) = axes.plot(x, mean, linewidth=1, label=point.label)
            axes.fill_between(x, low, high, alpha=0.2, color=line.get_color(), linewidth=0)
    left.set(xlabel="tokens", ylabel="training bits per byte")
    right.set(xlabel="training FLOPs", xscale="log")
    for axes in (left, right):
        axes.grid(alpha=0.3)
    left.legend(fontsize="small")
    figure.savefig(workdir / "loss.png", dpi=150, metadata={"Software": None})


def _against_axis(study: Study, figures: dict[str, dict[int, float]], path: Path) -> None:
    """The deciding metric of every run, and the mean of each point with its interval."""
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for place, by_seed in enumerate(figures.values()):
        values = list(by_seed.values())
        total = estimate(values)
        axes.plot([place] * len(values), values, "o", color="C0", alpha=0.4, markersize=4)
        half = total.half if np.isfinite(total.half) else 0
        axes.errorbar(place, total.mean, yerr=half, fmt="_", color="C0", capsize=4, markersize=14)
    axes.set_xticks(range(len(figures)), list(figures), rotation=20 if len(figures) > 5 else 0)
    axes.set(xlabel=study.axis, ylabel=study.metric.unit or study.metric.name)
    axes.grid(alpha=0.3, axis="y")
    figure.savefig(path, dpi=150, metadata={"Software": None})
