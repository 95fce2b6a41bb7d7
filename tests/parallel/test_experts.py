"""Routes as data, the choice of a transport, and the formula of what it sends."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import CONFIGS
from k3jax.config import MoEConfig
from k3jax.cost import exchange_bytes, exchange_share, expert_flops
from k3jax.parallel.experts import TRANSPORTS, Bank, Group, choose, local, run_experts
from k3jax.parallel.experts.routes import chunk_sources, invert, sort_routes

K3 = CONFIGS["kimi_k3"]().model.moe


def test_routes_are_sorted_by_expert_and_then_by_token():
    rng = np.random.default_rng()
    indices, valid = rng.integers(0, 5, (20, 3)).astype(np.int32), rng.random(20) < 0.7
    order, ends, sizes = map(np.asarray, sort_routes(jnp.asarray(indices), valid, 6))
    want = [r for e in range(6) for r in range(60) if indices.flat[r] == e and valid[r // 3]]
    assert order[: ends[-1]].tolist() == want
    assert sizes.tolist() == np.bincount(indices[valid].ravel(), minlength=6).tolist()
    assert np.array_equal(ends, np.cumsum(sizes)) and np.array_equal(np.sort(order), np.arange(60))


def test_chunks_bring_rows_to_their_places():
    rng = np.random.default_rng()
    for _ in range(20):
        sizes = rng.integers(0, 4, 8) * (rng.random(8) < 0.6)
        gaps = rng.integers(0, 2, 8) * rng.integers(0, 3, 8)
        destination = np.cumsum(sizes + gaps) - sizes
        source = rng.permutation(8) * 5
        rows = max(int(destination[-1] + sizes[-1]) - 2, 1)  # the end of the last is cut off
        want = np.full(rows, 99)
        for d, s, n in zip(destination, source, sizes, strict=True):
            for i in range(n):
                if d + i < rows:
                    want[d + i] = s + i
        chunks = (jnp.asarray(a, jnp.int32) for a in (destination, source, sizes))
        assert chunk_sources(rows, 99, *chunks).tolist() == want.tolist(), (destination, sizes)


def test_inverse_of_a_part():
    assert invert(jnp.array([4, 9, 0, 2]), 5).tolist() == [2, 4, 3, 4, 0]


def test_buffers():
    group = Group("expert", 4, 8, 2.0)
    assert (group.pair_rows(100, 3), group.device_rows(100, 3)) == (150, 600)
    assert Group("expert", 4, 8, 9.0).pair_rows(100, 3) == 200  # two experts there at the most
    worst = Group("expert", 4, 8, 0.0)
    assert (worst.pair_rows(100, 3), worst.device_rows(100, 3)) == (200, 800)
    with pytest.raises(ValueError, match=r"^mesh\.expert = 3: must divide moe\.experts = 8$"):
        Group("expert", 3, 8)


@pytest.mark.parametrize(
    "name, devices, platform, want",
    [
        ("auto", 1, "gpu", "local"),
        ("auto", 64, "tpu", "ragged"),
        ("auto", 8, "tpu", "ring"),  # (8 - 1) 6 bytes against 16 (1 - 1/8) 4
        ("auto", 8, "gpu", "ring"),
        ("auto", 64, "gpu", "padded"),
        ("auto", 64, "cpu", "padded"),
        ("ragged", 64, "gpu", "ragged"),
        ("padded", 1, "cpu", "padded"),
    ],
)
def test_choice(name, devices, platform, want):
    moe = MoEConfig(experts=896, top_k=16, transport=name)
    assert choose(moe, Group("expert", devices, 896), platform) is TRANSPORTS[want]


def test_local_cannot_serve_a_split_bank():
    moe = MoEConfig(experts=8, transport="local")
    with pytest.raises(ValueError, match=r"^moe\.transport = 'local': mesh\.expert = 2 splits"):
        choose(moe, Group("expert", 2, 8), "cpu")
    assert choose(MoEConfig(experts=8, transport="ring"), Group(None, 1, 8), "cpu") is local


def test_ragged_is_refused_where_xla_has_none():
    moe = MoEConfig(experts=8, transport="ragged")
    with pytest.raises(
        ValueError, match=r"^moe\.transport = 'ragged': XLA has no .* for cpu, only"
    ):
        choose(moe, Group("expert", 2, 8), "cpu")


def test_bad_settings_are_one_line():
    with pytest.raises(ValueError, match=r"^moe\.transport = 'boat': must be one of auto, local"):
        MoEConfig(transport="boat")
    with pytest.raises(ValueError, match=r"^moe\.buffer_factor = inf: must be at least 1, or 0"):
        MoEConfig(buffer_factor=float("inf"))


def test_no_tokens():
    bank = Bank(jnp.ones((4, 6, 5)), jnp.ones((4, 6, 5)), jnp.ones((4, 5, 6)))
    z, routes = jnp.zeros((0, 6), jnp.bfloat16), jnp.zeros((0, 2))
    args = z, routes.astype(jnp.int32), routes, jnp.zeros(0, bool), bank, jnp.add, local
    y, dropped = run_experts(*args, Group(None, 1, 4))
    assert y.shape == (0, 6) and y.dtype == jnp.float32 and int(dropped) == 0


def test_weights_in_float32_and_rows_in_bfloat16():
    """Products of weights and hidden layer are rounded once: the error is that of bfloat16."""
    rng = np.random.default_rng()
    draw = lambda *shape: jnp.asarray(rng.normal(0, 0.3, shape), jnp.float32)  # noqa: E731
    z, bank = draw(50, 32), Bank(draw(4, 32, 16), draw(4, 32, 16), draw(4, 16, 32))
    indices = jnp.asarray(np.argsort(rng.random((50, 4)))[:, :2], jnp.int32)
    weights, valid = jnp.abs(draw(50, 2)), jnp.ones(50, bool)

    def run(z, bank):
        act = lambda a, b: jax.nn.silu(a) * b  # noqa: E731
        return run_experts(z, indices, weights, valid, bank, act, local, Group(None, 1, 4))[0]

    want = run(z, bank)
    got = run(*jax.tree.map(lambda a: a.astype(jnp.bfloat16), (z, bank)))
    assert got.dtype == jnp.float32
    assert jnp.linalg.norm(got - want) < 0.01 * jnp.linalg.norm(want)


def test_formula():
    """K3R's sizes on 64 devices: 16 routes of 3584 elements of two bytes, there and back."""
    one = 16 * 3584 * 4 * 63 / 64
    assert exchange_bytes(K3, 3584, 1000, 64, "ragged") == 1000 * one
    assert exchange_bytes(K3, 3584, 1000, 64, "padded") == 2000 * one
    assert exchange_bytes(K3, 3584, 1000, 8, "ring") == 1000 * 3584 * 7 * (2 + 4)
    assert exchange_bytes(K3, 3584, 1000, 64, "local") == 0
    worst = MoEConfig(experts=896, top_k=16, buffer_factor=0.0)
    # Each of 64 devices owns 14 experts: 14 of 16 routes may go to one of them.
    assert exchange_bytes(worst, 3584, 1, 64, "padded") == 64 * 14 * 3584 * 4 * 63 / 64
    assert expert_flops(K3, 3584, 1000) == 1000 * 16 * 3 * 2 * 3584 * 3072
    share = exchange_share(K3, 64, flops_per_second=1e15, bytes_per_second=1e11)
    times = one / 1e11, expert_flops(K3, 3584, 1) / 1e15
    assert share == pytest.approx(times[0] / times[1])
