"""The pipeline: epochs, seeds, mixtures, shards, and a position that is restored exactly."""

import collections
import dataclasses
import itertools
import json
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from orbax.checkpoint import v1 as ocp

from k3jax.config import DataConfig
from k3jax.data import pipeline
from k3jax.data.pipeline import (
    load_corpus,
    make_train_iterator,
    pool_names,
    validation_batches,
    validation_by_pool,
)
from k3jax.data.tokens import text_hash, validation_mask

ROOT = Path(__file__).parents[2]


@pytest.fixture
def config(folder) -> DataConfig:
    return DataConfig(
        sources=(str(folder),), sequence_length=32, batch_size=4, validation_fraction=0.2, seed=3
    )


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


def take(iterator, count):
    return list(itertools.islice(iterator, count))


def assert_equal(left, right):
    assert len(left) == len(right)
    for a, b in zip(left, right, strict=True):
        assert a.keys() == b.keys() == {"inputs", "targets", "weights", "segment_ids"}
        for name in a:
            assert a[name].dtype == b[name].dtype
            np.testing.assert_array_equal(a[name], b[name], err_msg=name)


def joined(parts):
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def transitions(batches):
    """How often each weighted pair of an input and its target occurs."""
    kept = [tuple(b[name][b["weights"] == 1] for name in ("inputs", "targets")) for b in batches]
    inputs, targets = map(np.concatenate, zip(*kept, strict=True))
    return collections.Counter(zip(inputs.tolist(), targets.tolist(), strict=True))


def expected_transitions(folder, validation):
    """The same of the documents themselves, read and split here."""
    texts = [path.read_bytes() for path in sorted(folder.rglob("*.txt"))]
    held = validation_mask(np.array([text_hash(t.decode()) for t in texts], np.uint64), 0.2)
    chosen = [text for text, out in zip(texts, held, strict=True) if out == validation]
    assert 0 < len(chosen) < len(texts)
    return collections.Counter(p for t in chosen for p in itertools.pairwise([256, *t, 256]))


def test_batches_keep_the_contract(config, cache):
    batch = next(make_train_iterator(config, cache))
    assert {name: (a.dtype, a.shape) for name, a in batch.items()} == {
        "inputs": (np.int32, (4, 32)),
        "targets": (np.int32, (4, 32)),
        "weights": (np.float32, (4, 32)),
        "segment_ids": (np.int32, (4, 32)),
    }


def test_each_epoch_has_every_transition_once_in_its_own_order(config, cache, folder):
    config = dataclasses.replace(config, batch_size=1)
    rows = load_corpus(config, cache).train[0].rows(32)
    iterator = make_train_iterator(config, cache)
    epochs = [take(iterator, rows) for _ in range(3)]
    assert iterator.epoch == pytest.approx(3)
    want = expected_transitions(folder, validation=False)
    assert all(transitions(epoch) == want for epoch in epochs)

    rows_of = [[batch["inputs"].tobytes() for batch in epoch] for epoch in epochs]
    assert all(len(set(a) & set(b)) < rows / 2 for a, b in itertools.pairwise(rows_of))
    ordered = [sorted(epoch) for epoch in rows_of]
    assert ordered[0] != ordered[1]  # other rows, not the same ones in another order


def test_neighbouring_rows_of_a_document_do_not_share_a_batch(tmp_path, cache):
    """Rows are shuffled: one long document is not read from end to end."""
    root = tmp_path / "long"
    root.mkdir()
    text = "".join(f"{i:04d}" for i in range(4000))
    (root / "a.txt").write_text(text)
    (root / "b.txt").write_text("b")  # has the lower hash: held out
    config = DataConfig(sources=(str(root),), sequence_length=64, batch_size=1)
    inside = [b for b in take(make_train_iterator(config, cache), 100) if b["inputs"].max() < 256]
    places = np.array([text.find(bytes(b["inputs"][0].tolist()).decode()) for b in inside])
    assert len(places) > 95 and places.min() >= 0
    assert (np.diff(places) == 64).sum() < 5


def test_the_order_depends_on_the_seed_alone(config, cache):
    def batches(seed):
        return take(make_train_iterator(dataclasses.replace(config, seed=seed), cache), 6)

    assert_equal(batches(3), batches(3))
    assert transitions(batches(3)) != transitions(batches(4))
    assert transitions(batches(3)) != transitions(batches(2**40))
    small = dataclasses.replace(config, batch_size=2)  # rows come in the same order
    whole = joined(batches(3))
    assert_equal([whole], [joined(take(make_train_iterator(small, cache), 12))])


def test_resume_is_exact_at_any_point(config, cache):
    """Over three epochs, whose ends fall inside batches."""
    config = dataclasses.replace(config, batch_size=5)
    rows = load_corpus(config, cache).train[0].rows(32)
    count = 3 * rows // 5 + 2
    iterator, states, batches = make_train_iterator(config, cache), [], []
    for _ in range(count):
        states.append(json.loads(json.dumps(iterator.get_state())))
        batches.append(next(iterator))
    for point in np.random.default_rng(0).integers(0, count - 1, 10):
        restored = make_train_iterator(config, cache)
        take(restored, point % 3)
        restored.set_state(states[point])
        assert restored.get_state() == states[point]
        assert_equal(take(restored, 3), batches[point : point + 3])
        assert restored.epoch == pytest.approx(min(point + 3, count) * 5 / rows, rel=0.2)


def test_resume_in_a_new_process(config, cache):
    iterator = make_train_iterator(config, cache)
    take(iterator, 17)
    script = (
        "import pickle, sys\n"
        "from k3jax.config import DataConfig\n"
        "from k3jax.data.pipeline import make_train_iterator\n"
        f"iterator = make_train_iterator({config!r}, {str(cache)!r})\n"
        f"iterator.set_state({iterator.get_state()!r})\n"
        "pickle.dump([next(iterator) for _ in range(3)], sys.stdout.buffer)\n"
    )
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True)
    assert_equal(pickle.loads(done.stdout), take(iterator, 3))


def test_orbax_saves_and_restores_the_iterator(config, cache, tmp_path):
    iterator = make_train_iterator(config, cache)
    take(iterator, 5)
    with ocp.training.Checkpointer(tmp_path / "checkpoints") as checkpointer:
        response = checkpointer.save_checkpointables_async(5, {"data": iterator})
        after = take(iterator, 3)  # while it is being written
        response.result()
        restored = make_train_iterator(config, cache)
        checkpointer.load_checkpointables(5, {"data": restored})
    assert_equal(take(restored, 3), after)


def test_a_position_in_another_corpus_is_refused(config, cache, folder):
    state = make_train_iterator(config, cache).get_state()
    (folder / "more.txt").write_text("one document more")
    pipeline._load_corpus.cache_clear()
    with pytest.raises(ValueError, match=r"data position: saved for corpus [0-9a-f]+, this is"):
        make_train_iterator(config, cache).set_state(state)


@pytest.mark.parametrize("processes", [2, 4])
def test_processes_share_the_rows_of_a_batch(config, cache, processes):
    shard = dict(process_count=processes)
    whole = take(make_train_iterator(config, cache), 8)
    parts = [
        take(make_train_iterator(config, cache, process_index=i, **shard), 8)
        for i in range(processes)
    ]
    assert_equal(whole, [joined(part) for part in zip(*parts, strict=True)])
    whole = validation_batches(config, cache, 100)
    parts = [
        validation_batches(config, cache, 100, process_index=i, **shard) for i in range(processes)
    ]
    assert_equal(whole, [joined(part) for part in zip(*parts, strict=True)])


def test_bad_shards(config, cache):
    with pytest.raises(ValueError, match=r"data\.batch_size = 4: must divide by the 3 processes"):
        make_train_iterator(config, cache, process_index=0, process_count=3)
    with pytest.raises(ValueError, match=r"process_index = 2: must be in \[0, 2\)"):
        make_train_iterator(config, cache, process_index=2, process_count=2)


STAGES = ("5:16x6", "9:64x2", "12:48x8")


def test_stages_go_on_where_the_one_before_ended(config, cache, folder):
    """One epoch in rows of three lengths: every transition once."""
    config = dataclasses.replace(config, batch_size=1, stages=("5:16x1", "12:64x1"))
    stream = load_corpus(config, cache).train[0]
    left = len(stream) - 1 - 5 * 32 - 7 * 16
    assert left > 0
    iterator = make_train_iterator(config, cache)
    batches = take(iterator, 12 + -(-left // 64))
    assert [b["inputs"].shape[1] for b in batches[:13]] == [32] * 5 + [16] * 7 + [64]
    assert transitions(batches) == expected_transitions(folder, validation=False)
    assert iterator.epoch == pytest.approx(1, rel=0.05)


@pytest.mark.parametrize("seed", range(5))
def test_no_token_of_a_pool_comes_twice_or_is_lost(letters, cache, monkeypatch, seed):
    """Over stages of random lengths, several epochs, and pools mixed by weight."""
    rng = np.random.default_rng([seed, *np.random.default_rng().integers(2**32, size=1)])
    starts = np.sort(rng.choice(np.arange(1, 60), 4, replace=False))
    stages = [f"{s}:{rng.integers(1, 400)}x{rng.integers(1, 9)}" for s in starts]
    weights = tuple(rng.choice([0.05, 0.2, 1.0], 3).tolist())
    config = DataConfig(
        letters, weights, sequence_length=16, batch_size=4, seed=seed, stages=tuple(stages)
    )
    reads = collections.defaultdict(list)  # (pool, epoch), as the order of documents tells

    def record(self, starts, length):
        reads[self.ends.tobytes()] += [(int(s), length, len(self)) for s in starts]
        return read(self, starts, length)

    read = pipeline.Stream.read
    monkeypatch.setattr(pipeline.Stream, "read", record)
    monkeypatch.setattr(pipeline, "PREFETCH", pipeline.grain.ReadOptions(0, 0))
    take(make_train_iterator(config, cache), int(starts[-1]))
    complete = 0
    for rows in reads.values():
        ends = [0] + [start + length for start, length, _ in sorted(rows)]
        assert [start for start, _, _ in sorted(rows)] == ends[:-1], (stages, weights)
        complete += ends[-1] >= rows[0][2] - 1
    assert complete >= len(reads) - 3, (stages, weights)  # each pool's last epoch is under way


def test_resume_in_every_stage_and_on_shards(config, cache):
    config = dataclasses.replace(config, stages=STAGES)
    iterator, states, batches = make_train_iterator(config, cache), [], []
    for _ in range(16):
        states.append(json.loads(json.dumps(iterator.get_state())))
        batches.append(next(iterator))
    for point in range(0, 13):
        restored = make_train_iterator(config, cache)
        restored.set_state(states[point])
        assert_equal(take(restored, 3), batches[point : point + 3])
    halves = [
        take(make_train_iterator(config, cache, process_index=i, process_count=2), 16)
        for i in range(2)
    ]
    assert_equal(batches, [joined(part) for part in zip(*halves, strict=True)])
    assert [b["inputs"].shape for b in batches[4:13:4]] == [(4, 32), (6, 16), (8, 48)]
    assert config.tokens_after(13) == sum(b["inputs"].size for b in batches[:13])


@pytest.mark.parametrize(
    ("stages", "words"),
    [
        (("100:64",), "must read steps:lengthxrows"),
        (("0:64x2",), "all positive"),
        (("5:64x2", "5:128x1"), "must be in rising order"),
    ],
)
def test_bad_stages(stages, words):
    with pytest.raises(ValueError, match=rf"data\.stages = .*{words}"):
        DataConfig(stages=stages)


@pytest.fixture
def letters(tmp_path):
    """Three sources of 5, 20 and 10 kB, each in a letter of its own."""
    for letter, size in (("a", 100), ("b", 400), ("c", 200)):
        (tmp_path / letter).mkdir()
        for i in range(50):
            (tmp_path / letter / str(i)).write_text(f"{letter * (size + i)}{i}")
    return tuple(str(tmp_path / letter) for letter in "abc")


def test_sources_are_mixed_by_weight_whatever_their_size(letters, cache):
    config = DataConfig(sources=letters, weights=(0.5, 0.2, 0.3), sequence_length=16, batch_size=10)
    batches = take(make_train_iterator(config, cache), 300)  # more than an epoch of each
    share = [np.isin(joined(batches)["targets"], ord(c)).any(1).mean() for c in "abc"]
    np.testing.assert_allclose(share, (0.5, 0.2, 0.3), atol=0.01)
    held = joined(validation_batches(config, cache, 6))
    share = [np.isin(held["targets"], ord(c)).any(1).mean() for c in "abc"]
    np.testing.assert_allclose(share, (0.5, 0.2, 0.3), atol=0.05)


def test_without_weights_sources_are_mixed_by_their_tokens(letters, cache):
    config = DataConfig(sources=letters, sequence_length=16, batch_size=1)
    stream = load_corpus(config, cache).train[0]
    seen = transitions(take(make_train_iterator(config, cache), stream.rows(16)))
    assert sum(seen.values()) == len(stream) - len(stream.ends)
    assert len(stream.ends) > 100 and len(load_corpus(config, cache).train) == 1
    weighted = dataclasses.replace(config, weights=(1.0, 1.0, 1.0))
    one = load_corpus(weighted, cache)
    assert [len(s.ends) for s in one.train] == np.bincount(stream.store).tolist()
    assert len(one.train_documents) == len(stream)
    assert load_corpus(weighted, cache).digest == load_corpus(config, cache).digest


def test_held_out_rows_can_be_had_pool_by_pool(letters, cache):
    config = DataConfig(
        sources=(*letters[:2], "task:palindrome:symbols=64"),
        weights=(0.5, 0.2, 0.3),
        sequence_length=16,
        batch_size=10,
    )
    apart = validation_by_pool(config, cache, 6)
    assert tuple(apart) == pool_names(config) == ("a", "b", "palindrome")
    for name, batches in apart.items():
        seen = {chr(target) for target in np.unique(joined(batches)["targets"]) if target < 256}
        assert seen & {"a", "b"} == {name} & {"a", "b"}
    together = validation_batches(config, cache, 6)
    rows, wanted = (
        sorted(row.tobytes() for batch in batches for row in batch["inputs"] if row.any())
        for batches in (itertools.chain(*apart.values()), together)
    )
    assert rows == wanted and len(rows) > 30


@pytest.mark.parametrize(
    ("sources", "names"),
    [
        (["python:stdlib"], ["text"]),
        (["task:recall:pairs=4"], ["recall"]),
        (["python:stdlib", "task:recall", "task:recall:pairs=4"], ["text", "recall", "recall_2"]),
        (["python:site-packages", "/x/my text.jsonl"], ["site_packages", "my_text"]),
        (["/x/a.txt", "/y/a.txt", "/z/a_2.txt", "/a.txt"], ["a", "a_2", "a_2_2", "a_3"]),
    ],
)
def test_pools_have_names(sources, names):
    weights = (1.0,) * len(sources) if len(sources) > 1 else ()
    config = DataConfig(sources=tuple(sources), weights=weights)
    assert pool_names(config) == tuple(names)


def test_validation_is_held_out_whole_and_the_same_every_time(config, cache, folder):
    batches = validation_batches(config, cache, 1000)
    assert transitions(batches) == expected_transitions(folder, validation=True)
    assert_equal(batches, validation_batches(config, cache, 1000))
    assert_equal(batches, validation_batches(dataclasses.replace(config, seed=9), cache, 1000))
    assert_equal(batches[:2], validation_batches(config, cache, 2))
    rows = load_corpus(config, cache).validation[0].rows(32)
    assert len(batches) == -(-rows // 4)
    padding = joined(batches)["segment_ids"].max(1) == 0
    assert padding.sum() == -rows % 4 and not padding[:rows].any()
    source = load_corpus(config, cache)
    assert not set(source.train[0].hashes.tolist()) & set(source.validation[0].hashes.tolist())


def test_copies_of_a_document_stay_on_one_side(folder, tmp_path, cache):
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in folder.rglob("*.txt"):
        (copy / f"other-{path.name}").write_bytes(path.read_bytes())
    config = DataConfig(sources=(str(folder), str(copy)), validation_fraction=0.3)
    source = load_corpus(config, cache)
    train, held = (set(s[0].hashes.tolist()) for s in (source.train, source.validation))
    assert len(train) + len(held) == 40 and not train & held


def test_a_corpus_smaller_than_a_batch_is_repeated(tmp_path, cache):
    (tmp_path / "tiny.jsonl").write_text('{"text": "ab"}\n{"text": "xyz"}\n')
    config = DataConfig(sources=(str(tmp_path / "tiny.jsonl"),), sequence_length=16, batch_size=8)
    batches = take(make_train_iterator(config, cache), 3)
    assert all((batch["weights"].sum(1) == batch["weights"][0].sum()).all() for batch in batches)
    assert len(validation_batches(config, cache, 8)) == 1

    (tmp_path / "one.jsonl").write_text('{"text": "ab"}\n{"text": "ab"}\n')
    config = dataclasses.replace(config, sources=(str(tmp_path / "one.jsonl"),))
    with pytest.raises(ValueError, match="at least two different ones"):
        make_train_iterator(config, cache)


def test_a_weighted_source_needs_training_documents(folder, tmp_path, cache):
    low = next(text for text in map(str, itertools.count()) if text_hash(text) < 2**61)
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": low}))
    sources = (str(folder), str(tmp_path / "a.jsonl"))
    config = DataConfig(sources=sources, weights=(0.5, 0.5), validation_fraction=0.5)
    with pytest.raises(ValueError, match=r"a\.jsonl': all of its 1 documents are held out"):
        make_train_iterator(config, cache)
    make_train_iterator(dataclasses.replace(config, weights=()), cache)


def test_the_loss_mask_of_a_jsonl_line_reaches_the_weights(tmp_path, cache):
    lines = [{"body": f"q{i:02d}a", "loss_mask": [0, 0, 0, 1]} for i in range(30)]
    lines += [{"body": f"{i}z"} for i in range(10)]
    lines = [lines[i] for i in np.random.default_rng(0).permutation(len(lines))]
    path = tmp_path / "tasks.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    config = DataConfig(sources=(str(path),), jsonl_field="body", sequence_length=6, batch_size=1)
    rows = load_corpus(config, cache).train[0].rows(6)
    seen = transitions(take(make_train_iterator(config, cache), rows))
    documents = load_corpus(config, cache).train[0]
    masked = np.diff(documents.ends, prepend=0) == 6
    assert 0 < masked.sum() < len(masked)
    assert sum(seen.values()) == 2 * masked.sum() + 3 * (~masked).sum()
    assert ord("q") not in {target for _, target in seen}
    assert sum(seen[pair] for pair in seen if pair[1] == 256) == len(masked)
    assert sum(seen[pair] for pair in seen if pair[1] == ord("a")) == masked.sum()


def test_a_task_is_a_source(tmp_path):
    config = DataConfig(sources=("task:palindrome",), sequence_length=33, batch_size=4)
    cache = tmp_path / "cache"
    first = make_train_iterator(config, cache)
    batches = [next(first) for _ in range(3)]
    position = first.get_state()
    following = next(first)
    for batch in (*batches, following):
        assert batch["inputs"].shape == (4, 33) and (batch["inputs"][:, 0] == 256).all()
        answers = batch["weights"].astype(bool)
        assert (answers.sum(1) == 16).all()
    assert len({batch["inputs"].tobytes() for batch in batches}) == 3
    again = make_train_iterator(config, cache)
    again.set_state(position)
    assert np.array_equal(next(again)["inputs"], following["inputs"])
    other = make_train_iterator(dataclasses.replace(config, seed=1), cache)
    assert not np.array_equal(next(other)["inputs"], batches[0]["inputs"])
    held = validation_batches(config, cache, 2)
    rows = {row.tobytes() for batch in batches for row in batch["inputs"]}
    assert len(held) == 2 and not rows & {row.tobytes() for b in held for row in b["inputs"]}
    halves = [
        next(make_train_iterator(config, cache, process_index=i, process_count=2)) for i in (0, 1)
    ]
    joined = np.concatenate([half["inputs"] for half in halves])
    assert np.array_equal(joined, batches[0]["inputs"])


def test_a_task_beside_text(folder, tmp_path):
    config = DataConfig(
        sources=(str(folder), "task:recall"), weights=(3.0, 1.0), sequence_length=33, batch_size=8
    )
    iterator = make_train_iterator(config, tmp_path / "cache")
    rows = np.concatenate([next(iterator)["weights"] for _ in range(10)])
    of_task = rows.sum(1) == 8  # text is learned everywhere but at a document's first token
    assert of_task.sum() == 20
    with pytest.raises(ValueError, match=r"data\.weights = \(\): must have an entry for each"):
        load_corpus(dataclasses.replace(config, weights=()), tmp_path / "cache")
    with pytest.raises(ValueError, match=r"knows no text"):
        load_corpus(dataclasses.replace(config, tokenizer="symbols:64"), tmp_path / "cache")
