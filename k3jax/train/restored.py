"""A run's model as its newest intact checkpoint has it, to ask questions of."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from k3jax.config import DataConfig, ExperimentConfig
from k3jax.data.packing import Batch
from k3jax.data.pipeline import load_corpus, make_train_iterator, validation_batches
from k3jax.data.tokenizer import Tokenizer
from k3jax.evals.tables import Scores
from k3jax.flags import override
from k3jax.layers.documents import documents_of
from k3jax.model import token_scores
from k3jax.sharding import BATCH, SEQUENCE, make_mesh
from k3jax.train.checkpoint import Checkpoints
from k3jax.train.loop import decoder_blueprint
from k3jax.train.probes import Record, make_probes
from k3jax.train.step import dropped_routes
from k3jax.train.validation import check_drops
from k3jax.train.workdir import FILE, occupy, saved_config


@dataclasses.dataclass(frozen=True)
class Restored:
    """A trained model. `score` is as `k3jax.evals.suites` takes it.

    `probe` gives the record of `k3jax.train.probes` for batches of one shape together, as if they
    were those of the next step.
    """

    config: ExperimentConfig
    step: int
    tokenizer: Tokenizer
    score: Callable[[Batch], Scores]
    probe: Callable[[list[Batch]], Record]

    @property
    def data(self) -> DataConfig:
        """The data in rows and batches of the stage that the run was in."""
        data = self.config.data
        return data.during(data.schedule()[data.stage_of(self.step)])

    @property
    def token_bytes(self) -> np.ndarray:
        """`[vocab]`: the bytes of text that each token stands for."""
        return self.tokenizer.token_bytes

    def held_out(self, cache_dir: Path) -> list[Batch]:
        """The held-out rows that the run was measured on."""
        return validation_batches(self.data, cache_dir, self.config.train.eval_batches)


@contextlib.contextmanager
def restored(workdir: Path, cache_dir: Path, assignments: list[str]) -> Iterator[Restored]:
    """The model of the run in `workdir`, with `assignments` to settings that a run may change.

    Holds the directory meanwhile. Raises `ValueError` with one line where there is no run, or no
    intact checkpoint of it; `score` and `probe` do where routes to experts are dropped and may not
    be.
    """
    saved = saved_config(workdir)
    if saved is None:
        raise ValueError(f"--workdir = {workdir}: holds no run, {FILE} is not there")
    config = override(saved, assignments)
    with occupy(workdir, config), jax.set_mesh(make_mesh(config.mesh)):
        data = make_train_iterator(config.data, cache_dir)
        plan = decoder_blueprint(config)
        with Checkpoints(workdir / "checkpoints", config) as checkpoints:
            state = checkpoints.restore(plan.abstract(), data)
        if state is None:
            raise ValueError(f"--workdir = {workdir}: holds no intact checkpoint yet")

        @jax.jit
        def scores(params, balancing, batch):
            model = nnx.merge(plan.graphdef, params, balancing)
            documents = documents_of(batch["segment_ids"])
            hidden, _, stats = model.hidden(batch["inputs"], documents=documents)
            return *token_scores(model, hidden, batch["targets"]), dropped_routes(stats)

        def score(batch: Batch) -> Scores:
            sharding = NamedSharding(jax.sharding.get_mesh(), PartitionSpec(BATCH, SEQUENCE))
            placed = {name: jax.device_put(x, sharding) for name, x in batch.items()}
            found = scores(state.params, state.balancing, placed)
            nll, correct, dropped = jax.device_get(found)
            check_drops(config.model.moe, float(dropped), "evaluation")
            kept = {name: batch[name] for name in ("weights", "segment_ids", "targets")}
            return Scores(nll=nll, correct=correct, **kept)

        measure = make_probes(config.model, plan.graphdef)

        def probe(batches: list[Batch]) -> Record:
            sharding = NamedSharding(jax.sharding.get_mesh(), PartitionSpec(None, BATCH, SEQUENCE))
            rows = batches[0]["inputs"].shape[0] // config.train.micro_batches

            def placed(name: str) -> jax.Array:
                parts = [x[name].reshape(-1, rows, x[name].shape[1]) for x in batches]
                return jax.device_put(np.concatenate(parts), sharding)

            record = measure(state, {name: placed(name) for name in batches[0]})
            dropped = np.nansum(record.get("dropped_routes", 0))
            check_drops(config.model.moe, float(dropped), "evaluation")
            return record

        tokenizer = load_corpus(config.data, cache_dir).tokenizer
        yield Restored(config, int(state.step), tokenizer, score, probe)
