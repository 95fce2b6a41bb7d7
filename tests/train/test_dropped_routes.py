"""What the loop does about routes to experts that found no room."""

from types import SimpleNamespace

import jax.numpy as jnp
import pytest

from k3jax.config import ExperimentConfig
from k3jax.flags import override
from k3jax.layers.stats import Sum
from k3jax.train.loop import _Loop
from k3jax.train.metrics import MetricsLog, read_metrics
from k3jax.train.step import _expert_metrics


def settle(tmp_path, dropped, *settings):
    """The records of steps 1, 2, .. that dropped so many routes."""
    config = override(ExperimentConfig(), ["train.log_every=3", *settings])
    with MetricsLog(tmp_path, 0, False) as metrics:
        loop = _Loop(config, tmp_path, (0, 1), None, metrics, None, None, None)
        loop._bar = SimpleNamespace(set_postfix_str=lambda *_, **__: None, update=lambda: None)
        for step, count in enumerate(dropped, 1):
            figures = {"bits_per_byte": 1.0} | ({} if count is None else {"dropped_routes": count})
            loop._pending = step, {name: jnp.float32(x) for name, x in figures.items()}
            loop._settle()
    return records(tmp_path)


def test_none_is_recorded_and_fine(tmp_path):
    assert settle(tmp_path, [0] * 7) == [(3, 0), (6, 0)]


def test_dense_models_have_no_such_figure(tmp_path):
    assert settle(tmp_path, [None] * 4) == [(3, None)]


def test_one_is_an_error_after_its_record(tmp_path):
    message = r"^moe\.buffer_factor = 2\.0: step 5 has no room for 4 routes to experts; must be"
    with pytest.raises(ValueError, match=message):
        settle(tmp_path, [0, 0, 0, 0, 4, 0])
    assert records(tmp_path) == [(3, 0), (5, 4)]


def test_allowed_ones_add_up_between_records(tmp_path):
    found = settle(tmp_path, [1, 0, 2, 0, 4, 0, 8], "model.moe.allow_drops=true")
    assert found == [(3, 3), (6, 4)]


def test_all_layers_count():
    stats = {"a": {"dropped_routes": Sum(jnp.array([2**30, 2**30, 2**30], jnp.int32))}}
    stats["b"] = {0: {"dropped_routes": Sum(jnp.int32(2**30))}}
    assert float(_expert_metrics(stats)["dropped_routes"]) == 2.0**32


def records(folder):
    return [(r["step"], r.get("dropped_routes")) for r in read_metrics(folder)]
