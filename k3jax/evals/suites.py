"""Suites of evaluations: each gives a small dict that reads as JSON and plots as a figure.

A suite takes `score`, a function from a batch (a dict of `[N, T]` arrays, as `k3jax.data.packing`
makes it) to `Scores`. Rows are drawn with a seed of their own: every model is asked the same.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from k3jax.data.packing import Batch, shift
from k3jax.data.tasks import Needle, TaskPool, parse
from k3jax.data.tokenizer import Tokenizer
from k3jax.evals.tables import Scores, binned, document_places, doubling_bins

type Score = Callable[[Batch], Scores]

SEED = 20_260_101  # not a training seed: those are below 2^32 and are mixed with "train"
POSITIONS = 8  # bins of an answer's place in its document
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)


def perplexity(score: Score, batches: Iterable[Batch], token_bytes: np.ndarray) -> dict[str, Any]:
    """Held-out text: bits per byte, overall, by position and by the document's length.

    `by_position`: nats per token against the token's place in its document (as far as it lies in
    the row), in doubling bins. `by_length`: bits per byte against the tokens that its document has
    in the row.
    """
    scores = Scores.joined([score(batch) for batch in batches])
    position, length = document_places(scores.segment_ids)
    edges = doubling_bins(scores.nll.shape[1])
    weights = scores.weights
    nll = scores.nll * weights
    size = token_bytes[scores.targets] * weights
    return {
        "tokens": int(weights.sum()),
        "nats_per_token": float(nll.sum(dtype=np.float64) / max(weights.sum(), 1)),
        "bits_per_byte": scores.bits_per_byte(token_bytes),
        "by_position": binned(position, edges, nll, weights),
        "by_length": binned(length, edges, nll / np.log(2), size),
    }


def task(
    score: Score,
    source: str,
    tokenizer: Tokenizer,
    lengths: Sequence[int],
    rows: int,
    batch: int,
) -> dict[str, Any]:
    """A task of `k3jax.data.tasks` at each of `lengths`: accuracy, overall and by position.

    `source` reads `task:NAME:option=value...`. A needle is asked for at each of `DEPTHS` too. Every
    length sees `rows` rows of one document, in batches of `batch`.
    """
    pool = parse(source, tokenizer, SEED)
    table = []
    for length in lengths:
        scores = _answers(score, pool, length, rows, batch)
        position, _ = document_places(scores.segment_ids)
        edges = np.linspace(0, length, POSITIONS + 1).round().astype(int)
        entry: dict[str, Any] = {
            "length": length,
            "accuracy": scores.accuracy,
            "answers": int(scores.weights.sum()),
            "by_position": binned(position, edges, scores.correct * scores.weights, scores.weights),
        }
        if isinstance(pool.task, Needle) and pool.task.depth < 0:
            entry["by_depth"] = []
            for depth in DEPTHS:
                at = dataclasses.replace(pool, task=dataclasses.replace(pool.task, depth=depth))
                accuracy = _answers(score, at, length, rows, batch).accuracy
                entry["by_depth"].append({"depth": depth, "accuracy": accuracy})
        table.append(entry)
    return {"source": source, "rows": rows, "lengths": table}


def _answers(score: Score, pool: TaskPool, length: int, rows: int, batch: int) -> Scores:
    numbers = np.arange(-(-rows // batch) * batch)
    numbers[rows:] = -1  # the last batch is filled with rows of padding
    parts = [score(shift(*pool.read(part, length))) for part in numbers.reshape(-1, batch)]
    return Scores.joined(parts)
