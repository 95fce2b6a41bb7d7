"""Rows of documents: each transition once, none across documents."""

import itertools

import numpy as np
import pytest

from k3jax.data.packing import Stream, shift
from k3jax.data.tokens import TokenStore

BOS, EOS = 300, 301


def store_of(documents: list[list[int]], ignored: list[list[bool]] | None = None) -> TokenStore:
    return TokenStore(
        tokens=np.array([t for d in documents for t in d], np.uint16),
        offsets=np.cumsum([0, *map(len, documents)]),
        hashes=np.arange(len(documents), dtype=np.uint64),
        ignored=None if ignored is None else np.array([i for d in ignored for i in d], bool),
        digest="",
    )


def stream_of(*stores: TokenStore) -> Stream:
    return Stream.of([(s, np.ones(len(s.hashes), bool)) for s in stores], BOS, EOS)


def test_shift_by_hand():
    batch = shift(
        np.array([[5, 6, 7, 8, 9, 0, 0]]),
        np.array([[1, 1, 1, 2, 2, 0, 0]]),
        np.array([[0, 1, 0, 1, 1, 1, 1]]),
    )
    assert batch["inputs"].tolist() == [[5, 6, 7, 8, 9, 0]]
    assert batch["targets"].tolist() == [[6, 7, 8, 9, 0, 0]]
    assert batch["weights"].tolist() == [[1, 0, 0, 1, 0, 0]]
    assert batch["segment_ids"].tolist() == [[1, 1, 1, 2, 2, 0]]
    assert [a.dtype for a in batch.values()] == [np.int32, np.int32, np.float32, np.int32]
    unmasked = shift(np.array([5, 6, 7, 8]), np.array([1, 1, 0, 1]))
    assert unmasked["weights"].tolist() == [1, 0, 0]  # nothing is predicted from or at padding


def test_rows_by_hand():
    stream = stream_of(store_of([[1, 2], [3]]))  # B 1 2 E B 3 E
    assert len(stream) == 7 and stream.rows(4) == 2 and stream.rows(3) == 2 and stream.rows(7) == 1
    tokens, segment_ids, loss_mask = stream.read(np.array([0, 4, -1]), 4)
    assert tokens.tolist() == [[BOS, 1, 2, EOS, BOS], [BOS, 3, EOS, 0, 0], [0] * 5]
    assert segment_ids.tolist() == [[1, 1, 1, 1, 2], [1, 1, 1, 0, 0], [0] * 5]
    assert loss_mask.all()
    assert shift(tokens, segment_ids)["weights"].tolist() == [[1, 1, 1, 0], [1, 1, 0, 0], [0] * 4]


@pytest.mark.parametrize("length", [1, 2, 7, 64, 1000])
@pytest.mark.parametrize("seed", range(3))
def test_every_transition_once_and_none_across_documents(length, seed):
    """Tokens are unique, so that a transition tells where it came from."""
    rng = np.random.default_rng([seed, length])
    sizes = np.concatenate([rng.integers(1, 5, 10), rng.integers(1, 60, 10), [1, 250]])
    unique = iter(range(1000, 10_000))
    documents = [[next(unique) for _ in range(n)] for n in rng.permutation(sizes)]
    stream = stream_of(store_of(documents[:9]), store_of(documents[9:]))
    order = rng.permutation(len(documents))
    stream = stream.ordered(order)

    rows = rng.permutation(stream.rows(length))
    batch = shift(*stream.read(rows * length, length))
    kept = batch["weights"] == 1
    seen = sorted(zip(batch["inputs"][kept].tolist(), batch["targets"][kept].tolist(), strict=True))
    framed = [[BOS, *document, EOS] for document in documents]
    assert seen == sorted((a, b) for d in framed for a, b in itertools.pairwise(d))
    assert set(np.unique(batch["weights"])) <= {0, 1}

    ids = batch["segment_ids"]
    real = ids > 0
    last = np.argmax(rows)
    assert real[np.arange(len(rows)) != last].all()  # padding ends the last row alone
    assert (np.diff(real[last].astype(int)) <= 0).all()
    assert (ids[:, 0] == 1).all() and np.isin(np.diff(ids, axis=1)[real[:, 1:]], [0, 1]).all()
    owner = {t: i for i, d in enumerate(documents) for t in d}
    for inputs, segments in zip(batch["inputs"].tolist(), ids.tolist(), strict=True):
        owners = {}
        for token, segment in zip(inputs, segments, strict=True):
            if token in owner:
                assert owners.setdefault(segment, owner[token]) == owner[token]


def test_neighbouring_rows_overlap_by_one_token():
    stream = stream_of(store_of([list(range(50))]))
    tokens, _, _ = stream.read(8 * np.arange(stream.rows(8)), 8)
    np.testing.assert_array_equal(tokens[1:, 0], tokens[:-1, -1])


def test_loss_masks_reach_the_weights_and_eos_follows_the_last_token():
    documents = [[1, 2, 3], [4, 5], [6]]
    masked = store_of(documents, [[True, False, False], [False, True], [False]])
    stream = stream_of(store_of([[7, 8]]), masked)
    batch = shift(*stream.read(np.array([0]), len(stream) - 1))
    learned = batch["targets"][batch["weights"] == 1].tolist()
    assert learned == [7, 8, EOS, 2, 3, EOS, 4, 6, EOS]
