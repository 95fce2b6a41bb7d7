"""What counting alone reaches: an interpolated model of two-byte contexts.

    p1(c)         = a1 count(c) / count()         + (1 - a1) / 257
    p2(c | b)     = a2 count(b c) / count(b)      + (1 - a2) p1(c)
    p3(c | a b)   = a3 count(a b c) / count(a b)  + (1 - a3) p2(c | b)

where a context that was never seen has no say (its weight is 0). The weights are those under which
held-out training documents are most probable, found by EM from the shortest context up (Jelinek
and Mercer 1980); then all training documents are counted. A context does not reach into another
document or another row, so the model is asked exactly what a decoder is asked.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from k3jax.config import DataConfig
from k3jax.data.packing import Batch, Stream, shift
from k3jax.data.pipeline import load_corpus
from k3jax.data.tokenizer import ByteTokenizer

SYMBOLS = ByteTokenizer.vocab_size
HELD_OUT = 0.1  # of the training tokens, to fit the weights on,
_BLOCK = 1 << 20  # or fewer, of this many transitions; as many are counted at a time


def baseline_bits_per_byte(
    config: DataConfig, cache_dir: str | Path, batches: Iterable[Batch]
) -> float:
    """Bits per byte on `batches` of the model fitted to the training documents of `config`.

    Documents count by their tokens, whatever `config.weights`. Raises `ValueError` unless
    `data.tokenizer` is `bytes`.
    """
    documents = load_corpus(config, cache_dir).train_documents
    if config.tokenizer != "bytes":
        raise ValueError(
            f"data.tokenizer = {config.tokenizer!r}: must be bytes for the two-byte baseline"
        )
    if documents is None:
        raise ValueError(f"data.sources = {config.sources}: no text for the two-byte baseline")
    return InterpolatedTrigram.fit(documents).bits_per_byte(batches)


class Counts:
    """How often each symbol came after each context of one and of two symbols.

    `after1 [V, V]`, `after2 [V, V, V]`, and how often each context of two came, `seen2 [V, V]`,
    int32. A transition without a second symbol of context is in the first alone.
    """

    def __init__(self) -> None:
        self.after1, self.seen2 = np.zeros((2, SYMBOLS, SYMBOLS), np.int32)
        self.after2 = np.zeros((SYMBOLS, SYMBOLS, SYMBOLS), np.int32)

    def add(self, batch: Batch) -> None:
        """Count the transitions of `batch` whose weight is not 0."""
        a, b, c = (symbol[batch["weights"] > 0] for symbol in _contexts(batch))
        two = a >= 0
        self.after1 += _histogram(b * SYMBOLS + c)
        pair = (a * SYMBOLS + b)[two]
        self.seen2 += _histogram(pair)
        np.add.at(self.after2.reshape(-1), pair * SYMBOLS + c[two], 1)

    def frequencies(self, batch: Batch) -> list[tuple[np.ndarray, np.ndarray]]:
        """For contexts of 0, 1 and 2 symbols: the target's relative frequency, the context's count.

        Both `[B, T]`; where the count is 0, so is the frequency.
        """
        a, b, c = _contexts(batch)
        two = a >= 0
        counts = (
            (self.after1.sum(0)[c], np.full(c.shape, self.after1.sum())),
            (self.after1[b, c], self.after1.sum(1)[b]),
            (np.where(two, self.after2[a, b, c], 0), np.where(two, self.seen2[a, b], 0)),
        )
        return [(after / np.maximum(seen, 1), seen) for after, seen in counts]


@dataclasses.dataclass(frozen=True)
class InterpolatedTrigram:
    """The model above; `weights` are (a1, a2, a3)."""

    counts: Counts
    weights: tuple[float, float, float]

    @classmethod
    def fit(cls, documents: Stream) -> InterpolatedTrigram:
        """Fit to `documents`, of which a part chosen by hash is held out for the weights."""
        documents = documents.ordered(np.argsort(documents.hashes, kind="stable"))
        length = min(_BLOCK, math.ceil(HELD_OUT * len(documents)))

        def read(index: int) -> Batch:
            return shift(*documents.read(np.array([index * length]), length))

        counts, batch = Counts(), read(0)
        for index in range(1, documents.rows(length)):
            counts.add(read(index))
        kept = batch["weights"] > 0
        p = np.full(np.count_nonzero(kept), 1 / SYMBOLS)
        weights = []
        for frequency, seen in counts.frequencies(batch):
            weights.append(_weight(frequency[kept], p, seen[kept] > 0))
            p = _interpolate(weights[-1], frequency[kept], p, seen[kept] > 0)
        counts.add(batch)
        a1, a2, a3 = weights
        return cls(counts, (a1, a2, a3))

    def probability(self, batch: Batch) -> np.ndarray:
        """`[B, T]` float64: the probability of each target after its context."""
        p = np.full(batch["targets"].shape, 1 / SYMBOLS)
        for weight, (frequency, seen) in zip(
            self.weights, self.counts.frequencies(batch), strict=True
        ):
            p = _interpolate(weight, frequency, p, seen > 0)
        return p

    def bits_per_byte(self, batches: Iterable[Batch]) -> float:
        """-log2 of the probability of weighted targets over the bytes they are; nan without any."""
        bits = size = 0.0
        for batch in batches:
            bits -= float((np.log2(self.probability(batch)) * batch["weights"]).sum())
            size += float((ByteTokenizer.token_bytes[batch["targets"]] * batch["weights"]).sum())
        return bits / size if size else math.nan


def _contexts(batch: Batch) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """`(a, b, c)` `[B, T]`: target c after a b; a is -1 where b is the first of document or row."""
    ids, b = batch["segment_ids"], batch["inputs"]
    a = np.full_like(b, -1)
    a[:, 1:] = np.where(ids[:, 1:] == ids[:, :-1], b[:, :-1], -1)
    return a, b, batch["targets"]


def _histogram(pairs: np.ndarray) -> np.ndarray:
    return np.bincount(pairs, minlength=SYMBOLS**2).reshape(SYMBOLS, SYMBOLS)


def _interpolate(a: float, high: np.ndarray, low: np.ndarray, seen: np.ndarray) -> np.ndarray:
    return np.where(seen, a * high + (1 - a) * low, low)


def _weight(high: np.ndarray, low: np.ndarray, seen: np.ndarray) -> float:
    """The weight a that makes `a high + (1 - a) low`, where `seen`, most probable: EM.

    One more event is taken to come from `low`, so that a stays below 1.
    """
    high, low, a = high[seen], low[seen], 0.5
    for _ in range(50):
        before, a = a, float((a * high / (a * high + (1 - a) * low)).sum()) / (len(high) + 1)
        if abs(a - before) < 1e-5:
            break
    return a
