"""What is masked of a chunk: what is not its own, real tokens, and tokens of other documents."""

from collections.abc import Callable

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from . import tiles
from .chunks import Chunks, Place
from .tiles import BF16, CHUNK, ROW, load, rows, wide


class Masks:
    """The masks of a chunk, applied where it is not whole, as few chunks are; of others they cost
    no more than branches. `labels(layout)`, called only of packed rows: those of the chunk's
    places, ROW or COL, negative at padding."""

    def __init__(self, c: Chunks, place: Place, labels: Callable):
        self.c, self.place, self.labels = c, place, labels

    def unless_whole(self, mask: Callable, x=()):
        """mask(x), and what else `mask` does, in a chunk that is not whole; in others x, which is
        any tree."""
        if not (self.c.packed or self.c.ragged):
            return x
        return lax.cond(self.place.whole, lambda x: x, mask, x)

    def if_shared(self, mask: Callable, x=()):
        """The same, only of rows that documents may share."""
        return self.unless_whole(mask, x) if self.c.packed else x

    def _real(self, layout):
        index = plgpu.broadcasted_iota(jnp.int32, (CHUNK,), 0, layout=layout)
        real = index < self.place.count
        return real & (self.labels(layout) > 0) if self.c.packed else real

    @staticmethod
    def rows_where(mask, x):
        """A TILE of f32 with zeros in rows that a ROW does not name."""
        return jnp.where(rows(mask, x.shape), x, 0.0)

    def _rows(self, x):
        return self.rows_where(self._real(ROW), x)

    def tiles(self, x):
        """A tree of TILEs of f32 with zeros at tokens that are not the chunk's own, real ones."""
        return self.unless_whole(lambda x: jax.tree.map(self._rows, x), x)

    def vectors(self, x, layouts=ROW):
        """The same of values per token; `layouts`: theirs, or a tree of theirs."""

        def one(x, layout):
            return jnp.where(self._real(layout), x, 0.0)

        def mask(x):
            if layouts is ROW:
                return jax.tree.map(lambda y: one(y, ROW), x)
            return jax.tree.map(one, x, layouts)

        return self.unless_whole(mask, x)

    def clear(self, *buffers) -> None:
        """The same in shared memory, tiles of bf16, whatever stands there, NaN included."""

        def mask(x):
            for buffer in buffers:
                buffer[...] = self._rows(wide(load(buffer))).astype(BF16)
            tiles.warpgroup_barrier()
            return x

        self.unless_whole(mask)
