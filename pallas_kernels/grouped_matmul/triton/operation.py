"""The launches of the Triton kernels, and their tiles: a table by shape and target."""

import dataclasses

import jax

from ...kda.triton import launch
from ...kda.triton.launch import Target
from ..schedule import bounds, row_tiles, schedule
from . import kernels


@dataclasses.dataclass(frozen=True)
class Tile:
    """rows, columns of an output tile and depth, the step of the contraction; warps per program and
    stages of its loads' pipeline."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


def tile_of(rows: int, columns: int, depth: int, dtype: str, target: Target) -> Tile:
    """The tile of an output whose groups have about `rows` rows and `columns` columns, with a
    contraction of `depth`."""
    if dtype == "float32":
        # Three TF32 products hold their operands in three parts.
        best = Tile(64, 64, 32, 4, 2 if target.shared > 96 * 1024 else 1)
    elif target.amd:
        best = Tile(128, 128, 32, 8, 2)
    elif target.shared > 200 * 1024:
        best = Tile(128, 256, 64, 8, 3)
    elif target.shared > 128 * 1024:
        best = Tile(128, 128, 64, 8, 3)
    else:
        best = Tile(128, 128, 32, 8, 3)
    small = Tile(
        min(best.rows, _power(rows)),
        min(best.columns, _power(columns)),
        min(best.depth, _power(depth)),
        best.warps,
        best.stages,
    )
    # Eight warps have nothing to share in less than a tile of 128 by 64.
    few = small.rows * small.columns <= 64 * 64
    return dataclasses.replace(small, warps=min(small.warps, 4)) if few else small


def _power(size: int) -> int:
    """The power of two, at least 16, that holds so much."""
    return max(16, 1 << (size - 1).bit_length())


def by_rows(
    rows: jax.Array, weights: jax.Array, group_sizes: jax.Array, transposed: bool
) -> jax.Array:
    """`rows [N, K] @ weights[g] [K, M]`, or with `transposed` `[M, K]`, of each row's group."""
    n, inner = rows.shape
    groups, outer = weights.shape[0], weights.shape[1 if transposed else 2]
    target = launch.current_target()
    tile = tile_of(2 * n // groups, outer, inner, rows.dtype.name, target)
    table, used = schedule(group_sizes, n, tile.rows)
    across = -(-outer // tile.columns)
    (out,) = launch.call(
        kernels.by_rows,
        (rows, weights, table, used),
        (row_tiles(n, groups, tile.rows), groups),
        (jax.ShapeDtypeStruct((n, outer), rows.dtype),),
        row_tiles(n, groups, tile.rows) * across,
        warps=tile.warps,
        stages=tile.stages,
        K=inner,
        M=outer,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        DEPTH=tile.depth,
        TRANSPOSED=transposed,
        PRECISION=target.precision if rows.dtype == "float32" else "ieee",
    )
    return out


def by_group(rows: jax.Array, cotangent: jax.Array, group_sizes: jax.Array) -> jax.Array:
    """`rows[own].T @ cotangent[own]`, `[G, K, M]`, over every group's own rows."""
    (n, inner), outer = rows.shape, cotangent.shape[1]
    groups = group_sizes.shape[0]
    target = launch.current_target()
    tile = tile_of(inner, outer, max(n // groups, 16), rows.dtype.name, target)
    down, across = -(-inner // tile.rows), -(-outer // tile.columns)
    (out,) = launch.call(
        kernels.by_group,
        (rows, cotangent, bounds(group_sizes)),
        (),
        (jax.ShapeDtypeStruct((groups, inner, outer), rows.dtype),),
        groups * down * across,
        warps=tile.warps,
        stages=tile.stages,
        K=inner,
        M=outer,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        DEPTH=tile.depth,
        PRECISION=target.precision if rows.dtype == "float32" else "ieee",
    )
    return out
