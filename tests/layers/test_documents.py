"""What a batch's documents are: positions, order, gaps, and what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.layers.documents import documents_of, one_document
from k3jax.sharding import make_mesh


def test_positions_order_and_gaps_of_random_rows():
    rng = np.random.default_rng()
    ids = np.sort(rng.integers(1, 5, (6, 17)), axis=1).astype(np.int32)
    ids[rng.random(ids.shape) < 0.3] = 0
    ids[0] = 0  # a row of padding
    ids[1] = np.sort(ids[1])[::-1] * 0 + 1  # a whole row
    found = documents_of(jnp.asarray(ids))
    for row, positions, order in zip(ids, found.positions, found.order, strict=True):
        real = np.flatnonzero(row)
        assert np.array_equal(order[: real.size], real)
        assert np.array_equal(np.sort(order), np.arange(row.size))
        for document in np.unique(row[real]):
            members = np.flatnonzero(row == document)
            assert np.array_equal(positions[members], np.arange(members.size))
    assert bool(found.gaps)
    assert np.array_equal(found.starts, (ids > 0) & (np.asarray(found.positions) == 0))


def test_padding_behind_is_no_gap():
    assert not documents_of(jnp.array([[1, 1, 2, 0], [1, 0, 0, 0]], jnp.int32)).gaps
    assert documents_of(jnp.array([[0, 1, 1, 2]], jnp.int32)).gaps
    assert not one_document(jnp.zeros((2, 0))).gaps


def test_no_gaps_on_the_callers_word():
    ids = jnp.array([[1, 1, 2, 0], [1, 0, 0, 0]], jnp.int32)
    assert documents_of(ids, gapless=True).gaps is None
    assert jax.jit(lambda ids: documents_of(ids, gapless=True))(ids).gaps is None
    with jax.set_mesh(make_mesh()):
        assert documents_of(ids, gapless=True).gaps is None
    with pytest.raises(ValueError, match=r"padding at token 0 of row \(1,\) stands before"):
        documents_of(ids.at[1].set(jnp.array([0, 1, 1, 0])), gapless=True)


def test_the_mesh_changes_nothing():
    ids = jnp.array([[0, 1, 1, 0, 2], [1, 3, 3, 3, 0]], jnp.int32)
    alone = documents_of(ids)
    with jax.set_mesh(make_mesh()):
        meshed = jax.jit(documents_of)(ids)
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), alone, meshed))


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (np.array([[1, 2, 1]], np.int32), "segment_ids: 1 after 2 in row 0 at token 2"),
        (np.array([[2, 0, 1]], np.int32), "segment_ids: 1 after 2"),
        (np.array([[1, -1]], np.int32), "segment_ids: -1 found"),
        (np.array([[1.0, 2.0]], np.float32), "segment_ids: float32"),
        (np.array([1, 2], np.int32), "must be int32 .B, T."),
    ],
)
def test_bad_ids_are_refused_in_one_line(ids, message):
    with pytest.raises(ValueError, match=message) as caught:
        documents_of(jnp.asarray(ids))
    assert "\n" not in str(caught.value)
