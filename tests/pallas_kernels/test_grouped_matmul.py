"""Grouped matmul in plain JAX against a loop over groups, and what all implementations share:
arguments, dispatch, meshes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from pallas_kernels import dispatch
from pallas_kernels.grouped_matmul import Spec, grouped_matmul
from pallas_kernels.grouped_matmul.blocked import block_size
from pallas_kernels.grouped_matmul.schedule import bounds, row_tiles, schedule
from tests.pallas_kernels.grouped_matmul_suite import (
    SIZES,
    Draw,
    GroupedMatmulSuite,
    Sizes,
    held_to_oracle,
)

K, M = 5, 3
NAMES = ", ".join(dispatch.names("grouped_matmul"))


class TestBlocked(GroupedMatmulSuite):
    implementation = "blocked"
    dtypes = ("float64", "float32", "bfloat16", "float16")
    widths = ((K, M), (1, 40))


@pytest.mark.parametrize("implementation", ["blocked", "megablox"])
@pytest.mark.parametrize("check_vma", [True, False])
def test_runs_in_a_shard_map(implementation, check_vma):
    draw = Draw(Sizes("two", (11, 30), 3), 16, 24, "float32")
    rows, weights, cotangent, sizes = draw.arrays()
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,))

    def call(rows, weights):
        return jax.shard_map(
            lambda r, w, s: grouped_matmul(r, w, s, implementation=implementation),
            mesh=mesh,
            in_specs=(P("data"), P(), P()),
            out_specs=P("data"),
            check_vma=check_vma,
        )(rows, weights, sizes)

    @jax.jit
    def both():
        out, pull = jax.vjp(call, rows, weights)
        return out, *pull(cotangent)

    if implementation == "megablox" and check_vma:
        with pytest.raises(ValueError, match=r"rows: vary over \['data'\], .* check_vma=False"):
            both()
        return
    held_to_oracle(dict(zip(("out", "d_rows", "d_weights"), both(), strict=True)), draw)


@pytest.mark.parametrize("sizes", SIZES, ids=lambda s: s.name)
@pytest.mark.parametrize("height", [16, 128])
def test_the_schedule_covers_every_row_once(sizes, height):
    rows, groups = sum(sizes.sizes) + sizes.inert, len(sizes.sizes)
    table, used = schedule(jnp.array(sizes.sizes, jnp.int32), rows, height)
    assert table.shape == (3, row_tiles(rows, groups, height)) and used <= table.shape[1]
    owners = np.repeat(np.arange(groups + 1), [*sizes.sizes, sizes.inert])
    seen = []
    for group, first, stop in np.asarray(table).T[: int(used[0])]:
        rows_of_tile = np.arange(first, min(first + height, stop))
        assert len(rows_of_tile) and np.all(owners[rows_of_tile] == group)
        seen += rows_of_tile.tolist()
    assert seen == list(range(rows))
    ends = np.cumsum([0, *sizes.sizes])
    np.testing.assert_array_equal(bounds(jnp.array(sizes.sizes, jnp.int32)), ends)


def test_block_size_wastes_at_most_half():
    for rows, groups in [(4096, 8), (131072, 896), (8192 * 4, 64), (10**6, 4)]:
        block = block_size(rows, groups)
        assert block & (block - 1) == 0
        assert groups * block <= rows / 2


@pytest.mark.parametrize("shape", [(0, 4, 3), (6, 0, 3), (6, 4, 0)])
@pytest.mark.parametrize("implementation", ["blocked", "megablox"])
def test_empty_arrays(shape, implementation):
    n, inner, outer = shape
    rows, weights = jnp.ones((n, inner)), jnp.ones((2, inner, outer))
    sizes = jnp.array([n // 2, 0], jnp.int32)
    call = lambda r, w: grouped_matmul(r, w, sizes, implementation=implementation)  # noqa: E731
    out, pull = jax.vjp(call, rows, weights)
    assert out.shape == (n, outer)
    for gradient, x in zip(pull(jnp.ones_like(out)), (rows, weights), strict=True):
        assert gradient.shape == x.shape and not np.any(gradient)


def test_a_platform_gets_its_kernels():
    spec = Spec(1024, 8, 128, 256, "bfloat16")
    why = dispatch.explain("grouped_matmul", spec, "tpu")
    assert why["megablox"] is None and why["mosaic_gpu"] == (
        "it runs on Hopper GPUs, and the platform is tpu"
    )
    assert dispatch.explain("grouped_matmul", spec, "gpu")["megablox"] == (
        "it runs on TPUs, and the platform is gpu"
    )
    exact = Spec(1024, 8, 128, 256, "float64")
    for platform in ("cpu", "gpu", "tpu"):
        why = dispatch.explain("grouped_matmul", exact, platform)
        assert [name for name, reason in why.items() if reason is None] == ["blocked"]


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(rows=jnp.zeros((4, K), jnp.int32)), r"rows: int32\[4, 5\] is not floating"),
        (dict(weights=jnp.zeros((2, K + 1, M))), r"weights: shape \[2, 6, 3\] is not"),
        (dict(weights=jnp.zeros((2, K, M), jnp.bfloat16)), "weights: dtype bfloat16 is not"),
        (dict(group_sizes=jnp.zeros(2)), r"group_sizes: float32\[2\] is not int32"),
        (dict(group_sizes=jnp.array([3, 2])), r"group_sizes: \[3, 2\] must be >= 0 and sum to"),
        (dict(group_sizes=jnp.array([-1, 2])), r"group_sizes: \[-1, 2\] must be >= 0"),
        (dict(implementation="magic"), f"implementation='magic' is none of {NAMES}"),
        (dict(implementation="mosaic_gpu"), "the platform is cpu"),
        (dict(implementation="triton"), "it needs a GPU, not cpu"),
    ],
)
def test_bad_input_is_named(change, message):
    call = dict(rows=jnp.zeros((4, K)), weights=jnp.zeros((2, K, M)), group_sizes=jnp.array([1, 2]))
    with pytest.raises(ValueError, match=message):
        grouped_matmul(**{**call, **change})
