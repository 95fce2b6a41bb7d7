"""What is static about the kernels of a call, and where a program's chunk lies."""

import dataclasses

import jax.numpy as jnp
from jax import lax

from .tiles import CHUNK


@dataclasses.dataclass(frozen=True)
class Chunks:
    """What is static about the kernels of a call.

    tokens: T, of `held` in the arrays; chunks: NC of every row. `packed`: chunks start where the
    tables say, and tokens carry labels; else chunk n starts at 64 n and only the last may be
    ragged. regions: R, stretches of a row that the scan takes on their own: what the S `slots` of
    states own and what none does, or the P `pieces` of a row that is cut (else 1).
    """

    batch: int
    tokens: int
    held: int
    regions: int
    slots: int
    pieces: int
    chunks: int
    heads: int
    value_heads: int
    key_width: int
    value_width: int
    gate_form: str
    beta_form: str
    lower_bound: float
    has_dt_bias: bool
    l2norm: bool
    scale: float
    packed: bool

    @property
    def bounded(self) -> bool:
        return self.gate_form == "bounded" and self.lower_bound >= -5.0

    @property
    def ragged(self) -> bool:
        return not self.packed and self.tokens % CHUNK != 0

    @property
    def rows(self) -> int:
        """Rows of prepared arrays: `[B HV, NC 64, ...]`."""
        return self.batch * self.value_heads

    @property
    def least(self) -> int:
        """Chunks that every row has at least: those of its tokens, and one of each region."""
        return max(-(-self.tokens // CHUNK), self.regions // self.pieces)

    @property
    def length(self) -> int:
        return self.chunks * CHUNK


class Place:
    """Where a program's chunk lies: row b, chunk n, head h, its first token and how many; `whole`
    if all 64 are real and of the one document that is live before and after them."""

    def __init__(self, c: Chunks, index, tables):
        self.head = lax.rem(index, c.value_heads)
        rest = lax.div(index, c.value_heads)
        self.row = lax.rem(rest, c.batch)
        self.chunk = lax.div(rest, c.batch)
        self.out = self.row * c.value_heads + self.head
        self.key_head = lax.div(self.head, c.value_heads // c.heads)
        if c.packed:
            self.first, self.count, self.entry, self.exit, whole = (
                tables[self.row, i, self.chunk] for i in range(5)
            )
            self.whole = whole == 1
        else:
            self.first = self.chunk * CHUNK
            self.count = jnp.minimum(c.tokens - self.first, CHUNK)
            self.whole = self.count == CHUNK
