"""Batches on their way to the devices."""

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from k3jax.sharding import BATCH, SEQUENCE, make_mesh
from k3jax.train.hosts import placed


def test_only_rows_that_are_padded_at_their_ends_are_placed():
    """The training step is compiled for such rows: in others the convolution would be wrong."""
    spec = PartitionSpec(None, BATCH, SEQUENCE)
    ids = np.array([[[1, 1, 2, 0], [1, 0, 0, 0]]], np.int32)
    with jax.set_mesh(make_mesh()):
        found = placed({"segment_ids": ids}, spec, (0, 1))
        np.testing.assert_array_equal(found["segment_ids"], ids)
        ids[0, 1] = 1, 0, 1, 1
        with pytest.raises(ValueError, match=r"padding at token 1 of row \(0, 1\) stands before"):
            placed({"segment_ids": ids}, spec, (0, 1))
