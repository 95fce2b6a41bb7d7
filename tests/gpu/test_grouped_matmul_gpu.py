"""The grouped matmul's kernels against the loop over groups, on a GPU (skipped elsewhere)."""

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from pallas_kernels import dispatch
from pallas_kernels.grouped_matmul import Spec, grouped_matmul, mosaic_gpu
from tests.pallas_kernels.grouped_matmul_suite import (
    Draw,
    GroupedMatmulSuite,
    Sizes,
    both,
    compiled,
    held_to_oracle,
)

GPU = jax.default_backend() == "gpu"
HOPPER = GPU and mosaic_gpu.refuses(Spec(1, 1, 64, 64, "bfloat16"), "gpu") is None
pytestmark = pytest.mark.skipif(not GPU, reason="needs a GPU")
on_hopper = pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")


@on_hopper
class TestMosaicGpu(GroupedMatmulSuite):
    implementation = "mosaic_gpu"
    dtypes = ("bfloat16", "float16")
    widths = ((64, 128), (192, 320), (64, 64), (1024, 512))


class TestTriton(GroupedMatmulSuite):
    implementation = "triton"
    dtypes = ("bfloat16", "float16", "float32")
    widths = ((40, 33), (512, 256))


@on_hopper
def test_many_groups_and_rows():
    """More tiles than multiprocessors, so that programs draw their tiles, twice to the bit."""
    rng = np.random.default_rng()
    sizes = tuple(rng.multinomial(20000, rng.dirichlet(np.full(200, 0.3))).tolist())
    draw = Draw(Sizes("many", sizes, 300), 256, 320, "bfloat16")
    first, again = (compiled("mosaic_gpu")(*draw.arrays()) for _ in range(2))
    held_to_oracle(first, draw)
    for name, x in first.items():
        np.testing.assert_array_equal(x, again[name], err_msg=name)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("implementation", [pytest.param("mosaic_gpu", marks=on_hopper), "triton"])
def test_runs_in_a_shard_map(implementation, check_vma):
    draw = Draw(Sizes("two", (110, 30), 3), 64, 128, "bfloat16")
    rows, weights, cotangent, sizes = draw.arrays()
    with jax.set_mesh(jax.make_mesh((1,), ("data",))):

        def call(rows, weights):
            return jax.shard_map(
                lambda r, w, s: grouped_matmul(r, w, s, implementation=implementation),
                in_specs=(P("data"), P(), P()),
                out_specs=P("data"),
                check_vma=check_vma,
            )(rows, weights, sizes)

        @jax.jit
        def program(rows, weights):
            out, pull = jax.vjp(call, rows, weights)
            return out, *pull(jax.reshard(cotangent, P("data")))

        found = program(jax.reshard(rows, P("data")), weights)
    held_to_oracle(dict(zip(("out", "d_rows", "d_weights"), found, strict=True)), draw)


@on_hopper
def test_what_the_hopper_kernels_refuse_goes_to_triton():
    spec = Spec(1000, 4, 72, 192, "float32")
    chosen = dispatch.choose("grouped_matmul", spec, None)
    assert chosen.__name__.endswith("triton")
    draw = Draw(Sizes("ragged", (33, 0, 70, 5), 3), 72, 192, "float32")
    held_to_oracle(jax.jit(both(None))(*draw.arrays()), draw)
    assert (
        dispatch.choose("grouped_matmul", Spec(1000, 4, 128, 192, "bfloat16"), None) is mosaic_gpu
    )


def test_float64_is_exact():
    with jax.enable_x64(True):
        draw = Draw(Sizes("ragged", (33, 0, 70, 5), 3), 64, 64, "float64")
        held_to_oracle(jax.jit(both(None))(*draw.arrays()), draw)
