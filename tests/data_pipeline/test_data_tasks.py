"""Tasks: every answer follows from what stands before it, and rows depend on their number alone."""

import dataclasses
from collections.abc import Iterator

import numpy as np
import pytest

from k3jax.data.tasks import Agent, Needle, Palindrome, Recall, Stack, TaskPool, Variables, parse
from k3jax.data.tokenizer import load_tokenizer

BYTES = load_tokenizer("bytes")
SYMBOLS = BOS = BYTES.bos_id


@pytest.fixture
def seed() -> int:
    """A fresh one in each run, shown where the test fails."""
    drawn = int(np.random.default_rng().integers(2**32))
    print(f"seed = {drawn}")
    return drawn


def solve_recall(tokens: list[int]) -> Iterator[tuple[int, int]]:
    mark = tokens.index(0)
    book = {tokens[i]: tokens[i + 1] for i in range(0, mark, 2)}
    for place in range(mark + 1, len(tokens), 2):
        yield place + 1, book[tokens[place]]


def solve_palindrome(tokens: list[int]) -> Iterator[tuple[int, int]]:
    half = len(tokens) // 2
    assert tokens[half] == 0
    for place in range(half + 1, len(tokens)):
        yield place, tokens[2 * half - place]


def solve_stack(tokens: list[int]) -> Iterator[tuple[int, int]]:
    for place in range(0, len(tokens), 3):
        operation, stack, _ = tokens[place : place + 3]
        if operation == 1:
            depth = 0  # going back: a pop hides one push of the same stack
            for before in range(place - 3, -1, -3):
                if tokens[before + 1] == stack:
                    if tokens[before] == 0 and depth == 0:
                        yield place + 2, tokens[before + 2]
                        break
                    depth += 1 if tokens[before] == 1 else -1
            else:
                pytest.fail(f"pop of an empty stack at {place}")


def solve_needle(tokens: list[int]) -> Iterator[tuple[int, int]]:
    ask, key, _ = tokens[-3:]
    assert ask == 1
    notes = [i for i, token in enumerate(tokens) if token == 0 and tokens[i + 1] == key]
    assert len(notes) == 1
    yield len(tokens) - 1, tokens[notes[0] + 2]


def solve_variables(tokens: list[int]) -> Iterator[tuple[int, int]]:
    names, now = range(2, 18), {}
    for place in range(0, len(tokens), 3):
        operation, name, source = tokens[place : place + 3]
        if operation == 0:
            now[name] = now[source] if source in names else source
        else:
            yield place + 2, now[name]


def solve_agent(tokens: list[int]) -> Iterator[tuple[int, int]]:
    user, call, field, _, reply = range(5)
    fields = {}
    for place, token in enumerate(tokens):
        if token == field:
            fields[tokens[place + 1]] = tokens[place + 2]
        elif token == call:
            assert tokens[place - 2] == user
            yield place + 1, tokens[place - 1]
        elif token == user:
            asked = tokens[place + 1]
        elif token == reply:
            yield place + 1, fields[asked]


SOLVERS = {
    "recall": (Recall(), solve_recall),
    "recall, few pairs": (Recall(pairs=3), solve_recall),
    "palindrome": (Palindrome(), solve_palindrome),
    "stack": (Stack(), solve_stack),
    "needle": (Needle(), solve_needle),
    "needle, last": (Needle(depth=1), solve_needle),
    "variables": (Variables(), solve_variables),
    "agent": (Agent(), solve_agent),
}


@pytest.mark.parametrize("name", SOLVERS)
@pytest.mark.parametrize("length", [60, 61, 255, 1023])
def test_answers_are_what_an_independent_reader_finds(name, length, seed):
    task, solve = SOLVERS[name]
    rng = np.random.default_rng(seed)
    for _ in range(3):
        example = task.draw(rng, length, SYMBOLS)
        assert 0 < len(example.tokens) <= length
        assert example.tokens.min() >= 0 and example.tokens.max() < SYMBOLS
        found = dict(solve(example.tokens.tolist()))
        assert sorted(found) == np.flatnonzero(example.answers).tolist()
        assert list(found.values()) == example.tokens[sorted(found)].tolist()


@pytest.mark.parametrize("depth", [0.0, 0.25, 1.0])
def test_a_needle_lies_where_it_is_wanted(depth, seed):
    tokens = Needle(depth=depth).draw(np.random.default_rng(seed), 1000, SYMBOLS).tokens
    place = int(np.flatnonzero((tokens[:-3] == 0) & (tokens[1:-2] == tokens[-2]))[0])
    assert abs(place - depth * 1000) <= 15


@pytest.mark.parametrize("name", ["recall", "palindrome", "stack", "needle", "variables", "agent"])
def test_rows_hold_whole_documents_and_depend_on_their_number_alone(name, seed):
    pool = parse(f"task:{name}:length=120:shortest=70", BYTES, seed)
    length = 400
    tokens, segment_ids, answers = pool.read(np.array([5, -1, 9]), length)
    again = pool.read(np.array([9, 5]), length)
    for one, other in zip((tokens, segment_ids, answers), again, strict=True):
        assert one.shape == (3, length + 1)
        assert np.array_equal(one[[2, 0]], other)
    assert not segment_ids[1].any() and not answers[1].any()
    for row in (0, 2):
        starts = np.flatnonzero(np.diff(segment_ids[row], prepend=0) > 0)
        assert len(starts) >= 3
        assert (tokens[row, starts] == BOS).all()
        assert not answers[row][segment_ids[row] == 0].any()
        padding = int((segment_ids[row] == 0).sum())
        assert padding <= 70 + 120  # no room for one more document, which may be short of its size
        solve = SOLVERS[name][1]
        for number in range(1, segment_ids[row].max() + 1):
            mine = segment_ids[row] == number
            document = tokens[row][mine][1:]
            found = dict(solve(document.tolist()))
            assert sorted(found) == np.flatnonzero(answers[row][mine][1:]).tolist()


def test_epochs_and_seeds_draw_other_rows():
    pool = parse("task:stack", BYTES, 0)
    others = [pool.epoch(1), pool.epoch(2), dataclasses.replace(pool, seed=1)]
    rows = [p.read(np.array([0]), 64)[0].tobytes() for p in (pool, *others)]
    assert len(set(rows)) == 4
    assert isinstance(pool.epoch(1), TaskPool)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("task:recal", "no such task"),
        ("task:recall:pears=3", "must read option=number"),
        ("task:recall:pairs", "must read option=number"),
        ("task:recall:pairs=x", "whole number"),
        ("task:recall:pairs=0", "at least 1"),
        ("task:needle:depth=deep", "decimal number"),
        ("task:needle:depth=1.5", r"\[0, 1\]"),
        ("task:stack:length=20:shortest=30", "at most length"),
        ("task:stack:symbols=257", "at most the 256 ids"),
    ],
)
def test_bad_names_are_refused_in_one_line(name, message):
    with pytest.raises(ValueError, match=message) as error:
        parse(name, BYTES, 0)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("task", "length", "symbols", "message"),
    [
        (Recall(pairs=200), 1000, SYMBOLS, "at most the 127 keys"),
        (Recall(pairs=20), 40, SYMBOLS, "at least 43 tokens"),
        (Palindrome(), 2, SYMBOLS, "at least 3 tokens"),
        (Stack(), 100, 60, "too few"),
        (Needle(needles=9), 20, SYMBOLS, "at least 30 tokens"),
        (Agent(output=2), 200, SYMBOLS, "output = 2"),
        (Variables(), 10, SYMBOLS, "at least 15 tokens"),
    ],
)
def test_what_cannot_hold_the_task_is_refused(task, length, symbols, message):
    with pytest.raises(ValueError, match=message):
        task.draw(np.random.default_rng(0), length, symbols)


@pytest.mark.parametrize("option", ["length", "shortest"])
def test_a_document_longer_than_its_row_is_refused(option):
    with pytest.raises(ValueError, match=rf"{option} = 65: .* at most data\.sequence_length = 64"):
        parse(f"task:stack:{option}=65", BYTES, 0).read(np.array([0]), 64)
