"""Which rows a tile of a grouped matmul has: tiles never hold rows of two groups."""

import jax
import jax.numpy as jnp


def row_tiles(rows: int, groups: int, height: int) -> int:
    """An upper bound on the tiles of `rows` rows in so many groups, with one for inert rows."""
    return rows // height + groups + 1


def schedule(group_sizes: jax.Array, rows: int, height: int) -> tuple[jax.Array, jax.Array]:
    """Tiles of `height` rows that begin at the first row of their group; the rows past the last
    group are a group more, number G.

    Returns: `[3, row_tiles]` int32, a tile's group, its first row and the one after its group's
    last; and `[1]`, how many tiles are in use.
    """
    groups = group_sizes.shape[0]
    sizes = jnp.append(group_sizes, rows - group_sizes.sum(dtype=jnp.int32))
    counts = -(-sizes // height)
    stop, last = _sums(sizes), _sums(counts)
    index = jnp.arange(row_tiles(rows, groups, height), dtype=jnp.int32)
    group = (last[None, :] <= index[:, None]).sum(axis=1, dtype=jnp.int32)
    at = jnp.minimum(group, groups)
    first = (stop - sizes)[at] + (index - (last - counts)[at]) * height
    return jnp.stack([at, first, stop[at]]), last[-1:]


def bounds(group_sizes: jax.Array) -> jax.Array:
    """`[G + 1]` int32: where every group begins, and where the last one ends."""
    return jnp.pad(_sums(group_sizes), (1, 0))


def _sums(x: jax.Array) -> jax.Array:
    """The sums up to each element, by comparison: one small program where a scan is several."""
    index = jnp.arange(x.shape[0])
    return jnp.where(index[:, None] >= index[None, :], x, 0).sum(axis=1, dtype=jnp.int32)
