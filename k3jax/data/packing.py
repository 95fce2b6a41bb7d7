"""Documents packed into rows, so that each transition is predicted once.

The documents of an epoch, each framed by bos and eos, stand one after another in a stream. Row r of
length T is its tokens `r * T` to `(r + 1) * T`, one more than T: inputs and targets are that row
without its last and without its first token. Rows overlap by one token, so each neighbouring pair
of the stream lies in exactly one row, and so does each transition within a document, however long;
pairs of two documents weigh zero. Nothing is padded but the end of the last row, and any row can be
read at once from its first token: a position in an epoch is one number. The price is that a row
begins wherever the cut falls, without what its document said before.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from k3jax.data.tokens import TokenStore

type Batch = dict[str, np.ndarray]


def shift(
    tokens: np.ndarray, segment_ids: np.ndarray, loss_mask: np.ndarray | None = None
) -> Batch:
    """Rows of T + 1 tokens to what a training step reads.

    Args: `tokens [..., T + 1]`; `segment_ids [..., T + 1]`, 0 is padding; `loss_mask [..., T + 1]`,
    whether a token is learned where it is a target, all by default.

    Returns a dict of `[..., T]` arrays: `inputs`, `targets`, `segment_ids` (of the inputs), int32,
    and `weights` float32: 1 where the target belongs to the document of its input and is learned.
    """
    before, after = segment_ids[..., :-1], segment_ids[..., 1:]
    predicted = (before == after) & (after > 0)
    if loss_mask is not None:
        predicted &= loss_mask[..., 1:].astype(bool)
    return {
        "inputs": tokens[..., :-1].astype(np.int32),
        "targets": tokens[..., 1:].astype(np.int32),
        "weights": predicted.astype(np.float32),
        "segment_ids": before.astype(np.int32),
    }


@dataclasses.dataclass(frozen=True)
class Stream:
    """Documents one after another, each framed by bos and eos.

    `store [n]`: which of `stores` has document i; `start [n]`: where its tokens begin there;
    `ends [n]` int64: where it ends in the stream, frame included; `hashes [n]` of the texts.
    """

    stores: tuple[TokenStore, ...]
    bos_id: int
    eos_id: int
    store: np.ndarray
    start: np.ndarray
    ends: np.ndarray
    hashes: np.ndarray

    @classmethod
    def of(cls, parts: Sequence[tuple[TokenStore, np.ndarray]], bos_id: int, eos_id: int) -> Stream:
        """The documents of each store where the bool `[documents]` beside it says so."""
        lengths = [np.diff(store.offsets)[chosen] + 2 for store, chosen in parts]
        return cls(
            stores=tuple(store for store, _ in parts),
            bos_id=bos_id,
            eos_id=eos_id,
            store=np.repeat(np.arange(len(parts), dtype=np.int32), [len(n) for n in lengths]),
            start=np.concatenate([store.offsets[:-1][chosen] for store, chosen in parts]),
            ends=np.cumsum(np.concatenate(lengths)),
            hashes=np.concatenate([store.hashes[chosen] for store, chosen in parts]),
        )

    def __len__(self) -> int:
        """Tokens, frames included."""
        return int(self.ends[-1]) if len(self.ends) else 0

    def ordered(self, order: np.ndarray) -> Stream:
        """The same documents in the order of indices `order [n]`."""
        return dataclasses.replace(
            self,
            store=self.store[order],
            start=self.start[order],
            ends=np.cumsum(np.diff(self.ends, prepend=0)[order]),
            hashes=self.hashes[order],
        )

    def epoch(self, seed: int) -> Stream:
        """The same documents, shuffled."""
        return self.ordered(np.random.default_rng(seed).permutation(len(self.ends)))

    def rows(self, length: int) -> int:
        """Rows of `length` predictions that hold the whole stream."""
        return -(-(len(self) - 1) // length)

    def read(self, starts: np.ndarray, length: int) -> tuple[np.ndarray, ...]:
        """Rows of `length` predictions from tokens `starts [R]` on; a negative one gives padding.

        Returns `(tokens, segment_ids, loss_mask)`, each `[R, length + 1]`, int32, int32, bool, as
        `shift` takes them; documents are numbered from 1 in each row, padding is 0.
        """
        position = starts[:, None] + np.arange(length + 1)
        real = (starts >= 0)[:, None] & (position < len(self))
        position = np.where(real, position, 0)
        document = np.searchsorted(self.ends, position, "right")
        segment_ids = np.where(real, document - document[:, :1] + 1, 0)

        start, end = np.where(document > 0, self.ends[document - 1], 0), self.ends[document]
        index = self.start[document] + np.clip(position - start - 1, 0, end - start - 3)
        owner = self.store[document]
        tokens, loss_mask = np.zeros(position.shape, np.int32), np.ones(position.shape, bool)
        for number, store in enumerate(self.stores):
            mine = owner == number
            tokens[mine] = store.tokens[index[mine]]
            if store.ignored is not None:  # eos is learned where the last token is
                loss_mask[mine] = ~store.ignored[index[mine]]
        tokens[position == start] = self.bos_id
        tokens[position == end - 1] = self.eos_id
        return np.where(real, tokens, 0), segment_ids.astype(np.int32), loss_mask
