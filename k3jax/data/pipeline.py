"""From `DataConfig` to batches: a grain pipeline whose position is one number.

An epoch of a pool of documents is a shuffled stream cut into rows (`k3jax.data.packing`), and the
rows are shuffled again, so that a batch is not made of neighbours. Every epoch has its own order.
The pipeline works on row numbers, which grain shuffles, repeats, mixes and batches by arithmetic;
tokens are read from the memory map only for the rows that a process owns. So any batch can be made
from its number, and a restored iterator continues at once with the batch that would have come.

Without `weights` the documents of all sources form one pool: each transition comes once per epoch.
With weights each source is a pool, and every row is of one source. A task (`k3jax.data.tasks`) is a
pool of its own.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grain
import numpy as np

from k3jax.config import DataConfig
from k3jax.data import corpus
from k3jax.data.packing import Batch, Stream, shift
from k3jax.data.tasks import PREFIX, TaskPool, parse
from k3jax.data.tokenizer import Tokenizer, load_tokenizer
from k3jax.data.tokens import TokenStore, token_store, validation_mask

PREFETCH = grain.ReadOptions(num_threads=1, prefetch_buffer_size=4)  # batches
_ENDLESS = 1 << 40  # rows; grain's own endless length overflows when it is batched
_VALIDATION_SEED = 0  # not `data.seed`: runs that differ in it are held to the same rows


type Pool = Stream | TaskPool


@dataclasses.dataclass(frozen=True)
class Corpus:
    """The tokenised sources of a `DataConfig`, split in two.

    `train`, `validation`: the pools, not shuffled; `weights` of them; `train_documents`: the
    training documents of all texts, None without any; `digest` changes with any content.
    """

    tokenizer: Tokenizer
    train: tuple[Pool, ...]
    validation: tuple[Pool, ...]
    weights: tuple[float, ...]
    train_documents: Stream | None
    digest: str


def load_corpus(config: DataConfig, cache_dir: str | Path) -> Corpus:
    """Find, tokenise (or take from `cache_dir`) and split the sources of `config`.

    Read once in a process. Raises `ValueError` with one line for a source, tokenizer or split that
    cannot be.
    """
    relevant = ("sources", "weights", "tokenizer", "jsonl_field", "validation_fraction")
    return _load_corpus(*(getattr(config, name) for name in relevant), Path(cache_dir))


class TrainIterator(grain.DatasetIterator):
    """Batches of training rows without end.

    Its state, `get_state()`, is a small dict; orbax saves and restores the iterator itself as a
    checkpointable. A state of another corpus is refused.
    """

    def __init__(self, batches: grain.MapDataset, digest: str, epochs_per_batch: float) -> None:
        super().__init__(iter(batches.to_iter_dataset(PREFETCH)))
        self._digest = digest
        self._epochs_per_batch = epochs_per_batch

    def __next__(self) -> Batch:
        return next(self._parent)

    @property
    def epoch(self) -> float:
        """Tokens given out so far over tokens in the training documents."""
        return self.get_state()["next_index"] * self._epochs_per_batch

    def get_state(self) -> dict[str, Any]:
        return {"corpus": self._digest, **self._parent.get_state()}

    def set_state(self, state: dict[str, Any]) -> None:
        state = dict(state)
        if (digest := state.pop("corpus")) != self._digest:
            raise ValueError(
                f"data position: saved for corpus {digest}, this is {self._digest}: data.sources, "
                "their text or the tokenizer have changed"
            )
        self._parent.set_state(state)


def make_train_iterator(
    config: DataConfig,
    cache_dir: str | Path,
    *,
    process_index: int = 0,
    process_count: int = 1,
) -> TrainIterator:
    """Training batches `[batch_size / process_count, sequence_length]`, without end.

    The batches of all processes, one below the other in the order of `process_index`, are that of a
    single one, whatever their number.
    """
    source = load_corpus(config, cache_dir)
    rows = _mixed(source.train, source.weights, config.sequence_length, config.seed)
    make = _batch_maker(source.train, config, _share(config, process_index, process_count))
    batches = rows.batch(config.batch_size).map(make)
    total = sum(stream.rows(config.sequence_length) for stream in source.train)
    return TrainIterator(batches, source.digest, config.batch_size / total)


def validation_batches(
    config: DataConfig,
    cache_dir: str | Path,
    count: int,
    *,
    process_index: int = 0,
    process_count: int = 1,
) -> list[Batch]:
    """At most `count` batches of held-out rows, the same at every call, none twice.

    A sample of all held-out rows, mixed by weight. Where they run out the list is shorter, and its
    last batch is filled with rows of padding.
    """
    source = load_corpus(config, cache_dir)
    length, size = config.sequence_length, config.batch_size
    pools = zip(source.validation, source.weights, strict=True)
    held = [(pool, weight) for pool, weight in pools if pool.rows(length) > 0]
    streams = tuple(stream for stream, _ in held)
    numbers = _mixed(streams, tuple(w for _, w in held), length, _VALIDATION_SEED, epochs=1)
    table = np.stack([numbers[i] for i in range(min(count * size, len(numbers)))])
    batches = -(-len(table) // size)
    table = np.concatenate([table, np.tile([0, 0, -1], (batches * size - len(table), 1))])
    config = dataclasses.replace(config, seed=_VALIDATION_SEED)
    make = _batch_maker(streams, config, _share(config, process_index, process_count))
    return [make(part) for part in table.reshape(batches, size, 3)]


@functools.lru_cache(maxsize=4)
def _load_corpus(
    sources: tuple[str, ...],
    weights: tuple[float, ...],
    tokenizer_name: str,
    jsonl_field: str,
    validation_fraction: float,
    cache_dir: Path,
) -> Corpus:
    tokenizer = load_tokenizer(tokenizer_name)
    texts = [name for name in sources if not name.startswith(PREFIX)]
    if len(texts) < len(sources) > 1 and not weights:
        raise ValueError(
            f"data.weights = (): must have an entry for each of data.sources = {sources}, since "
            "one of them is a task"
        )
    stores = [token_store(corpus.find(name), tokenizer, cache_dir, jsonl_field) for name in texts]
    held_out = _held_out(stores, validation_fraction)
    for name, mask in zip(texts, held_out, strict=True):
        if weights and mask.all():
            raise ValueError(
                f"data.sources = {name!r}: all of its {len(mask)} documents are held out, it needs "
                "more documents or a smaller data.validation_fraction"
            )

    frame = tokenizer.bos_id, tokenizer.eos_id
    train = list(zip(stores, (~mask for mask in held_out), strict=True))
    validation = list(zip(stores, held_out, strict=True))

    def pools(side: str, parts: list[tuple[TokenStore, np.ndarray]]) -> tuple[Pool, ...]:
        if texts and not weights:
            return (Stream.of(parts, *frame),)
        own = iter(parts)
        return tuple(
            parse(name, tokenizer, _seed(0, side, number))
            if name.startswith(PREFIX)
            else Stream.of([next(own)], *frame)
            for number, name in enumerate(sources)
        )

    content = [*(s.digest for s in stores), *(s for s in sources if s not in texts)]
    return Corpus(
        tokenizer=tokenizer,
        train=pools("train", train),
        validation=pools("validation", validation),
        weights=weights or (1.0,),
        train_documents=Stream.of(train, *frame) if texts else None,
        digest=hashlib.sha256(" ".join(content).encode()).hexdigest()[:16],
    )


def _held_out(stores: list[TokenStore], fraction: float) -> list[np.ndarray]:
    """Which documents of each store are held out, by the hashes of all of them."""
    if not stores:
        return []
    mask = validation_mask(np.concatenate([store.hashes for store in stores]), fraction)
    return np.split(mask, np.cumsum([len(store.hashes) for store in stores])[:-1])


def _mixed(
    streams: tuple[Pool, ...],
    weights: tuple[float, ...],
    length: int,
    seed: int,
    epochs: int | None = None,
) -> grain.MapDataset:
    """Rows as `[pool, epoch, row]` int64, shuffled within each epoch and mixed by weight."""

    def of_pool(pool: int, rows: int) -> grain.MapDataset:
        shuffled = grain.MapDataset.range(rows).shuffle(seed=_seed(seed, "rows", pool))
        return shuffled.repeat(epochs or _ENDLESS // rows).map_with_index(
            lambda index, number: np.array([pool, index // rows, number])
        )

    pools = [of_pool(pool, stream.rows(length)) for pool, stream in enumerate(streams)]
    return grain.MapDataset.mix(pools, weights)


def _batch_maker(
    streams: tuple[Pool, ...], config: DataConfig, share: slice
) -> Callable[[np.ndarray], Batch]:
    """Reads the rows `share` of a batch of row numbers `[rows, 3]`; a negative one is padding."""
    length = config.sequence_length

    @functools.lru_cache(maxsize=2 * len(streams))  # rows of a batch may straddle two epochs
    def stream_of(pool: int, epoch: int) -> Pool:
        return streams[pool].epoch(_seed(config.seed, "documents", pool, epoch))

    def make(numbers: np.ndarray) -> Batch:
        mine = numbers[share]
        tokens, segment_ids = np.zeros((2, len(mine), length + 1), np.int32)
        loss_mask = np.ones((len(mine), length + 1), bool)
        for pool, epoch in np.unique(mine[:, :2], axis=0).tolist():
            here = np.flatnonzero((mine[:, :2] == (pool, epoch)).all(1))
            rows = stream_of(pool, epoch).read_rows(mine[here, 2], length)
            tokens[here], segment_ids[here], loss_mask[here] = rows
        return shift(tokens, segment_ids, loss_mask)

    return make


def _share(config: DataConfig, process_index: int, process_count: int) -> slice:
    if not 0 <= process_index < process_count:
        raise ValueError(f"process_index = {process_index}: must be in [0, {process_count})")
    if config.batch_size % process_count:
        raise ValueError(
            f"data.batch_size = {config.batch_size}: must divide by the {process_count} processes"
        )
    rows = config.batch_size // process_count
    return slice(process_index * rows, (process_index + 1) * rows)


def _seed(seed: int, *path: int | str) -> int:
    """A 32-bit seed for one use of `seed`."""
    digest = hashlib.sha256(repr((seed, *path)).encode()).digest()
    return int.from_bytes(digest[:4], "little")
