"""Grouped matmul on TPUs: jax's megablox kernels, wrapped so that the whole contract holds.

Megablox wants a whole number of row tiles and leaves rows past the last group unwritten; here rows
are padded, and what is no group's is set to zero afterwards, block by block from the first such row
on. Tiles of rows are not aligned with groups, so every boundary within a tile costs one tile more.
Its default tiles read the weights anew for every tile of rows; `tiling` chooses by the bytes and
multiplications that follow. Off a TPU the kernels are interpreted.
"""

import contextlib
import functools
import itertools
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
LANES = 128
# Of the 16 MiB that a kernel has by default on every generation.
VMEM = 14 << 20


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
    held = -(-spec.rows // LANES) * LANES
    if held != spec.rows:
        rows = jnp.pad(rows, ((0, held - spec.rows), (0, 0)))
    return differentiable(sys.modules[__name__], rows, weights, sizes)[: spec.rows]


@functools.cache
def tiling(
    rows: int, groups: int, inner: int, outer: int, itemsize: int, of_weights: bool
) -> tuple[int, int, int]:
    """Tiles of rows, K and M (as the product has them) of the least modelled time.

    The model: a byte costs 300 FLOPs (about a TPU7x core's), a grid step half a megabyte. With all
    of K in one tile a group's weights are read once, and rows once per tile of columns; in parts,
    both are read anew for every visit of a tile of rows. The gradient of the weights reads each
    operand once per tile of the other's width.
    """
    best: tuple[float, tuple[int, int, int]] = (float("inf"), (LANES, LANES, LANES))
    k_sizes, m_sizes = (
        sorted({_up(-(-width // parts)) for parts in range(1, 17)}) for width in (inner, outer)
    )
    for tm, tk, tn in itertools.product((128, 256, 512), k_sizes, m_sizes):
        if rows % tm or _vmem(tm, tk, tn, itemsize, of_weights) > VMEM:
            continue
        visits = rows // tm + groups
        k_parts, m_parts = -(-inner // tk), -(-outer // tn)
        # The gradient contracts a tile's rows, of which a matrix unit takes 256 at a time.
        height = max(tm, 256) if of_weights else tm
        flops = 2 * visits * height * k_parts * tk * m_parts * tn
        x, w, y = rows * inner, groups * inner * outer, rows * outer
        if of_weights:
            elements = x * m_parts + y * k_parts + w
        elif k_parts == 1:
            elements = x * m_parts + w + y
        else:
            elements = visits * (tm * inner * m_parts + inner * outer) + y
        cost = max(flops / 300, elements * itemsize) + 5e5 * visits * k_parts * m_parts
        best = min(best, (cost, (tm, tk, tn)))
    return best[1]


def _up(width: int) -> int:
    return -(-width // LANES) * LANES


def _vmem(tm: int, tk: int, tn: int, itemsize: int, of_weights: bool) -> int:
    """Bytes of a kernel: two buffers of every block, and its sums. Exact products of float32 split
    their operands."""
    blocks = 2 * (tm * tk + tk * tn + tm * tn) * itemsize
    sums = 4 * (tk * tn if of_weights else tm * tn)
    return blocks + sums + (2 * (tm * tk + tk * tn + tm * tn) * 2 if itemsize == 4 else 0)


def forward(rows: jax.Array, weights: jax.Array, group_sizes: jax.Array) -> jax.Array:
    return _by_rows(rows, weights, group_sizes, transposed=False)


def d_rows(cotangent: jax.Array, weights: jax.Array, group_sizes: jax.Array) -> jax.Array:
    return _by_rows(cotangent, weights, group_sizes, transposed=True)


def d_weights(rows: jax.Array, cotangent: jax.Array, group_sizes: jax.Array) -> jax.Array:
    shape = len(rows), len(group_sizes), rows.shape[1], cotangent.shape[1]
    tiles = tiling(*shape, rows.dtype.itemsize, of_weights=True)
    with _exact(rows.dtype):
        return _call(tgmm)(rows.T, cotangent, group_sizes, rows.dtype, tiles)


def _by_rows(rows, weights, group_sizes, transposed):
    (n, inner), outer = rows.shape, weights.shape[1 if transposed else 2]
    shape = n, len(group_sizes), inner, outer
    tiles = tiling(*shape, rows.dtype.itemsize, of_weights=False)
    with _exact(rows.dtype):
        out = _call(gmm)(rows, weights, group_sizes, rows.dtype, tiles, transpose_rhs=transposed)
    return _cleared(out, group_sizes.sum())


def _cleared(out: jax.Array, live: jax.Array) -> jax.Array:
    """Zeros from row `live` on, block by block, so that what there is none of costs nothing."""
    rows = len(out)
    size = min(rows, 1024)

    def clear(i: jax.Array, out: jax.Array) -> jax.Array:
        first = jnp.minimum(i * size, rows - size)
        block = jax.lax.dynamic_slice_in_dim(out, first, size)
        block = jnp.where((first + jnp.arange(size) < live)[:, None], block, 0)
        return jax.lax.dynamic_update_slice_in_dim(out, block, first, 0)

    return jax.lax.fori_loop(live // size, -(-rows // size), clear, out)


def _call(kernel):
    return functools.partial(kernel, interpret=dispatch.current_platform() != "tpu")


def _exact(dtype):
    """Products of float32 take as many passes of the matrix unit as their accuracy needs."""
    if dtype == jnp.float32:
        return jax.default_matmul_precision("highest")
    return contextlib.nullcontext()
