"""What happens inside a decoder: measured on a batch by real layer, and kept as a file a step.

A record is a dict of float32 arrays. Row i is layer i of the decoder, NaN where that layer has no
such thing; where no layer has it, the array is absent:

- `expert_load [L, E]`: routes to each expert over the mean of the layer; the largest of a row is
  its violation, 1 in balance. `dropped_routes [L]`: how many found no room on their way.
- `log_decay [L, H, K]`: the mean of g of KDA's channels ([L, H, 1] for one decay per head);
  `half_life [L, H, K, bins]`: the share of tokens with a half-life in each bin of
  `k3jax.layers.kda.HALF_LIVES`.
- `state_norm [L, H]`: Frobenius norm of KDA's states after the longest document of each row, as the
  root mean square over rows.
- `max_logit [L, H]`: the largest attention logit of MLA and GQA.
- `mix_weights [L, 2, S]`: the weight that AttnRes gives each source, in the mean over tokens, as
  mixer and feed-forward of a layer read it: the embedding, then blocks (full AttnRes: sublayers).
  `final_mix_weights [S]`: as the head does.
- `input_rms, output_rms [L, 2]`: root mean square of what mixer and feed-forward read of the
  residual stream (before their norm), and of what they add to it.
- `gradient_norm [L, P]` of the parameters `gradient_names [P]` of a layer, before clipping, and
  `outer_gradient_norm [Q]` of those outside of layers, `outer_gradient_names [Q]`. All squares
  together are those of `grad_norm`.

Padding never counts. The batch is that of a step, whole, and the model is as the step finds it: the
record of step n is of the model after n - 1 updates, as the step's loss and gradient norm are.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec

from k3jax.config import ModelConfig
from k3jax.layers.block import PROBES
from k3jax.layers.linear import island
from k3jax.layers.stats import Max, Sum
from k3jax.sharding import under_mesh
from k3jax.stacking import by_layer
from k3jax.train.state import TrainState
from k3jax.train.step import Batch, accumulated, decoder_loss, target_weight
from k3jax.train.workdir import write_whole

type Record = dict[str, np.ndarray]

FOLDER = "probes"
# The stats that a record is made of, by the last part of their path.
_STATS = {
    "load", "dropped_routes", "log_decay", "half_life", "state_square", "max_logit", "mix_weights",
    *(f"{name}_{side}_square" for name in ("mixer", "ffn") for side in ("input", "output")),
}  # fmt: skip


def make_probes(
    config: ModelConfig, graphdef: nnx.GraphDef
) -> Callable[[TrainState, Batch], Record]:
    """A function from state and `[micro-batches, rows, T]` batch to a record; it waits for it.

    It runs the forward and backward pass of the training step, compiled on its own, and changes
    nothing. All processes of a run must call it, and get the same record.
    """
    loss = decoder_loss(graphdef, PROBES, gapless=True)

    @jax.jit
    def measure(state: TrainState, batch: Batch) -> tuple[Any, ...]:
        _, share = target_weight(batch)
        grads, _, stats = accumulated(loss, state, batch, share)
        real = batch["segment_ids"] > 0
        squares = {
            "/".join(map(str, path)): _square(variable[...], path[0] == "blocks")
            for path, variable in nnx.to_flat_state(grads)
        }
        found = _flat(stats), squares, jnp.sum(real), jnp.sum(jnp.any(real, axis=-1))
        if under_mesh():  # so that any process can read it
            found = jax.tree.map(lambda x: jax.sharding.reshard(x, PartitionSpec()), found)
        return found

    def probe(state: TrainState, batch: Batch) -> Record:
        return summarised(config, *jax.device_get(measure(state, batch)))

    return probe


def _square(grad: jax.Array, stacked: bool) -> jax.Array:
    """The squared norm of a gradient, of each layer where layers are stacked."""
    wide = grad.astype(island(grad.dtype))
    return jnp.sum(jnp.square(wide), axis=range(int(stacked), grad.ndim))


def _flat(stats: Any) -> dict[str, jax.Array]:
    """The values of the stats that a record needs, by path."""
    leaves = jax.tree_util.tree_leaves_with_path(stats, is_leaf=lambda x: isinstance(x, Sum | Max))
    named = ((jax.tree_util.keystr(path, simple=True, separator="/"), x) for path, x in leaves)
    return {path: x.value for path, x in named if path.split("/")[-1] in _STATS}


def summarised(
    config: ModelConfig,
    stats: dict[str, np.ndarray],
    squares: dict[str, np.ndarray],
    tokens: int,
    rows: int,
) -> Record:
    """The record of sums over `tokens` real tokens and `rows` rows that have any.

    `stats` and `squares` (of gradients) are keyed by path, stacked as the model's layers are.
    """
    layers, outside = by_layer(config, stats)
    gradients, outer = by_layer(config, squares)
    record: dict[str, Any] = {}
    with np.errstate(divide="ignore", invalid="ignore"):  # of nothing, a mean is NaN
        if (load := layers.get("ffn/router/load")) is not None:
            record["expert_load"] = load / load.mean(axis=-1, keepdims=True)
            record["dropped_routes"] = layers["ffn/dropped_routes"]
        for name in ("log_decay", "half_life"):
            if (total := layers.get(f"mixer/{name}")) is not None:
                record[name] = total / tokens
        if (square := layers.get("mixer/state_square")) is not None:
            record["state_norm"] = np.sqrt(square / rows)
        if (logit := layers.get("mixer/max_logit")) is not None:
            record["max_logit"] = logit
        if "residual/mix_weights" in outside:
            both = [layers[f"residual/{name}/mix_weights"] for name in ("mixer", "ffn")]
            record["mix_weights"] = np.stack(both, axis=1) / tokens
            record["final_mix_weights"] = outside["residual/mix_weights"] / tokens
        for side in ("input", "output"):
            both = [layers[f"{name}_{side}_square"] for name in ("mixer", "ffn")]
            record[f"{side}_rms"] = np.sqrt(np.stack(both, axis=1) / tokens)
        record["gradient_norm"] = np.sqrt(np.stack(list(gradients.values()), axis=1))
        record["outer_gradient_norm"] = np.sqrt(np.stack(list(outer.values())))
    record = {name: np.asarray(value, np.float32) for name, value in record.items()}
    record["gradient_names"] = np.array(list(gradients))
    record["outer_gradient_names"] = np.array(list(outer))
    return record


def write_record(path: Path, record: Record) -> None:
    """Put `record` in `path`, a `.npz` file; raises `OSError` with one line where that fails."""
    file = io.BytesIO()
    np.savez_compressed(file, allow_pickle=False, **record)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, file.getvalue())
    except OSError as error:
        raise OSError(f"{path}: cannot be written: {error.strerror}") from error


def record_path(workdir: Path, step: int) -> Path:
    """Where the record of `step` is kept in the directory of a run."""
    return workdir / FOLDER / f"{step:08d}.npz"


def discard_after(workdir: Path, step: int) -> None:
    """Remove the records beyond `step`, at which a run is resumed: it will make them anew.

    Raises `OSError` with one line where that fails.
    """
    for found, path in _files(workdir):
        if found > step:
            try:
                path.unlink()
            except OSError as error:
                raise OSError(f"{path}: cannot be removed: {error.strerror}") from error


def read_records(workdir: Path) -> Iterator[tuple[int, Record]]:
    """`(step, record)` of a run, in order, each read when it is due; damaged ones are left out."""
    for step, path in _files(workdir):
        # By what is damaged, zipfile, its decompressors and numpy raise a dozen kinds of errors.
        with contextlib.suppress(Exception), np.load(path) as file:
            yield step, dict(file)


def _files(workdir: Path) -> list[tuple[int, Path]]:
    paths = (workdir / FOLDER).glob("*.npz")
    return sorted((int(path.stem), path) for path in paths if path.stem.isdecimal())
