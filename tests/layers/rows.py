"""What tests of attention layers share: dense attention, and what every such layer is held to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from k3jax.layers.documents import documents_of
from k3jax.params import partition_specs
from k3jax.sharding import activation_spec, make_mesh

# Padding inside, before and after documents; documents of one token; a row of padding.
RAGGED = np.array(
    [
        [0, 1, 1, 1, 0, 0, 2, 3, 3, 3, 3, 3, 0],
        [1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 4, 4, 4],
        [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
    ],
    np.int32,
)

# Nine tokens in each of two rows: prefills padded on all sides, then steps that a row may skip.
PIECES = [
    np.array([[1, 0, 1, 1, 0], [0, 0, 1, 1, 1]], np.int32),
    np.array([[1, 1, 0, 1, 0], [1, 1, 1, 1, 1]], np.int32),
    np.array([[1], [0]], np.int32),
    np.array([[1], [1]], np.int32),
    np.array([[1], [0]], np.int32),
]


def relative_rms(got: jax.Array, want: jax.Array) -> float:
    """Root mean square of `got - want`, in units of that of `want`."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape
    scale = np.sqrt(np.mean(want**2))
    return float(np.sqrt(np.mean((got - want) ** 2)) / (scale if scale else 1.0))


def dense_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, visible: jax.Array, scale: float
) -> tuple[jax.Array, jax.Array]:
    """Softmax attention with a whole score matrix: `(o [B, Tq, H, V], max_logit [B, H])`.

    `visible [B, Tq, Tk]`; heads of k and v are repeated to those of q.
    """
    k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    logits = scale * jnp.einsum("bqhd,bkhd->bhqk", q, k, precision="highest")
    visible = visible[:, None]
    weights = jnp.where(visible, jnp.exp(logits - jax.lax.stop_gradient(logits).max()), 0)
    total = weights.sum(-1, keepdims=True)
    p = weights / jnp.where(total > 0, total, 1)
    o = jnp.einsum("bhqk,bkhv->bqhv", p, v, precision="highest")
    return o, jnp.where(visible, logits, -jnp.inf).max((2, 3))


def by_document(
    fn: Callable[[jax.Array], jax.Array], x: jax.Array, segment_ids: np.ndarray
) -> jax.Array:
    """`fn [t, d] -> [t, d]`, causal, on each document of `x [B, T, d]` by itself; zero at padding.

    Documents are filled up with zeros behind, which a causal function does not see.
    """
    rows, columns, inside = [], [], []
    for row, ids in enumerate(segment_ids):
        for document in np.unique(ids[ids > 0]):
            at = np.flatnonzero(ids == document)
            spare = ids.size - at.size
            rows.append(np.full(ids.size, row))
            columns.append(np.pad(at, (0, spare), constant_values=ids.size))
            inside.append(np.arange(ids.size) < at.size)
    rows, columns, inside = np.stack(rows), np.stack(columns), np.stack(inside)
    documents = jnp.where(inside[..., None], x[rows, columns % x.shape[1]], 0)
    return jnp.zeros_like(x).at[rows, columns].set(jax.vmap(fn)(documents), mode="drop")


def randomised(layer: nnx.Module, dtype: jnp.dtype) -> tuple[nnx.GraphDef, nnx.State]:
    """An abstract `layer`, split, with every parameter drawn (gains too) in `dtype`."""
    graphdef, state = nnx.split(layer)
    rng = np.random.default_rng(0)

    def draw(value: jax.ShapeDtypeStruct) -> jax.Array:
        centre, std = (1.0, 0.3) if len(value.shape) == 1 else (0.0, 2 * value.shape[0] ** -0.5)
        return jnp.asarray(rng.normal(centre, std, value.shape), dtype)

    return graphdef, jax.tree.map(draw, state)


@partial(jax.jit, static_argnums=0)
def run(
    graphdef: nnx.GraphDef, state: nnx.State, x: jax.Array, dy: jax.Array, segment_ids: jax.Array
) -> tuple[jax.Array, jax.Array, nnx.State, jax.Array]:
    """`(y, max_logit, gradients by the state, dx)` of a layer without cache, for `sum(y * dy)`."""

    def loss(state: nnx.State, x: jax.Array):
        y, _, stats = nnx.merge(graphdef, state)(x, documents=documents_of(segment_ids))
        return (y * dy).sum(), (y, stats["max_logit"].value)

    (_, (y, max_logit)), (grads, dx) = jax.value_and_grad(loss, (0, 1), has_aux=True)(state, x)
    return y, max_logit, grads, dx


@partial(jax.jit, static_argnums=0)
def run_naive(
    fn: Callable[[dict, jax.Array], jax.Array], p: dict, x: jax.Array, dy: jax.Array
) -> tuple[jax.Array, dict, jax.Array]:
    """`(y, gradients by p, dx)` of `fn(p, u)` on each document of `RAGGED` rows by itself."""

    def loss(p: dict, x: jax.Array):
        y = by_document(partial(fn, p), x, RAGGED)
        return (y * dy).sum(), y

    (_, y), (grads, dx) = jax.value_and_grad(loss, (0, 1), has_aux=True)(p, x)
    return y, grads, dx


def check_against_naive(
    graphdef: nnx.GraphDef, state: nnx.State, width: int, fn: Callable[[dict, jax.Array], jax.Array]
) -> None:
    """Packed, padded rows in float64: output, gradient of every parameter and of the input."""
    x, dy = np.random.default_rng(1).normal(0, 1, (2, *RAGGED.shape, width))
    y, max_logit, grads, dx = run(graphdef, state, x, dy, RAGGED)
    want_y, want_grads, want_dx = run_naive(fn, nnx.to_pure_dict(state), x, dy)
    assert relative_rms(y, want_y) <= 1e-13
    assert relative_rms(dx, want_dx) <= 1e-13
    assert not np.any(np.asarray(y)[RAGGED == 0]) and not np.any(np.asarray(dx)[RAGGED == 0])
    grads = nnx.to_pure_dict(grads)
    assert grads.keys() == want_grads.keys()
    for name, grad in grads.items():
        assert np.any(grad), name
        assert relative_rms(grad, want_grads[name]) <= 1e-12, name
    assert np.all(np.isfinite(max_logit))


def check_cache(graphdef: nnx.GraphDef, state: nnx.State, width: int, capacity: int) -> None:
    """In float64, `PIECES` through a cache equal one pass over the rows."""
    x = np.zeros((*RAGGED.shape, width))
    x[:2, :9] = np.random.default_rng(2).normal(0, 1, (2, 9, width))
    ids = np.zeros_like(RAGGED)
    ids[:2, :9] = 1
    want, max_logit, *_ = run(graphdef, state, x, x, ids)
    y, stats = feed(graphdef, state, x[:2, :9], PIECES, capacity)
    assert relative_rms(y, want[:2, :9]) <= 1e-13
    largest = np.max([stat["max_logit"].value for stat in stats], axis=0)
    assert relative_rms(largest, max_logit) <= 1e-13


def check_mesh(graphdef: nnx.GraphDef, state: nnx.State, width: int) -> None:
    """Under Explicit axes nothing changes, to the bit: output, largest logits, gradients."""
    x, dy = np.random.default_rng(3).normal(0, 1, (2, *RAGGED.shape, width))
    off = run(graphdef, state, x, dy, RAGGED)
    with jax.set_mesh(make_mesh()):
        laid_out = jax.tree.map(jax.sharding.reshard, state, partition_specs(state))
        args = [jax.sharding.reshard(a, activation_spec(3)) for a in (x, dy)]
        on = run(graphdef, laid_out, *args, jax.sharding.reshard(RAGGED, activation_spec(2)))
    for got, want in zip(jax.tree.leaves(on), jax.tree.leaves(off), strict=True):
        assert np.array_equal(got, want)


def feed(
    graphdef: nnx.GraphDef,
    state: nnx.State,
    rows: jax.Array,
    pieces: Sequence[np.ndarray],
    capacity: int,
) -> tuple[np.ndarray, list[dict]]:
    """`rows [B, S, d]` fed to a cache piece by piece; outputs `[B, S, d]` and the stats of pieces.

    A piece `[B, T]` is 1 where a row's next token stands and 0 where padding does. Padding holds
    numbers that must not matter.
    """

    @jax.jit
    def call(state, x, ids, cache):
        return nnx.merge(graphdef, state)(x, documents=documents_of(ids), cache=cache)

    rng = np.random.default_rng(99)
    rows = np.asarray(rows)
    y, stats, fed = np.full(rows.shape, np.nan), [], np.zeros(len(rows), int)
    cache = nnx.merge(graphdef, state).empty_cache(len(rows), capacity, rows.dtype)
    for piece in pieces:
        x = rng.normal(0, 10, (*piece.shape, rows.shape[-1])).astype(rows.dtype)
        for row, real in enumerate(piece == 1):
            x[row, real] = rows[row, fed[row] : fed[row] + real.sum()]
        out, cache, stat = call(state, jnp.asarray(x), jnp.asarray(piece), cache)
        stats.append(stat)
        assert not np.any(np.asarray(out)[piece == 0])
        for row, real in enumerate(piece == 1):
            y[row, fed[row] : fed[row] + real.sum()] = np.asarray(out)[row, real]
        fed += piece.sum(1)
        assert np.array_equal(cache.length, fed)
    return y, stats
