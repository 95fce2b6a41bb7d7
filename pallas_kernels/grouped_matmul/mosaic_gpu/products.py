"""The Hopper kernels: rows times the matrix of their group, and the gradient of the matrices."""

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from ...kda.mosaic_gpu import tiles
from ..schedule import bounds, schedule
from . import pipeline
from .pipeline import PANEL, ROWS, STEP


def by_rows(rows: jax.Array, weights: jax.Array, group_sizes: jax.Array, transposed: bool = False):
    """`rows [N, K] @ weights[g] [K, M]`, or with `transposed` `[M, K]`, of each row's group."""
    n, inner = rows.shape
    groups, outer = weights.shape[0], weights.shape[1 if transposed else 2]
    tile = pipeline.tile_of(outer)
    height, width = tile.shape
    across = -(-outer // width)
    steps = inner // STEP

    def place(refs, index):
        table_r = refs[2]
        t = lax.div(index, across)
        return table_r[0, t], table_r[1, t], table_r[2, t], lax.rem(index, across) * width

    def count(refs):
        return refs[3][0] * across

    def fetch(refs, index):
        rows_r, weights_r = refs[:2]
        (_, rows_s), weights_s = refs[5:7]
        group, first, _, column = place(refs, index)

        def copy(i, slot, barrier):
            inside = pl.ds(i * STEP, STEP)
            columns = pl.ds(column, width)
            matrix = weights_r.at[group]
            source = matrix.at[columns, inside] if transposed else matrix.at[inside, columns]
            plgpu.copy_gmem_to_smem(
                rows_r.at[pl.ds(first, height), inside], rows_s.at[slot], barrier
            )
            plgpu.copy_gmem_to_smem(source, weights_s.at[slot], barrier)

        return jnp.where(group < groups, steps, 0), copy

    def multiply(refs, index, part):
        out_r = refs[4]
        (rows_s, _), weights_s = refs[5:7]
        group, first, stop, column = place(refs, index)
        own = pl.ds(pl.multiple_of(part * ROWS, ROWS), ROWS)
        start = first + part * ROWS

        def operands(slot):
            right = weights_s.at[slot]
            return rows_s.at[slot, own], right.T if transposed else right

        def target(p):
            at = column + p * PANEL
            return out_r.at[pl.ds(start, ROWS), pl.ds(at, PANEL)], at < outer

        return jnp.where(group < groups, steps, 0), nothing, operands, stop - start, target

    table, used = schedule(group_sizes, n, height)
    shape = (width, STEP) if transposed else (STEP, width)
    call = pipeline.kernel(
        tile,
        fetch,
        multiply,
        count,
        scratch=(
            pipeline.by_row((tile.stages, height, STEP), rows.dtype),
            tiles.swizzled((tile.stages, *shape), rows.dtype),
        ),
        out_type=jax.ShapeDtypeStruct((n, outer), rows.dtype),
        name="grouped_matmul_transposed" if transposed else "grouped_matmul",
    )
    return call(rows, weights, table, used)


def by_group(rows: jax.Array, cotangent: jax.Array, group_sizes: jax.Array):
    """`rows[own].T @ cotangent[own]`, `[G, K, M]`, over every group's own rows."""
    inner, outer = rows.shape[1], cotangent.shape[1]
    groups = group_sizes.shape[0]
    tile = pipeline.tile_of(outer)
    height, width = tile.shape
    across = -(-outer // width)
    down = -(-inner // height)

    def place(refs, index):
        """Group, first channel and column; its rows, and the multiple of 8 where copies begin."""
        bounds_r = refs[2]
        group = lax.div(index, down * across)
        rest = lax.rem(index, down * across)
        start, stop = bounds_r[group], bounds_r[group + 1]
        base = lax.div(start, 8) * 8
        steps = jnp.where(stop > start, lax.div(stop - base + STEP - 1, STEP), 0)
        channel, column = lax.div(rest, across) * height, lax.rem(rest, across) * width
        return group, channel, column, start, stop, base, steps

    def fetch(refs, index):
        rows_r, cotangent_r = refs[:2]
        rows_s, cotangent_s = refs[4:6]
        _, channel, column, _, _, base, steps = place(refs, index)

        def copy(i, slot, barrier):
            here = pl.ds(pl.multiple_of(base + i * STEP, 8), STEP)
            plgpu.copy_gmem_to_smem(
                rows_r.at[here, pl.ds(channel, height)], rows_s.at[slot], barrier
            )
            plgpu.copy_gmem_to_smem(
                cotangent_r.at[here, pl.ds(column, width)], cotangent_s.at[slot], barrier
            )

        return steps, copy

    def multiply(refs, index, part):
        out_r, rows_s, cotangent_s = refs[3:6]
        group, channel, column, start, stop, base, steps = place(refs, index)
        own = pl.ds(pl.multiple_of(part * ROWS, ROWS), ROWS)

        def prepare(i, slot):
            """Rows of other groups, which may be anything, count for nothing. Both warpgroups clear
            the operand that they share, so that neither waits for the other."""
            low, high = start - (base + i * STEP), stop - (base + i * STEP)

            @pl.when(jnp.logical_or(low > 0, high < STEP))
            def _():
                pipeline.zero_rows(rows_s.at[slot], height, part, 1, low, high)
                pipeline.zero_rows(cotangent_s.at[slot], width, 0, width // PANEL, low, high)
                plgpu.commit_smem()

        def operands(slot):
            return rows_s.at[slot, :, own].T, cotangent_s.at[slot]

        def target(p):
            at = column + p * PANEL
            box = out_r.at[group, pl.ds(channel + part * ROWS, ROWS), pl.ds(at, PANEL)]
            return box, at < outer

        # The last tile may reach beyond K, of which 64 is a divisor.
        kept = jnp.where(channel + part * ROWS < inner, ROWS, 0)
        return steps, prepare, operands, kept, target

    call = pipeline.kernel(
        tile,
        fetch,
        multiply,
        lambda refs: groups * down * across,
        scratch=(
            tiles.swizzled((tile.stages, STEP, height), rows.dtype),
            tiles.swizzled((tile.stages, STEP, width), rows.dtype),
        ),
        out_type=jax.ShapeDtypeStruct((groups, inner, outer), rows.dtype),
        name="grouped_matmul_weights",
    )
    return call(rows, cotangent, bounds(group_sizes))


def nothing(step, slot) -> None:
    """No preparation: every row of a product is one of the output."""
