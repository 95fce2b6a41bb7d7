"""Figures of what a suite found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure


def summary(found: dict[str, Any]) -> str:
    """One line of the figures that matter."""
    if "lengths" not in found:
        return f"{found['bits_per_byte']:.4f} bits per byte of {found['tokens']:,} tokens"
    cells = (f"{entry['accuracy']:.1%} at {entry['length']}" for entry in found["lengths"])
    return f"accuracy {', '.join(cells)}"


def draw(found: dict[str, Any], path: Path, title: str) -> None:
    """The figure of `found`, a suite's result, in `path`."""
    panels = _panels(found)
    figure = Figure(figsize=(5.5 * len(panels), 4.2), layout="constrained")
    figure.suptitle(title)
    for axes, panel in zip(np.atleast_1d(figure.subplots(1, len(panels))), panels, strict=True):
        panel(axes)
    figure.savefig(path, dpi=150, metadata={"Software": None})


def _panels(found: dict[str, Any]) -> list[Any]:
    if "lengths" not in found:
        return [
            lambda axes: _steps(axes, found["by_position"], "position", "nats per token"),
            lambda axes: _steps(axes, found["by_length"], "document's length", "bits per byte"),
        ]
    lengths = found["lengths"]
    panels = [lambda axes: _heat(axes, *_by_position(lengths), "answer's place in its document")]
    if "by_depth" in lengths[0]:
        cells = [[cell["accuracy"] for cell in entry["by_depth"]] for entry in lengths]
        names = [f"{cell['depth']:g}" for cell in lengths[0]["by_depth"]]
        rows = [str(entry["length"]) for entry in lengths]
        panels.append(lambda axes: _heat(axes, cells, names, rows, "needle's depth"))
    return panels


def _by_position(lengths: list[dict[str, Any]]) -> tuple[list[list[float]], list[str], list[str]]:
    """Accuracies of each length over equal parts of the document; NaN where none is asked."""
    parts = 8
    cells = np.full((len(lengths), parts), np.nan)
    for row, entry in enumerate(lengths):
        for cell in entry["by_position"]:
            middle = (cell["from"] + cell["to"]) / 2
            cells[row, int(middle / entry["length"] * parts)] = cell["mean"]
    names = [f"{(part + 1) / parts:.0%}" for part in range(parts)]
    return cells.tolist(), names, [str(entry["length"]) for entry in lengths]


def _heat(
    axes: Axes, cells: list[list[float]], columns: list[str], rows: list[str], label: str
) -> None:
    axes.imshow(cells, vmin=0, vmax=1, cmap="viridis", aspect="auto")
    for row, values in enumerate(cells):
        for column, value in enumerate(values):
            if np.isfinite(value):
                color = "white" if value < 0.6 else "black"
                axes.text(column, row, f"{value:.0%}", ha="center", va="center", color=color)
    axes.set_xticks(range(len(columns)), columns)
    axes.set_yticks(range(len(rows)), rows)
    axes.set(xlabel=label, ylabel="length", title="accuracy")


def _steps(axes: Axes, bins: list[dict[str, float]], xlabel: str, ylabel: str) -> None:
    edges = [cell["from"] for cell in bins] + [cell["to"] for cell in bins[-1:]]
    axes.stairs([cell["mean"] for cell in bins], np.maximum(edges, 0.5), linewidth=1.5)
    axes.set(xscale="log", xlabel=xlabel, ylabel=ylabel)
    axes.grid(alpha=0.3)
