"""Keys and queries as factors of pairs, for `gradients`: 32 channels of a chunk, in a warpgroup.

Each use computes them anew: kept, they would not fit the registers.
"""

import dataclasses
from typing import Any

from jax import lax

from . import blocks, exchange, tiles
from .chunks import Chunks
from .tiles import cols, load, rows, wide


@dataclasses.dataclass(frozen=True)
class Factors:
    """A query's factor is times `c.scale`; every factor is TILE, f32.

    keys: buffer of bf16; queries: TILE of bf16; both raw. key_scale, query_scale: ROWs, what norms
    them. within: TILE, the running sum of log decays of every block. shift: of the exponents.
    decays, sums: tables (`exchange`), of the blocks' decays and one whose row 0 is 0.
    """

    c: Chunks
    keys: Any
    queries: Any
    key_scale: Any
    query_scale: Any
    within: Any
    shift: float
    decays: Any
    sums: Any

    def key(self, scale=None):
        """Times `scale` per token, if that is not what norms it."""
        scale = self.key_scale if scale is None else scale
        return wide(load(self.keys)) * rows(scale, self.within.shape)

    def unit_query(self, scale=None):
        """The same; not times `c.scale`."""
        scale = self.query_scale if scale is None else scale
        queries = lax.optimization_barrier(self.queries)
        return wide(queries) * rows(scale, self.within.shape)

    # Numbers per token, multiplied first, save a product an element. With exact gates that takes
    # registers which their loops lack.
    def query(self):
        if self.c.bounded:
            return self.unit_query(self.query_scale * self.c.scale)
        return self.unit_query() * self.c.scale

    def times_key(self, x):
        """A ROW times the keys."""
        if self.c.bounded:
            return self.key(x * self.key_scale)
        return rows(x, self.within.shape) * self.key()

    def times_query(self, x):
        """A ROW times the queries' factors."""
        if self.c.bounded:
            return self.unit_query(x * self.query_scale * self.c.scale)
        return rows(x, self.within.shape) * self.unit_query() * self.c.scale

    def decay(self, table):
        """COL: of the block that the table names for each warp."""
        return exchange.load_row(self.decays, table, self.within.shape[1])

    def after(self):
        """COL: the decay from the end of each warp's block to that of the chunk."""
        return self.decay((2, 3, 4, 0)) * self.decay((3, 4, 0, 0)) * self.decay((4, 0, 0, 0))

    def seen(self):
        """The decay from its block's start to a token, times 2^shift."""
        return tiles.exp2_anew(self.within, 1.0, self.shift, self.sums)

    def back(self):
        """One over that."""
        return tiles.exp2_anew(self.within, -1.0, -self.shift, self.sums)

    def to_end(self):
        """The decay from a token to its block's end."""
        shape = self.within.shape
        if self.c.bounded:
            return self.back() * cols(self.decay((1, 2, 3, 4)) * 2.0**self.shift, shape)
        return tiles.exp2(cols(blocks.last_row(self.within), shape) - self.within)
