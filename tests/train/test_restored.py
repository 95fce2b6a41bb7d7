"""What a restored run is asked about."""

import pytest

from k3jax.config import ExperimentConfig
from k3jax.flags import override
from k3jax.train.restored import Restored


@pytest.mark.parametrize(("step", "rows"), [(0, 8), (10, 8), (11, 4), (20, 4), (21, 2), (99, 2)])
def test_a_run_is_asked_in_the_rows_of_its_stage(step, rows):
    settings = ["data.batch_size=8", "data.stages=10:512x4,20:1024x2", "train.micro_batches=2"]
    data = Restored(override(ExperimentConfig(), settings), step, None, None, None).data
    assert (data.batch_size, data.sequence_length) == (rows, 2048 // rows)
