"""Grouped matmul on TPUs: jax's megablox kernels, wrapped so that the whole contract holds.

Megablox wants a whole number of row tiles and leaves rows past the last group unwritten; here rows
are padded, and what is not a group's is set to zero afterwards. Tiles of rows are not aligned with
groups, so every boundary within a tile costs one tile more: row tiles are at most half a mean
group. Off a TPU the kernels are interpreted.
"""

import contextlib
import functools
import sys

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm, tgmm

from .. import dispatch
from ..checks import fail
from .blocked import run as _blocked
from .gradients import differentiable
from .spec import Inputs, Spec

DTYPES = ("bfloat16", "float32")


def refuses(spec: Spec, platform: str) -> str | None:
    if platform == "gpu":
        return "it runs on TPUs, and the platform is gpu"
    if spec.dtype not in DTYPES:
        return f"rows are {spec.dtype}, and it takes {' and '.join(DTYPES)}"
    return None


def run(spec: Spec, inputs: Inputs) -> jax.Array:
    if 0 in (spec.rows, spec.inner, spec.outer):
        return _blocked(spec, inputs)  # nothing is multiplied
    rows, weights, sizes = inputs
    if axes := jax.typeof(rows).manual_axis_type.varying:
        fail("rows", f"vary over {sorted(axes)}, and megablox needs a shard_map of check_vma=False")
    height = row_tile(spec.rows, spec.groups)
    held = -(-spec.rows // height) * height
    if held != spec.rows:
        rows = jnp.pad(rows, ((0, held - spec.rows), (0, 0)))
    return differentiable(sys.modules[__name__], rows, weights, sizes)[: spec.rows]


def row_tile(rows: int, groups: int) -> int:
    """Rows of a tile: the power of two below half a mean group, in 128 .. 512."""
    half = max(rows // (2 * groups), 1)
    return min(max(1 << (half.bit_length() - 1), 128), 512)


def tiling(rows: int, groups: int, inner: int, outer: int, dtype: str) -> tuple[int, int, int]:
    """Tiles of rows, of the contraction (or of K in the gradient of the weights) and of columns.

    In float32 a tile holds half as many columns, so that both fit the 16 MiB of VMEM that a kernel
    has by default, on every generation.
    """
    wide = 1024 if dtype == "bfloat16" else 512
    return row_tile(rows, groups), _lanes(inner, 512), _lanes(outer, wide)


def _lanes(width: int, most: int) -> int:
    """The largest multiple of 128 up to `most` that wastes the least of a width."""
    sizes = range(128, most + 1, 128)
    return min(sizes, key=lambda size: (-(-width // size) * size, -size))


def forward(rows: jax.Array, weights: jax.Array, group_sizes: jax.Array) -> jax.Array:
    return _by_rows(rows, weights, group_sizes, transposed=False)


def d_rows(cotangent: jax.Array, weights: jax.Array, group_sizes: jax.Array) -> jax.Array:
    return _by_rows(cotangent, weights, group_sizes, transposed=True)


def d_weights(rows: jax.Array, cotangent: jax.Array, group_sizes: jax.Array) -> jax.Array:
    tiles = tiling(len(rows), len(group_sizes), rows.shape[1], cotangent.shape[1], rows.dtype.name)
    with _exact(rows.dtype):
        return _call(tgmm)(rows.T, cotangent, group_sizes, rows.dtype, tiles)


def _by_rows(rows, weights, group_sizes, transposed):
    (n, inner), outer = rows.shape, weights.shape[1 if transposed else 2]
    tiles = tiling(n, len(group_sizes), inner, outer, rows.dtype.name)
    with _exact(rows.dtype):
        out = _call(gmm)(rows, weights, group_sizes, rows.dtype, tiles, transpose_rhs=transposed)
    return jnp.where((jnp.arange(n) < group_sizes.sum())[:, None], out, 0)


def _call(kernel):
    return functools.partial(kernel, interpret=dispatch.current_platform() != "tpu")


def _exact(dtype):
    """Products of float32 take as many passes of the matrix unit as their accuracy needs."""
    if dtype == jnp.float32:
        return jax.default_matmul_precision("highest")
    return contextlib.nullcontext()
