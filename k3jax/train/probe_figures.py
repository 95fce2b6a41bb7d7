"""Figures of what probes found: one for each probe, the last record and how it came to that."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from k3jax.layers.kda import HALF_LIVES
from k3jax.train.probes import Record

type Panel = Callable[[Axes], None]

LABELS = 24  # along an axis, at most
SUBLAYERS = ("mixer", "feed-forward")


def draw(records: Iterable[tuple[int, Record]], folder: Path, title: str) -> list[Path]:
    """A `.png` in `folder` for each probe that `records`, in order of steps, have; their paths.

    Layers are numbered as in the decoder, from 0; those without the probe are left out.
    """
    steps: list[int] = []
    history: dict[str, list[np.ndarray]] = {}
    first: Record = {}
    last: Record = {}
    for step, last in records:  # one at a time: records of large models are large
        first = first or last
        steps.append(step)
        for name, values in _per_layer(last).items():
            history.setdefault(name, []).append(values)
    paths = []
    for name, panels in _figures(steps, history, first, last).items() if steps else ():
        figure = Figure(figsize=(6.2 * len(panels), _height(name, last)), layout="constrained")
        figure.suptitle(f"{title}, {_at(steps[-1])}: {name.replace('_', ' ')}")
        for axes, panel in zip(np.atleast_1d(figure.subplots(1, len(panels))), panels, strict=True):
            panel(axes)
        paths.append(folder / f"{name}.png")
        figure.savefig(paths[-1], dpi=150, metadata={"Software": None})
    return paths


def _figures(
    steps: list[int], history: dict[str, list[np.ndarray]], first: Record, last: Record
) -> dict[str, list[Panel]]:
    """The panels of each figure, by its name."""

    def over_steps(name: str, title: str, unit: str, log: bool = True) -> list[Panel]:
        if len(steps) == 1:
            return []
        cells, columns = np.stack(history[name], axis=1), [f"{step:,}" for step in steps]
        return [lambda axes: _heat(axes, cells, columns, "step", title, unit, log=log)]

    def heads(name: str, title: str, unit: str, log: bool = False) -> Panel:
        columns = list(map(str, range(last[name].shape[1])))
        what = "expert" if name == "expert_load" else "head"
        return lambda axes: _heat(axes, last[name], columns, what, title, unit, log=log)

    found: dict[str, list[Panel]] = {}
    if "expert_load" in last:
        found["expert_load"] = [
            heads("expert_load", "routes to each expert", "load / mean load"),
            *over_steps("expert_load", "violation", "largest / mean load", log=False),
        ]
    if "half_life" in last:
        shares = last["half_life"].mean(axis=(1, 2))
        channels = -np.sort(-_half_life(last).reshape(len(shares), -1), axis=1)
        bins = ["less", *(f"{edge:g}" for edge in HALF_LIVES)]
        numbers = list(map(str, range(channels.shape[1])))
        found["kda_decay"] = [
            lambda axes: _heat(
                axes, shares, bins, "half-life in tokens, from", "decay of tokens", "share"
            ),
            lambda axes: _heat(
                axes, channels, numbers, "channel of any head, slowest first",
                "mean decay of channels", "half-life, tokens", log=True,
            ),
            *over_steps("half_life", "median channel", "half-life, tokens"),
        ]  # fmt: skip
    if "state_norm" in last:
        found["kda_state_norm"] = [
            heads("state_norm", "state after the longest document", "Frobenius norm", log=True),
            *over_steps("state_norm", "root mean square over heads", "Frobenius norm"),
        ]
    if "max_logit" in last:
        found["attention_logits"] = [
            heads("max_logit", "largest attention logit", "logit"),
            *over_steps("max_logit", "largest of any head", "logit", log=False),
        ]
    if "mix_weights" in last:
        both = [(first, steps[0]), (last, steps[-1])][len(steps) == 1 :]
        top = max(float(record["mix_weights"].max()) for record, _ in both)
        found["attn_res_weights"] = [
            functools.partial(_mix, record=r, step=step, top=top) for r, step in both
        ]
    found["output_rms"] = [
        lambda axes: _profile(axes, last),
        *over_steps("mixer", "output of the mixer", "root mean square"),
        *over_steps("feed-forward", "output of the feed-forward layer", "root mean square"),
    ]
    found["gradient_norm"] = [
        lambda axes: _heat(
            axes, last["gradient_norm"], list(last["gradient_names"]), "", "each parameter",
            "gradient norm", log=True, every=True,
        ),
        *over_steps("gradient_norm", "all parameters of a layer", "gradient norm"),
    ]  # fmt: skip
    return found


def _per_layer(record: Record) -> dict[str, np.ndarray]:
    """What is drawn against steps: by name, one figure `[L]` for each layer."""
    found = {
        "gradient_norm": np.sqrt(np.nansum(np.square(record["gradient_norm"]), axis=1)),
        "mixer": record["output_rms"][:, 0],
        "feed-forward": record["output_rms"][:, 1],
    }
    if "expert_load" in record:
        found["expert_load"] = record["expert_load"].max(axis=1)
    if "half_life" in record:
        found["half_life"] = np.median(_half_life(record), axis=(1, 2))
    if "state_norm" in record:
        found["state_norm"] = np.sqrt(np.square(record["state_norm"]).mean(axis=1))
    if "max_logit" in record:
        found["max_logit"] = record["max_logit"].max(axis=1)
    return found


def _half_life(record: Record) -> np.ndarray:
    """`[L, H, K]`: the half-life, in tokens, that each channel's mean log decay means."""
    with np.errstate(divide="ignore"):
        return np.log(2) / -record["log_decay"]


def _mix(axes: Axes, record: Record, step: int, top: float) -> None:
    weights = record["mix_weights"]
    cells = np.concatenate(
        [weights.reshape(-1, weights.shape[-1]), record["final_mix_weights"][None]]
    )
    rows = [f"{layer} {name}" for layer in range(len(weights)) for name in SUBLAYERS] + ["head"]
    columns = ["embedding", *map(str, range(1, cells.shape[1]))]
    absent = np.where(cells > 0, cells, np.nan)  # softmax gives nothing to what is not there
    source = "source: embedding, then blocks (full AttnRes: sublayers)"
    _heat(axes, absent, columns, source, _at(step), "weight", rows=rows, top=top)
    axes.set_ylabel("read by layer and sublayer")


def _profile(axes: Axes, record: Record) -> None:
    """Magnitudes against depth."""
    for side, style in (("input", "--"), ("output", "-")):
        for place, name in enumerate(SUBLAYERS):
            values = record[f"{side}_rms"][:, place]
            label = f"{name}, {'reads' if side == 'input' else 'adds'}"
            axes.plot(values, style, color=f"C{place}", label=label, linewidth=1, marker=".")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set(xlabel="layer", ylabel="root mean square", yscale="log", title="by depth")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")


def _heat(
    axes: Axes,
    cells: np.ndarray,
    columns: Sequence[str],
    xlabel: str,
    title: str,
    unit: str,
    *,
    rows: Sequence[str] | None = None,
    log: bool = False,
    top: float | None = None,
    every: bool = False,
) -> None:
    """`cells [rows, columns]` as colours; rows without a figure are left out.

    `rows` are the numbers of layers unless they are given; `every` column has its label, else as
    many as find room. A scale that is `log` is so for positive figures that differ by more than a
    factor of ten; `top` is the end of one that begins at 0.
    """
    names = rows or list(map(str, range(len(cells))))
    cells = np.where(np.isfinite(cells), cells, np.nan)
    there = [row for row in range(len(cells)) if np.isfinite(cells[row]).any()]
    axes.set(xlabel=xlabel, ylabel="layer", title=title)
    if not there:
        axes.text(0.5, 0.5, "nothing is finite", ha="center", transform=axes.transAxes)
        return
    cells, names = cells[there], [names[row] for row in there]
    positive = cells[cells > 0]
    norm = Normalize(0.0 if top else None, top)
    if log and positive.size and positive.max() > 10 * positive.min():
        norm = LogNorm(positive.min(), positive.max())
    image = axes.imshow(cells, norm=norm, cmap="viridis", aspect="auto", interpolation="nearest")
    axes.figure.colorbar(image, ax=axes, label=unit)
    longest = max(map(len, columns), default=0)
    room = len(columns) if every else LABELS if longest < 3 else LABELS // 2
    slanted = {"rotation": 45, "ha": "right", "rotation_mode": "anchor"}
    turned = {"rotation": 90} if every else slanted if longest > 3 else {}
    axes.set_xticks(*_thinned(columns, room), **turned)
    axes.set_yticks(*_thinned(names, 2 * LABELS if rows else LABELS))
    if every or rows:
        axes.tick_params("x" if every else "y", labelsize=6)


def _thinned(labels: Sequence[str], room: int) -> tuple[list[int], list[str]]:
    """Places and labels of at most `room` of `labels`, evenly apart, the first among them."""
    places = list(range(0, len(labels), -(-len(labels) // room) or 1))
    return places, [labels[place] for place in places]


def _height(name: str, record: Record) -> float:
    rows = len(record["output_rms"])
    if name == "attn_res_weights":
        rows = min(2 * rows, 2 * LABELS)
    longer = 1.5 if name == "gradient_norm" else 0
    return 3.0 + longer + 0.15 * min(max(rows, 8), 2 * LABELS)


def _at(step: int) -> str:
    return f"step {step:,}"
