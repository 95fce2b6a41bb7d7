"""The gradient of the log decays of a chunk: what `gradients` ends with.

A log decay has a share in every product that it decays. Of pairs and of what reads the state before
the chunk those are the products at or after its token, of what tokens leave in the state after the
chunk those before it, and of what the state before leaves there all.
"""

import functools

import jax.experimental.pallas as pl

from . import blocks, exchange, tiles
from .chunks import Chunks
from .tiles import CHUNK, cols, load, wide


def of_log_decays(c: Chunks, pairs, leaves, states, decay, sums):
    """The gradient of the log decays, TILE.

    Args:
      pairs: for every token its row factor times the gradient of that, less the same of its column
        factor, TILE.
      leaves: what it leaves in the state after the chunk times the gradient of that state, TILE.
      states: this warpgroup's channels of the state before and of the gradient of the state after,
        two buffers `[V, n]` in bf16.
      decay: that of the state through the whole chunk, COL.
      sums: a table (`exchange`) to compute in.
    """
    # Of what leaves with earlier tokens: not with the token's own taken off again, which may be the
    # largest by far.
    leaves = blocks.cumsum(leaves)
    exchange.store_lasts(leaves, sums)
    leaves = blocks.moved_down(leaves)
    tiles.warpgroup_barrier()
    width = pairs.shape[1]
    told = functools.partial(exchange.load_row, sums, n=width)
    rest = told((0, 1, 1, 1)) + told((0, 0, 2, 2)) + told((0, 0, 0, 3))
    state = tiles.zeros(pairs.shape)
    for j in range(c.key_width // CHUNK):
        before, after = (wide(load(x.at[pl.ds(j * CHUNK, CHUNK)])) for x in states)
        state = state + before * after
    tiles.warpgroup_barrier()
    exchange.store_column_sums(state, sums)
    tiles.warpgroup_barrier()
    rest = rest + exchange.total(sums) * decay

    tiles.warpgroup_barrier()
    pairs = blocks.suffix_sum(pairs)
    exchange.store_firsts(pairs, sums)
    tiles.warpgroup_barrier()
    rest = rest + told((2, 3, 4, 0)) + told((3, 4, 0, 0)) + told((4, 0, 0, 0))
    return pairs + leaves + cols(rest, pairs.shape)
