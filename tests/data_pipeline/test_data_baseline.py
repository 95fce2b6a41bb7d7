"""The two-byte model against counting by hand."""

import itertools
import math

import numpy as np
import pytest

from k3jax.config import DataConfig
from k3jax.data.baseline import Counts, InterpolatedTrigram, _weight, baseline_bits_per_byte
from k3jax.data.packing import shift
from k3jax.data.pipeline import load_corpus, validation_batches

A, B, C = 97, 98, 99


def rows(*documents: list[int]) -> dict[str, np.ndarray]:
    tokens = np.array([t for d in documents for t in d])
    ids = np.concatenate([np.full(len(d), i) for i, d in enumerate(documents, 1)])
    return shift(tokens[None], ids[None])


def test_probabilities_by_hand():
    counts = Counts()
    counts.add(rows([A, B, A, C, A, B], [B, B]))  # after a: b c b; after b: a b; after c: a
    model = InterpolatedTrigram(counts, (0.8, 0.7, 0.6))
    p1 = {s: 0.8 * n / 6 + 0.2 / 257 for s, n in {A: 2, B: 3, C: 1, 0: 0}.items()}

    def p2(c, after, seen):
        return 0.7 * after / seen + 0.3 * p1[c]

    batch = rows([A, B, A, B], [A], [C, A], [B, B, B], [256, 0])
    expected = [
        p2(B, 2, 3),  # a -> b, nothing before a
        0.6 * 1 + 0.4 * p2(A, 1, 2),  # ab -> a: the only ab that has something after it
        0.6 * 0 + 0.4 * p2(B, 2, 3),  # ba -> b: seen once, followed by c
        None,
        None,
        p2(A, 1, 1),  # c -> a, what stands before c is another document's
        None,
        p2(B, 1, 2),
        p2(B, 1, 2),  # bb -> b: bb was seen only across documents
        None,
        p1[0],  # nothing seen after 256: a context without a say
    ]
    found = model.probability(batch)[0]
    for value, want in zip(found, expected, strict=True):
        assert want is None or value == pytest.approx(want, rel=1e-12)
    want = -sum(math.log2(p) for p in expected if p is not None)
    assert model.bits_per_byte([batch, batch]) == pytest.approx(want / 7, rel=1e-6)


def test_eos_costs_bits_but_is_no_byte():
    counts = Counts()
    counts.add(rows([A, B, 256]))
    model = InterpolatedTrigram(counts, (0.5, 0.5, 0.5))
    batch = rows([A, B, 256])
    assert model.bits_per_byte([batch]) == pytest.approx(-np.log2(model.probability(batch)).sum())


def test_probabilities_sum_to_one_after_any_context():
    rng = np.random.default_rng(0)
    counts = Counts()
    counts.add(rows(*(rng.integers(0, 257, n).tolist() for n in (200, 3, 90))))
    model = InterpolatedTrigram(counts, (0.9, 0.5, 0.25))
    for a, b in itertools.product([0, 17, 256], [3, 200]):
        every = np.array([[a, b, c] for c in range(257)])
        batch = shift(every, np.ones_like(every))
        assert model.probability(batch)[:, 1].sum() == pytest.approx(1, rel=1e-12)


def test_em_finds_the_best_weight():
    rng = np.random.default_rng(0)
    high, low = rng.random((2, 4000)) * [[1], [0.3]]
    high[rng.random(4000) < 0.3] = 0
    seen = rng.random(4000) < 0.9
    grid = np.linspace(0.001, 0.999, 999)[:, None]
    best = np.log(grid * high[seen] + (1 - grid) * low[seen]).sum(1).argmax()
    assert _weight(high, low, seen) == pytest.approx(grid[best, 0], abs=0.002)
    assert 0 < _weight(np.ones(3), np.full(3, 1e-9), np.ones(3, bool)) < 1
    assert _weight(np.ones(3), np.ones(3), np.zeros(3, bool)) == 0


def test_fit_on_a_source_of_known_entropy(tmp_path):
    """Each letter is one of two, chosen by the two before it: one bit per byte."""
    rng = np.random.default_rng(0)
    for i in range(60):
        text = [A, A]
        for bit in rng.integers(0, 2, 1500):
            text.append(A + (text[-1] * 3 + text[-2] * 7 + 5 * int(bit)) % 16)
        (tmp_path / f"{i}.txt").write_bytes(bytes(text))
    config = DataConfig(sources=(str(tmp_path),), sequence_length=512, batch_size=2)
    batches = validation_batches(config, tmp_path / ".cache", 1000)
    bits = baseline_bits_per_byte(config, tmp_path / ".cache", batches)
    assert 1 < bits < 1.05
    model = InterpolatedTrigram.fit(load_corpus(config, tmp_path / ".cache").train_documents)
    assert model.weights[2] > 0.95
    total = load_corpus(config, tmp_path / ".cache").train_documents
    assert model.counts.after1.sum() == len(total) - len(total.ends)  # all transitions, once


def test_only_bytes(tmp_path):
    with pytest.raises(ValueError, match=r"data\.tokenizer = 'x\.json': must be bytes"):
        baseline_bits_per_byte(DataConfig(tokenizer="x.json"), tmp_path, [])


@pytest.mark.full
def test_the_standard_library_costs_about_two_and_a_half_bits(tmp_path):
    config = DataConfig()
    batches = validation_batches(config, tmp_path, 50)
    assert 2.3 < baseline_bits_per_byte(config, tmp_path, batches) < 2.7
