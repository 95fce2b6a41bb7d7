"""Per-token scores into small tables: means over bins of position, length or depth.

Scores come as arrays `[N, T]` over rows, with `weights` that say which tokens count. Everything is
summed in float64.
"""

from __future__ import annotations

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class Scores:
    """What a model made of some rows; all arrays are `[N, T]`.

    nll: nats of each target. correct: whether the target is the most probable token. weights: 1
    where the target counts. segment_ids: documents of the inputs, as in a batch. targets: int32.
    """

    nll: np.ndarray
    correct: np.ndarray
    weights: np.ndarray
    segment_ids: np.ndarray
    targets: np.ndarray

    @classmethod
    def joined(cls, parts: list[Scores]) -> Scores:
        """The rows of all parts, which have one length."""
        fields = [field.name for field in dataclasses.fields(cls)]
        return cls(*(np.concatenate([getattr(p, name) for p in parts]) for name in fields))

    @property
    def accuracy(self) -> float:
        """The share of counted targets that are the most probable token; NaN where none counts."""
        return _ratio(float(np.sum(self.correct * self.weights)), float(np.sum(self.weights)))

    def bits_per_byte(self, token_bytes: np.ndarray) -> float:
        """Bits of the counted targets over the bytes of text they stand for."""
        bits = float(np.sum(self.nll * self.weights, dtype=np.float64)) / np.log(2)
        return _ratio(bits, float(np.sum(token_bytes[self.targets] * self.weights)))


def document_places(segment_ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """`(position, length)`, `[N, T]` each: where a token stands in its document, of how many.

    Counted within the row; both are 0 at padding.
    """
    position, length = np.zeros((2, *segment_ids.shape), np.int64)
    for row, ids in enumerate(segment_ids):
        for document in np.unique(ids[ids > 0]):
            places = np.flatnonzero(ids == document)
            position[row, places], length[row, places] = np.arange(len(places)), len(places)
    return position, length


def doubling_bins(largest: int) -> np.ndarray:
    """Edges 0, 1, 2, 4, 8 ... of bins `[edge, next edge)` that hold 0 .. `largest`."""
    return np.concatenate([[0], 1 << np.arange(int(largest).bit_length() + 1)])


def binned(
    keys: np.ndarray, edges: np.ndarray, total: np.ndarray, weight: np.ndarray
) -> list[dict[str, float]]:
    """`total / weight` summed over each bin of `keys`; bins without weight are left out.

    Each entry has `from`, `to` (exclusive), `mean` and `weight`.
    """
    place = np.digitize(keys.ravel(), edges) - 1
    bins = len(edges) - 1
    inside = (place >= 0) & (place < bins)
    sums = [
        np.bincount(place[inside], np.asarray(x, np.float64).ravel()[inside], bins)
        for x in (total, weight)
    ]
    return [
        {"from": low.item(), "to": high.item(), "mean": (top / bottom).item(), "weight": bottom}
        for low, high, top, bottom in zip(edges[:-1], edges[1:], *sums, strict=True)
        if bottom > 0
    ]


def _ratio(top: float, bottom: float) -> float:
    return top / bottom if bottom else float("nan")
