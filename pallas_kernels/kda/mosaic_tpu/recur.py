"""K2, inside a kernel: one chunk of all heads, given the state at its start.

    U = A beta (V - Kd S)      O = Qd S + P U      S <- diag(exp G_C) S + Kr^T U      KLR eq. 9-10

with A = (I + diag(beta) M)^-1. States are held as `[K, V]`, so that one load of pseudo-values, as
weights, serves the outputs and the state.

Where keys are nearly equal and little is forgotten, pseudo-values alternate in sign and 64 of them
cancel. So they, A, P and Kr, and the columns of M and P in an anchored block, are sums of two
bfloat16 numbers (`tiles.split`). A state, an error, or what multiplies one of them, is one.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from .activate import beta_rows
from .inverse import inverse, refined
from .plan import Plan
from .prepare import Prepared, narrow
from .tiles import (
    CHUNK,
    NN,
    PAIR,
    Parts,
    above,
    apart,
    beside,
    dot,
    folded,
    halves,
    heads,
    pairs,
    split,
)


class Operands(NamedTuple):
    """What the recurrence reads of n pairs of heads.

    k_in, q_in: keys and queries that see the state, `[n, C, 2K]` in the products' dtype.
    solve, read: A and P `[n, C, 128]`, in parts. kept: Kr, transposed, `[n, K, 128]`, in parts.
    strength: beta along rows, `[n, C, 2V]`; decay: of the chunk, `[2n, K, V]`; both in float32.
    """

    k_in: jax.Array
    q_in: jax.Array
    solve: Parts
    read: Parts
    kept: Parts
    strength: jax.Array
    decay: jax.Array


def operands(plan: Plan, p: Prepared, beta: jax.Array) -> Operands:
    """beta is `[chunks * C, heads]`."""
    L = p.delta * beta_rows(plan, beta, CHUNK)
    A = inverse(L, jnp.dtype(plan.operand))
    kept = jnp.swapaxes(above(*halves(p.k_out)), 1, 2)
    return Operands(
        k_in=narrow(plan, p.k_in),
        q_in=narrow(plan, p.q_in),
        solve=(A,) if plan.operand == "float32" else refined(L, A),
        read=split(p.read, plan.operand),
        kept=split(kept, plan.operand),
        strength=beta_rows(plan, beta, plan.value_width),
        decay=_columns(p.decay, plan.value_width),
    )


def of_chunk[Tree](plan: Plan, c: int, tree: Tree) -> Tree:
    """The pairs, or heads, of chunk c of a grid step."""

    def own(x: jax.Array) -> jax.Array:
        size = x.shape[0] // plan.chunks
        return x[size * c : size * (c + 1)]

    return jax.tree.map(own, tree)


def chunk_step(plan: Plan, x: Operands, v: jax.Array, S: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Outputs of one chunk, pairs `[heads / 2, C, 2V]`, and the next state, both in float32."""
    seen = dot(above(x.k_in, x.q_in), apart(narrow(plan, pairs(S))), NN)
    U = pseudo_values(plan, x, v - seen[:, :CHUNK])
    y = times(above(*x.read, *x.kept), U)
    rows = CHUNK * len(x.read)
    own, new = folded(y[:, :rows], CHUNK), folded(y[:, rows:], plan.key_width)
    return seen[:, CHUNK:] + own, x.decay * S + heads(new)


def pseudo_values(plan: Plan, x: Operands, errors: jax.Array) -> Parts:
    """U, pairs `[n, C, 2V]` in parts, from V - Kd S."""
    errors = apart(narrow(plan, x.strength * errors))
    return split(folded(dot(above(*x.solve), errors, NN), CHUNK), plan.operand)


def advance(plan: Plan, x: Operands, U: Parts, S: jax.Array) -> jax.Array:
    """The state `[heads, K, V]` after a chunk."""
    return x.decay * S + heads(folded(times(above(*x.kept), U), plan.key_width))


def times(rows: jax.Array, U: Parts) -> jax.Array:
    """Rows `[n, ., 128]` of pairs of tokens times the sum of the parts of U."""
    return dot(beside(*[rows] * len(U)), above(*(apart(u) for u in U)), NN)


def _columns(rows: jax.Array, width: int) -> jax.Array:
    """Pairs of rows of channels `[n, 1, 2K]` as columns of heads `[2n, K, width]`."""
    rows = heads(rows)[:, 0]
    n = rows.shape[0]
    square = jnp.pad(rows, ((0, -n % PAIR), (0, 0))).T
    columns = [
        jnp.take_along_axis(square, jnp.full(square.shape, h, jnp.int32), axis=1) for h in range(n)
    ]
    return jnp.stack([jnp.tile(y, (1, -(-width // PAIR)))[:, :width] for y in columns])
