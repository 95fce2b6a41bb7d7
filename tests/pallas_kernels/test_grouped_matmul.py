"""Grouped matmul against a loop over groups, in float64, and its edges."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from pallas_kernels import dispatch
from pallas_kernels.grouped_matmul import grouped_matmul
from pallas_kernels.grouped_matmul.blocked import block_size

K, M = 5, 3
IMPLEMENTATIONS = dispatch.names("grouped_matmul")


def oracle(rows, weights, sizes):
    """Group by group; rows past the last group give zero."""
    start, out = 0, []
    for size, weight in zip(sizes, weights, strict=True):
        out.append(rows[start : start + size] @ weight)
        start += size
    return jnp.concatenate([*out, jnp.zeros((rows.shape[0] - start, weights.shape[2]), rows.dtype)])


def inputs(sizes, inert, dtype, seed=0):
    rng = np.random.default_rng(seed)
    n = sum(sizes) + inert
    rows, weights = rng.normal(size=(n, K)), rng.normal(size=(len(sizes), K, M))
    return (
        jnp.asarray(rows, dtype),
        jnp.asarray(weights, dtype),
        jnp.asarray(rng.normal(size=(n, M)), dtype),
    )


def relative(a, b):
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return np.sqrt(np.mean((a - b) ** 2)) / max(np.sqrt(np.mean(b**2)), 1e-30)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    "sizes, inert",
    [
        ([70, 0, 1, 33, 0, 17], 0),  # ragged, with empty groups
        ([0, 0, 121, 0, 0, 0], 0),  # all rows in one group
        ([16, 32, 16, 16, 16, 16], 9),  # whole blocks, and rows past the last group
        ([0, 0, 0, 0, 0, 0], 40),  # nothing but inert rows
        ([0, 0, 0, 0, 0, 0], 0),  # no rows at all
        ([7], 2),
    ],
)
def test_matches_loop_over_groups(sizes, inert, implementation):
    with jax.enable_x64(True):
        rows, weights, ct = inputs(sizes, inert, jnp.float64)
        group_sizes = jnp.asarray(sizes, jnp.int32)
        out, pull = jax.vjp(
            lambda r, w: grouped_matmul(r, w, group_sizes, implementation=implementation),
            rows,
            weights,
        )
        want, pull_want = jax.vjp(lambda r, w: oracle(r, w, sizes), rows, weights)
        for got, expected in zip((out, *pull(ct)), (want, *pull_want(ct)), strict=True):
            assert got.shape == expected.shape
            assert got.dtype == jnp.float64
            if expected.size:
                assert np.abs(got - expected).max() < 1e-12


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_inert_rows_may_hold_anything(implementation):
    sizes = [20, 3]
    rows, weights, ct = inputs(sizes, 30, jnp.float32)
    rows, ct = rows.at[23:].set(jnp.nan), ct.at[23:].set(jnp.inf)
    group_sizes = jnp.asarray(sizes, jnp.int32)
    call = lambda r, w: grouped_matmul(r, w, group_sizes, implementation=implementation)  # noqa: E731
    out, pull = jax.vjp(call, rows, weights)
    d_rows, d_weights = pull(ct)
    assert np.all(out[23:] == 0) and np.all(d_rows[23:] == 0)
    assert np.all(np.isfinite(d_weights))
    assert relative(out[:23], oracle(rows[:23], weights, sizes)) < 1e-6


def test_bfloat16_accumulates_in_float32():
    # 3,000 equal terms: a bfloat16 accumulator stalls at 256.
    rows = jnp.ones((3000, 1), jnp.bfloat16)
    sizes = jnp.asarray([3000], jnp.int32)
    weights = jnp.ones((1, 1, 1), jnp.bfloat16)
    out, pull = jax.vjp(lambda w: grouped_matmul(rows, w, sizes), weights)
    assert out.dtype == jnp.bfloat16
    assert pull(out)[0].item() == 3008  # 3,000 to the nearest bfloat16


def test_sizes_may_be_traced_and_vmapped():
    rows, weights, _ = inputs([30, 30], 0, jnp.float32)
    sizes = jnp.asarray([[30, 30], [60, 0], [1, 2]], jnp.int32)
    got = jax.jit(jax.vmap(lambda s: grouped_matmul(rows, weights, s)))(sizes)
    want = jnp.stack([oracle(rows, weights, s) for s in sizes.tolist()])
    assert relative(got, want) < 1e-6


def test_runs_in_a_checked_shard_map():
    rows, weights, ct = inputs([11, 30], 3, jnp.float32)
    sizes = jnp.asarray([11, 30], jnp.int32)
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,))

    def call(rows, weights):
        return jax.shard_map(
            lambda r, w, s: grouped_matmul(r, w, s),
            mesh=mesh,
            in_specs=(P("data"), P(), P()),
            out_specs=P("data"),
        )(rows, weights, sizes)

    def both(fn):
        out, pull = jax.vjp(fn, rows, weights)
        return out, *pull(ct)

    found, want = jax.jit(lambda: (both(call), both(lambda r, w: oracle(r, w, [11, 30]))))()
    for got, expected in zip(found, want, strict=True):
        assert relative(got, expected) < 1e-6


def test_block_size_wastes_at_most_half():
    for rows, groups in [(4096, 8), (131072, 896), (8192 * 4, 64), (10**6, 4)]:
        block = block_size(rows, groups)
        assert block & (block - 1) == 0
        assert groups * block <= rows / 2


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(rows=jnp.zeros((4, K), jnp.int32)), r"rows: int32\[4, 5\] is not floating"),
        (dict(weights=jnp.zeros((2, K + 1, M))), r"weights: shape \[2, 6, 3\] is not"),
        (dict(weights=jnp.zeros((2, K, M), jnp.bfloat16)), "weights: dtype bfloat16 is not"),
        (dict(group_sizes=jnp.zeros(2)), r"group_sizes: float32\[2\] is not int32"),
        (dict(group_sizes=jnp.array([3, 2])), r"group_sizes: \[3, 2\] must be >= 0 and sum to"),
        (dict(group_sizes=jnp.array([-1, 2])), r"group_sizes: \[-1, 2\] must be >= 0"),
        (dict(implementation="magic"), "implementation='magic' is none of blocked"),
    ],
)
def test_bad_input_is_named(change, message):
    call = dict(rows=jnp.zeros((4, K)), weights=jnp.zeros((2, K, M)), group_sizes=jnp.array([1, 2]))
    with pytest.raises(ValueError, match=message):
        grouped_matmul(**{**call, **change})
