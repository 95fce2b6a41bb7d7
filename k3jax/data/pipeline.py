"""From `DataConfig` to batches: a grain pipeline whose position is one number.

An epoch of a pool of documents is a shuffled stream cut into rows (`k3jax.data.packing`), and the
rows are shuffled again, so that a batch is not made of neighbours. Every epoch has its own order.
The pipeline works on row numbers, which grain shuffles, repeats, mixes and batches by arithmetic;
tokens are read from the memory map only for the rows that a process owns. So any batch can be made
from its number, and a restored iterator continues at once with the batch that would have come.

Without `weights` the documents of all sources form one pool: each transition comes once per epoch.
With weights each source is a pool, and every row is of one source. A task (`k3jax.data.tasks`) is a
pool of its own.

A stage of longer rows goes on in the stream where the one before it ended, in each pool: a stage is
given its stretch of the stream as a whole, cut into its rows and shuffled within itself. So no
transition comes twice in an epoch and none is lost, whatever the lengths.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import hashlib
import itertools
import json
import re
from collections.abc import Awaitable, Callable
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

    def __init__(
        self, batches: grain.MapDataset, digest: str, epochs: Callable[[int], float]
    ) -> None:
        super().__init__(iter(batches.to_iter_dataset(PREFETCH)))
        self._digest = digest
        self._epochs = epochs

    def __next__(self) -> Batch:
        return next(self._parent)

    @property
    def epoch(self) -> float:
        """Tokens given out so far over tokens in the training documents."""
        return self._epochs(self.get_state()["next_index"])

    def get_state(self) -> dict[str, Any]:
        return {"corpus": self._digest, **self._parent.get_state()}

    async def load(self, directory: Any) -> Awaitable[None]:
        """As orbax asks for it, from a checkpoint of any number of processes: all save the same."""

        async def read() -> None:
            file = next(directory.glob("process_0-of-*.json"))
            self.set_state(json.loads(await asyncio.to_thread(file.read_text)))

        return read()

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
    """Training batches `[batch_size / process_count, sequence_length]` of each stage, without end.

    Batch i is that of step i + 1. The batches of all processes, one below the other in the order of
    `process_index`, are that of a single one, whatever their number.
    """
    source = load_corpus(config, cache_dir)
    stages = config.schedule()
    parts, places = [], [_Place(0, 0)] * len(source.train)
    for number, stage in enumerate(stages):
        now = config.during(stage)
        steps = stages[number + 1].start - stage.start if stage != stages[-1] else None
        make = _batch_maker(source.train, now, _share(now, process_index, process_count))
        counts = None if steps is None else _counts(source.weights, steps * stage.batch_size)
        pools = [
            grain.MapDataset.concatenate(
                [
                    *_rows(
                        pool, stream, place, now, None if counts is None else counts[pool], number
                    ),
                    # Never read: grain ends a mixture where a pool would, give or take a row.
                    grain.MapDataset.range(1).repeat(_ENDLESS),
                ]
            )
            for pool, (stream, place) in enumerate(zip(source.train, places, strict=True))
        ]
        batches = grain.MapDataset.mix(pools, source.weights).batch(stage.batch_size)
        if counts is not None:
            batches = batches.slice(slice(0, steps))
            places = [
                place.after(count, stream, stage.sequence_length)
                for place, count, stream in zip(places, counts, source.train, strict=True)
            ]
        parts.append(batches.map(make))

    def epochs(batches: int) -> float:
        ends = [*(stage.start for stage in stages[1:]), batches]
        return sum(
            max(min(end, batches) - stage.start, 0)
            * stage.batch_size
            / sum(stream.rows(stage.sequence_length) for stream in source.train)
            for stage, end in zip(stages, ends, strict=True)
        )

    return TrainIterator(grain.MapDataset.concatenate(parts), source.digest, epochs)


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
    rows, _, batches = _sampled(config, cache_dir, count, process_index, process_count)
    return batches(rows)


def validation_by_pool(
    config: DataConfig,
    cache_dir: str | Path,
    count: int,
    *,
    process_index: int = 0,
    process_count: int = 1,
) -> dict[str, list[Batch]]:
    """The rows of `validation_batches`, those of each pool in batches of their own.

    By the names of `pool_names`; a pool without held-out rows is left out.
    """
    rows, names, batches = _sampled(config, cache_dir, count, process_index, process_count)
    parts = {name: rows[rows[:, 0] == pool] for pool, name in enumerate(names)}
    return {name: batches(part) for name, part in parts.items() if len(part)}


def pool_names(config: DataConfig) -> tuple[str, ...]:
    """What the pools of `config` are called: `text`, or the title of a task such as `recall`.

    Texts that are pools of their own, as there are several with weights, are called by the last
    part of their source. A name that comes again gets a number.
    """
    texts = [name for name in config.sources if not name.startswith(PREFIX)]
    if texts and not config.weights:
        return ("text",)
    names: list[str] = []
    for source in config.sources:
        if source.startswith(PREFIX):
            name = source.removeprefix(PREFIX).partition(":")[0]
        else:
            last = Path(source).stem.rpartition(":")[2]
            name = "text" if len(texts) == 1 else re.sub(r"\W+", "_", last)
        numbered = (f"{name}_{number}" for number in itertools.count(2))
        free = (one for one in itertools.chain([name], numbered) if one not in names)
        names.append(next(free))
    return tuple(names)


def _sampled(
    config: DataConfig, cache_dir: str | Path, count: int, process_index: int, process_count: int
) -> tuple[np.ndarray, list[str], Callable[[np.ndarray], list[Batch]]]:
    """A sample of held-out rows, the pools that have any, and what makes batches of such rows.

    The first column of the rows is the place of their pool among the names.
    """
    source = load_corpus(config, cache_dir)
    length, size = config.sequence_length, config.batch_size
    pairs = zip(source.validation, source.weights, pool_names(config), strict=True)
    held = [part for part in pairs if part[0].rows(length) > 0]
    streams = tuple(stream for stream, *_ in held)
    config = dataclasses.replace(config, seed=_VALIDATION_SEED)
    pools = [
        _rows(pool, stream, _Place(0, 0), config, stream.rows(length), 0)[0]
        for pool, stream in enumerate(streams)
    ]
    numbers = grain.MapDataset.mix(pools, tuple(weight for _, weight, _ in held))
    table = np.stack([numbers[i] for i in range(min(count * size, len(numbers)))])
    make = _batch_maker(streams, config, _share(config, process_index, process_count))

    def batches(rows: np.ndarray) -> list[Batch]:
        number = -(-len(rows) // size)
        rows = np.concatenate([rows, np.tile([0, 0, -1], (number * size - len(rows), 1))])
        return [make(part) for part in rows.reshape(number, size, 3)]

    return table, [name for *_, name in held], batches


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


@dataclasses.dataclass(frozen=True)
class _Place:
    """A place in the endless stream of a pool: epoch, and token of that epoch."""

    epoch: int
    token: int

    def left(self, stream: Pool, length: int) -> int:
        """Rows of `length` predictions from here to the end of the epoch."""
        return -(-(len(stream) - 1 - self.token) // length)

    def after(self, rows: int, stream: Pool, length: int) -> _Place:
        """The place `rows` rows later."""
        left, whole = self.left(stream, length), stream.rows(length)
        if rows < left:
            return _Place(self.epoch, self.token + rows * length)
        epochs, rest = divmod(rows - left, whole)
        return _Place(self.epoch + 1 + epochs, rest * length)


def _rows(
    pool: int, stream: Pool, place: _Place, config: DataConfig, count: int | None, stage: int
) -> list[grain.MapDataset]:
    """`count` rows of a pool, or endlessly many, from `place` on: `[pool, epoch, first token]`.

    Each stretch of the stream within one epoch is shuffled within itself.
    """
    length = config.sequence_length
    whole = stream.rows(length)
    stretches = []
    if place.token:
        rows = place.left(stream, length)
        rows = rows if count is None else min(count, rows)
        stretches.append((place, rows, 1))
        place = place.after(rows, stream, length)
        count = None if count is None else count - rows
    epochs = _ENDLESS // whole if count is None else count // whole
    stretches.append((place, whole, epochs))
    if count is not None:
        stretches.append((_Place(place.epoch + epochs, 0), count % whole, 1))

    def shuffled(number: int, place: _Place, rows: int, times: int) -> grain.MapDataset:
        seed = _seed(config.seed, "rows", pool, *((stage, number) if stage else ()))
        order = grain.MapDataset.range(rows).shuffle(seed=seed).repeat(times)
        return order.map_with_index(
            lambda index, row: np.array(
                [pool, place.epoch + index // rows, place.token + row * length]
            )
        )

    return [shuffled(i, *parts) for i, parts in enumerate(stretches) if parts[1] and parts[2]]


def _counts(weights: tuple[float, ...], rows: int) -> list[int]:
    """How many of the first `rows` rows of a mixture come from each pool."""
    pools = [
        grain.MapDataset.range(_ENDLESS).map(lambda row, pool=pool: (pool, row))
        for pool in range(len(weights))
    ]
    mixed, counts = grain.MapDataset.mix(pools, weights), [0] * len(weights)
    for index in reversed(range(rows)):  # the last row of each pool says how many there were
        pool, row = mixed[index]
        counts[pool] = counts[pool] or row + 1
        if sum(counts) == rows:
            break
    return counts


def _batch_maker(
    streams: tuple[Pool, ...], config: DataConfig, share: slice
) -> Callable[[np.ndarray], Batch]:
    """Reads the rows `share` of a batch `[rows, 3]` of `_rows`; a negative place is padding."""
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
            rows = stream_of(pool, epoch).read(mine[here, 2], length)
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
