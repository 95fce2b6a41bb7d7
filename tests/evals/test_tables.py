"""Tables of scores, against sums written out, and suites against models that know the answers."""

import numpy as np
import pytest

from k3jax.data.packing import shift
from k3jax.data.tokenizer import load_tokenizer
from k3jax.evals import suites
from k3jax.evals.tables import Scores, binned, document_places, doubling_bins


def test_places_in_documents():
    position, length = document_places(np.array([[1, 1, 1, 0, 2, 2], [0, 1, 3, 3, 3, 3]]))
    assert position.tolist() == [[0, 1, 2, 0, 0, 1], [0, 0, 0, 1, 2, 3]]
    assert length.tolist() == [[3, 3, 3, 0, 2, 2], [0, 1, 4, 4, 4, 4]]


def test_doubling_bins_hold_every_place():
    for largest in (0, 1, 2, 7, 8, 1000):
        edges = doubling_bins(largest)
        assert edges[:2].tolist() == [0, 1] and edges[-1] > largest
        assert (edges[2:] == 2 * edges[1:-1]).all()


def test_bins_are_sums_over_sums():
    rng = np.random.default_rng()
    keys = rng.integers(0, 9, (5, 7))
    total, weight = rng.random((2, 5, 7))
    weight[keys == 3] = 0
    found = binned(keys, np.array([0, 2, 3, 4, 8]), total, weight)
    assert [(entry["from"], entry["to"]) for entry in found] == [(0, 2), (2, 3), (4, 8)]
    for entry in found:
        inside = (keys >= entry["from"]) & (keys < entry["to"])
        assert entry["weight"] == pytest.approx(weight[inside].sum())
        assert entry["mean"] == pytest.approx(total[inside].sum() / weight[inside].sum())


def oracle(known):
    """Scores of a model that is right where `known(batch)` says so."""

    def score(batch):
        correct = known(batch)
        return Scores(
            nll=np.where(correct, 0.5, 2.0),
            correct=correct,
            **{name: batch[name] for name in ("weights", "segment_ids", "targets")},
        )

    return score


def test_a_task_is_scored_by_length_and_position():
    def first_half(batch):
        places = np.arange(batch["targets"].shape[1])
        return np.broadcast_to(places < places.size * 3 // 4, batch["targets"].shape)

    bytes_ = load_tokenizer("bytes")
    found = suites.task(oracle(first_half), "task:palindrome", bytes_, [64, 128], rows=5, batch=2)
    assert [entry["length"] for entry in found["lengths"]] == [64, 128]
    for entry in found["lengths"]:
        assert entry["answers"] == 5 * ((entry["length"] - 1) // 2)
        assert entry["accuracy"] == pytest.approx(0.5, abs=0.05)
        means = [cell["mean"] for cell in entry["by_position"]]
        assert means[0] == 1 and means[-1] == 0


def test_a_needle_is_asked_for_at_every_depth():
    bytes_ = load_tokenizer("bytes")
    asked = []

    def known(batch):
        asked.append(batch["inputs"])
        return np.ones(batch["targets"].shape, bool)

    found = suites.task(oracle(known), "task:needle", bytes_, [64], rows=2, batch=2)
    depths = found["lengths"][0]["by_depth"]
    assert [(cell["depth"], cell["accuracy"]) for cell in depths] == [
        (depth, 1.0) for depth in suites.DEPTHS
    ]
    assert len({rows.tobytes() for rows in asked}) == 1 + len(suites.DEPTHS)


def test_perplexity_by_position_and_length():
    rng = np.random.default_rng()
    tokens = rng.integers(0, 256, (3, 33))
    segment_ids = np.repeat([[1, 2, 0]], [9, 20, 4], axis=1) * np.ones((3, 1), int)
    batch = shift(tokens, segment_ids)
    token_bytes = load_tokenizer("bytes").token_bytes
    found = suites.perplexity(oracle(lambda b: b["segment_ids"] == 1), [batch, batch], token_bytes)
    counted = 2 * 3 * (8 + 19)
    assert found["tokens"] == counted
    assert found["nats_per_token"] == pytest.approx((8 * 0.5 + 19 * 2.0) / 27)
    assert found["bits_per_byte"] == pytest.approx(found["nats_per_token"] / np.log(2))
    short, long = found["by_length"]
    assert (short["from"], long["from"]) == (8, 16)
    assert short["mean"] == pytest.approx(0.5 / np.log(2))
    assert long["mean"] == pytest.approx(2 / np.log(2))
