"""What every implementation of the grouped matmul is held to: a loop over groups in float64.

A test file names an implementation, its dtypes and shapes that it takes, as a subclass.
"""

import contextlib
import dataclasses
import functools
import secrets

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.grouped_matmul import grouped_matmul

# Relative root mean square errors: the rounding of one result for half precision.
TOLERANCES = {"float64": 1e-14, "float32": 2e-6, "float16": 5e-4, "bfloat16": 3e-3}


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Rows of every group, and rows past the last one."""

    name: str
    sizes: tuple[int, ...]
    inert: int = 0


# One number of rows and of groups, so that one program serves all; tiles hold up to 512 rows.
SIZES = (
    Sizes("ragged, with empty groups", (150, 0, 1, 67, 0, 52)),
    Sizes("all rows in one group", (0, 0, 270, 0, 0, 0)),
    Sizes("whole tiles, and inert rows", (128, 0, 64, 0, 0, 0), 78),
    Sizes("a few rows of the last group", (0, 0, 0, 0, 0, 9), 261),
    Sizes("nothing but inert rows", (0, 0, 0, 0, 0, 0), 270),
)


@dataclasses.dataclass
class Draw:
    """rows, weights, cotangent and their oracle, from a seed that a failure prints."""

    sizes: Sizes
    inner: int
    outer: int
    dtype: str
    seed: int = dataclasses.field(default_factory=lambda: secrets.randbits(32))

    def __post_init__(self):
        rng = np.random.default_rng(self.seed)
        groups, live = len(self.sizes.sizes), sum(self.sizes.sizes)
        n = live + self.sizes.inert
        # Both operands are what the implementation sees: rounded to its dtype.
        self.rows, self.weights, self.cotangent = (
            rng.normal(size=shape).astype(jnp.dtype(self.dtype))
            for shape in ((n, self.inner), (groups, self.inner, self.outer), (n, self.outer))
        )
        self.rows[live:], self.cotangent[live:] = np.nan, np.inf
        self.group_sizes = np.array(self.sizes.sizes, np.int32)

    def arrays(self):
        return [jnp.asarray(x) for x in (self.rows, self.weights, self.cotangent, self.group_sizes)]

    def oracle(self):
        """Output, and gradients of rows and weights, in float64."""
        x, w, ct = (a.astype(np.float64) for a in (self.rows, self.weights, self.cotangent))
        out, d_rows, d_weights = np.zeros_like(ct), np.zeros_like(x), np.zeros_like(w)
        start = 0
        for g, size in enumerate(self.sizes.sizes):
            own = slice(start, start + size)
            out[own], d_rows[own] = x[own] @ w[g], ct[own] @ w[g].T
            d_weights[g] = x[own].T @ ct[own]
            start += size
        return {"out": out, "d_rows": d_rows, "d_weights": d_weights}


@functools.cache
def both(implementation: str | None):
    """Output and gradients by name, as a function of arrays."""

    def program(rows, weights, cotangent, sizes):
        out, pull = jax.vjp(
            lambda r, w: grouped_matmul(r, w, sizes, implementation=implementation), rows, weights
        )
        return dict(zip(("d_rows", "d_weights"), pull(cotangent), strict=True)) | {"out": out}

    return program


@functools.cache
def compiled(implementation: str | None):
    return jax.jit(both(implementation))


def relative_rms(a, b) -> float:
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return np.sqrt(np.mean((a - b) ** 2)) / max(np.sqrt(np.mean(b**2)), 1e-30)


def held_to_oracle(found, draw: Draw) -> None:
    live = sum(draw.sizes.sizes)
    for name, expected in draw.oracle().items():
        got = found[name]
        assert got.shape == expected.shape and got.dtype == draw.dtype, (name, draw)
        if name != "d_weights":
            assert not np.any(got[live:]), (name, draw)
        if np.any(expected):
            assert relative_rms(got, expected) < TOLERANCES[draw.dtype], (name, draw)
        else:
            assert not np.any(got), (name, draw)


class GroupedMatmulSuite:
    """implementation: its name. dtypes, widths (K and M): what the tests use of what it takes."""

    implementation: str
    dtypes: tuple[str, ...] = ("bfloat16",)
    widths: tuple[tuple[int, int], ...] = ((40, 33),)
    program = staticmethod(compiled)

    def context(self):
        """In which calls are made."""
        return contextlib.nullcontext()

    def held(self, draw: Draw) -> None:
        with self.context(), jax.enable_x64(draw.dtype == "float64"):
            held_to_oracle(self.program(self.implementation)(*draw.arrays()), draw)

    @pytest.mark.parametrize("sizes", SIZES, ids=lambda s: s.name)
    def test_matches_the_oracle(self, sizes):
        self.held(Draw(sizes, *self.widths[0], self.dtypes[0]))

    def test_other_dtypes_and_widths(self):
        ragged = Sizes("ragged", (33, 0, 70, 5), 3)
        for dtype in self.dtypes[1:]:
            self.held(Draw(ragged, *self.widths[0], dtype))
        for widths in self.widths[1:]:
            self.held(Draw(ragged, *widths, self.dtypes[0]))

    def test_accumulates_in_at_least_float32(self):
        """3,000 equal terms: a bfloat16 accumulator stalls at 256."""
        inner, outer = self.widths[0]
        shapes = ((3000, inner), (1, inner, outer), (3000, outer))
        arrays = [jnp.ones(shape, jnp.bfloat16) for shape in shapes]
        with self.context():
            found = self.program(self.implementation)(*arrays, jnp.asarray([3000], jnp.int32))
        # 3,000 to the nearest bfloat16.
        assert np.all(np.asarray(found["d_weights"], np.float32) == 3008)

    def test_vmapped_with_traced_sizes(self):
        draw = Draw(Sizes("two", (30, 30)), *self.widths[0], self.dtypes[0])
        sizes = np.array([[30, 30], [60, 0], [1, 2]], np.int32)
        in_axes = (None, None, None, 0)
        with self.context(), jax.enable_x64(draw.dtype == "float64"):
            many = jax.jit(jax.vmap(both(self.implementation), in_axes))
            found = many(*draw.arrays()[:3], jnp.asarray(sizes))
        for i, s in enumerate(sizes):
            part = dataclasses.replace(
                draw, sizes=Sizes("part", tuple(s.tolist()), 60 - int(s.sum()))
            )
            part.rows, part.cotangent = draw.rows, draw.cotangent
            part.group_sizes = s
            held_to_oracle({n: x[i] for n, x in found.items()}, part)
