"""A study's `report.md`, `results.csv` and plots, from the results of its runs.

Nothing in them depends on when or how often the study was interrupted: times are left out.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from experiments.ablation.plan import Run, flops_after
from experiments.ablation.statistics import Figures, paired, residual, verdict
from experiments.ablation.study import Metric, Study, deciding
from k3jax.flags import differences
from k3jax.train.metrics import FILE, read_metrics
from k3jax.train.workdir import write_whole

EQUAL = {
    "tokens": "tokens (every run sees as many, and those of one seed the same)",
    "parameters": "total parameters (by the width of the feed-forward layers), and tokens",
    "active": "active parameters (by the width of the feed-forward layers), and tokens",
    "flops": "training FLOPs (by the number of steps)",
}

CAPTION = (
    "Lines are means over seeds and bands their range; dots are runs, and bars 95 % intervals of a "
    "point's mean by the same spread as the comparisons', without what the runs of a seed share."
)


def report(
    name: str, study: Study, runs: Sequence[Run], found: list[dict[str, Any]], workdir: Path
) -> str:
    """Writes everything to `workdir`; returns the text of `report.md`."""
    _csv(found, workdir / "results.csv")
    drawn = _curves(study, runs, workdir)
    figures = {metric: by_label(study, metric, found) for metric in deciding(study, runs[0].config)}
    _against_axis(study, figures, workdir / "axis.png")
    text = _text(name, study, runs, found, figures, drawn)
    write_whole(workdir / "report.md", text)
    return text


def by_label(study: Study, metric: Metric, found: list[dict[str, Any]]) -> Figures:
    """`metric`, by label in the order of the sweep and by seed."""
    figures: Figures = {point.label: {} for point in study.points}
    for record in found:
        value = record.get(metric.name)
        if value is not None:
            figures[record["label"]][record["seed"]] = value
    return {label: by_seed for label, by_seed in figures.items() if by_seed}


def _text(
    name: str,
    study: Study,
    runs: Sequence[Run],
    found: list[dict[str, Any]],
    figures: dict[Metric, Figures],
    drawn: list[tuple[str, int]],
) -> str:
    first = runs[0].config
    data = first.data
    stages = f", then {', '.join(data.stages)} (steps:lengthxrows)" if data.stages else ""
    sources = ", ".join(data.sources)
    if data.weights:
        weights = ", ".join(f"{weight:g}" for weight in data.weights)
        sources += f", by weights {weights}"
    lines = [
        f"# {name}",
        "",
        study.question,
        "",
        f"Held equal: {EQUAL[study.equal]}. {len(found)} of {len(runs)} runs are finished: "
        f"{len(study.points)} points, {len({run.seed for run in runs})} seeds; rows of "
        f"{data.sequence_length} tokens, {data.batch_size} a step{stages}; data: {sources}.",
        "",
    ]
    for metric, by_metric in figures.items():
        if study.reference in by_metric:
            lines += [verdict(by_metric, study.reference, metric), ""]
        else:
            lines += [
                f"No run of {study.reference}, the reference, has {metric.name}: no verdict yet.",
                "",
            ]
        if names := _named(record for record in found if record.get(metric.name) is None):
            lines += [f"Left out, as {metric.name} is not finite or not there: {names}.", ""]
    lines += _table(study, runs, found, figures)
    lines += ["", "![loss](loss.png)", "", "![axis](axis.png)", "", CAPTION, ""]
    if names := _named(r for r in found if (r["label"], r["seed"]) not in drawn):
        lines += [f"Not in loss.png, as {FILE} is not there or ends early: {names}.", ""]
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
    figures: dict[Metric, Figures],
) -> list[str]:
    rows = [[study.axis, "parameters", "active", "steps", "PFLOPs", "seeds"]]
    for metric in figures:
        rows[0] += [metric.name, f"minus {study.reference}"]
    spreads = {metric: residual(by_label) for metric, by_label in figures.items()}
    for point in study.points:
        mine = [record for record in found if record["label"] == point.label]
        if not mine:
            continue
        run = next(run for run in runs if run.label == point.label)
        row = [
            point.label,
            f"{mine[0]['parameters']:,}",
            f"{mine[0]['active_parameters']:,}",
            f"{run.config.train.steps:,}",
            f"{mine[0]['flops'] / 1e15:.3g}",
            str(len(mine)),
        ]
        for metric, by_label in figures.items():
            by_seed, reference = (by_label.get(x, {}) for x in (point.label, study.reference))
            row.append(_mean(list(by_seed.values())))
            difference = paired(by_seed, reference, spreads[metric])
            itself = point.label == study.reference
            row.append("-" if itself or difference is None else str(difference))
        rows.append(row)
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return [lines[0], "|" + "---|" * len(rows[0]), *lines[1:]]


def _named(records: Iterable[dict[str, Any]]) -> str:
    """The runs of `records`; empty without any."""
    return ", ".join(f"{record['label']} (seed {record['seed']})" for record in records)


def _mean(values: list[float]) -> str:
    """Of the seeds, with their standard deviation."""
    if not values:
        return "-"
    spread = f" (sd {np.std(values, ddof=1):.4f})" if len(values) > 1 else ""
    return f"{np.mean(values):.4f}{spread}"


def _csv(found: list[dict[str, Any]], path: Path) -> None:
    columns = list(dict.fromkeys(column for record in found for column in record))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(found)
    write_whole(path, text.getvalue())


def _curves(study: Study, runs: Sequence[Run], workdir: Path) -> list[tuple[str, int]]:
    """Training loss against tokens and against FLOPs: the mean over seeds, and their spread.

    Of a point's runs, those that have come furthest, where all of them have a figure. Returns the
    label and seed of each run that is drawn.
    """
    drawn = []
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    for place, point in enumerate(study.points):
        mine = [run for run in runs if run.label == point.label]
        records = [read_metrics(run.folder(workdir)) for run in mine]
        last = max((r["step"] for rs in records for r in rs), default=0)
        furthest = {
            run.seed: {
                r["step"]: r["bits_per_byte"] for r in rs if r.get("bits_per_byte") is not None
            }
            for run, rs in zip(mine, records, strict=True)
            if rs and rs[-1]["step"] == last
        }
        curves = list(furthest.values())
        steps = sorted(set.intersection(*map(set, curves))) if curves else []
        if not steps:
            continue
        drawn += [(point.label, seed) for seed in furthest]
        values = np.array([[curve[step] for step in steps] for curve in curves])
        config = mine[0].config
        tokens = [config.data.tokens_after(step) for step in steps]
        for axes, x in ((left, tokens), (right, [flops_after(config, step) for step in steps])):
            line = {"linewidth": 1, "color": f"C{place}", "label": point.label}
            axes.plot(x, values.mean(0), **line)
            axes.fill_between(
                x, values.min(0), values.max(0), alpha=0.2, color=f"C{place}", linewidth=0
            )
    left.set(xlabel="tokens", ylabel="training bits per byte")
    right.set(xlabel="training FLOPs", xscale="log")
    for axes in (left, right):
        axes.grid(alpha=0.3)
    left.legend(fontsize="small")
    figure.savefig(workdir / "loss.png", dpi=150, metadata={"Software": None})
    return drawn


def _against_axis(study: Study, figures: dict[Metric, Figures], path: Path) -> None:
    """The deciding figures of every run, and the mean of each point with its interval.

    The interval leaves out what the runs of a seed share, as the comparisons do.
    """
    figure = Figure(figsize=(7 * len(figures), 4.5), layout="constrained")
    panels = np.atleast_1d(figure.subplots(1, len(figures)))
    for axes, (metric, by_point) in zip(panels, figures.items(), strict=True):
        spread = residual(by_point)
        for place, by_seed in enumerate(by_point.values()):
            values = list(by_seed.values())
            axes.plot([place] * len(values), values, "o", color="C0", alpha=0.4, markersize=4)
            half = spread.half(1 / len(values))
            axes.errorbar(
                place,
                np.mean(values),
                yerr=half if np.isfinite(half) else 0,
                fmt="_",
                color="C0",
                capsize=4,
                markersize=14,
            )
        turned = 20 if len(by_point) > 5 else 0
        axes.set_xticks(range(len(by_point)), list(by_point), rotation=turned)
        axes.set(xlabel=study.axis, ylabel=metric.name.replace("_", " "))
        axes.grid(alpha=0.3, axis="y")
    figure.savefig(path, dpi=150, metadata={"Software": None})
