"""What a run leaves to look at when it ends: plots, and a sample of what the model writes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec
from matplotlib.figure import Figure

from k3jax.layers.documents import documents_of
from k3jax.sharding import BATCH, under_mesh
from k3jax.train.metrics import read_metrics
from k3jax.train.probe_figures import draw
from k3jax.train.probes import FOLDER, read_records
from k3jax.train.state import Blueprint, TrainState

matplotlib.use("Agg")


def plot(workdir: Path, baseline: float | None) -> Path:
    """Bits per byte against tokens, from the records in `workdir`, as `loss.png` there."""
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot()
    records = read_metrics(workdir)
    for name, style in (("bits_per_byte", "-"), ("validation_bits_per_byte", "o-")):
        points = [(r["tokens"], r[name]) for r in records if r.get(name) is not None]
        if points:
            label = "validation" if "validation" in name else "training"
            axes.plot(*zip(*points, strict=True), style, label=label, linewidth=1, markersize=4)
    if baseline is not None:
        axes.axhline(baseline, linestyle="--", color="grey", label="two-byte contexts")
    axes.set(xlabel="tokens", ylabel="bits per byte", title=workdir.name)
    axes.grid(alpha=0.3)
    axes.legend()
    path = workdir / "loss.png"
    figure.savefig(path, dpi=150)
    return path


def plot_probes(workdir: Path) -> list[Path]:
    """The figures of the probes on record in `workdir`, beside the records; none without any."""
    return draw(read_records(workdir), workdir / FOLDER, workdir.name)


def make_sampler(
    plan: Blueprint, vocab_size: int, temperature: float
) -> Callable[[TrainState, np.ndarray, int, jax.Array], list[int]]:
    """A function from state, prompt `[rows, T]`, count and key to `count` tokens after row 0.

    Prefills the prompt, then takes one token at a time from the model's cache. Only the first
    `vocab_size` tokens are drawn.
    """

    def advance(
        state: TrainState, tokens: jax.Array, cache: Any, key: jax.Array
    ) -> tuple[jax.Array, jax.Array, Any]:
        model = nnx.merge(plan.graphdef, state.params, state.balancing)
        documents = documents_of(jnp.ones_like(tokens))  # laid out as the tokens are
        logits, cache, _ = model(tokens, documents=documents, cache=cache)
        last = logits[:, -1]
        if under_mesh():  # a vocabulary split over tensor
            last = jax.sharding.reshard(last, PartitionSpec(BATCH))
        drawn = jax.random.categorical(key, last[:, :vocab_size] / temperature)
        drawn = drawn.astype(jnp.int32)[:, None]
        first = jax.sharding.reshard(drawn, PartitionSpec()) if under_mesh() else drawn
        return drawn, first[0, 0], cache  # any process can read the replicated one

    compiled = jax.jit(advance, donate_argnums=2)

    def sample(state: TrainState, prompt: np.ndarray, count: int, key: jax.Array) -> list[int]:
        rows, length = prompt.shape
        model = nnx.merge(plan.graphdef, state.params, state.balancing)
        tokens = jax.device_put(prompt, PartitionSpec(BATCH) if under_mesh() else None)
        cache, drawn = model.empty_cache(rows, length + count), []
        for step_key in jax.random.split(key, count):
            tokens, first, cache = compiled(state, tokens, cache, step_key)
            drawn.append(int(first))
        return drawn

    return sample
