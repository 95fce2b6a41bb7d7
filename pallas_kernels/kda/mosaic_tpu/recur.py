"""K2, inside a kernel: one chunk of all heads, given the state at its start.

    U = A beta (V - Kd S)      O = Qd S + P U      S <- diag(exp G_C) S + Kr^T U      KLR eq. 9-10

with A = (I + diag(beta) M)^-1. States are held transposed, `[V, K]`, so that the decay of a channel
is a row of lanes.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from .activate import beta_columns, beta_rows
from .inverse import inverse
from .plan import Plan
from .prepare import Prepared, narrow
from .tiles import CHUNK, NN, NT, TN, above, apart, dot, heads, pairs


class Operands(NamedTuple):
    """What the recurrence reads of n pairs of heads: keys and queries that see the state and keys
    that it holds, `[n, C, 2K]`, A diag(beta) and P, `[n, C, 128]`, in the products' dtype; decays
    `[n, 1, 2K]` in float32."""

    k_in: jax.Array
    q_in: jax.Array
    k_out: jax.Array
    write: jax.Array
    read: jax.Array
    decay: jax.Array


def solve(plan: Plan, p: Prepared, beta: jax.Array) -> jax.Array:
    """A `[n, C, 128]` in float32; beta is `[chunks * C, heads]`."""
    return inverse(p.delta * beta_rows(plan, beta, CHUNK), jnp.dtype(plan.operand))


def operands(plan: Plan, p: Prepared, A: jax.Array, beta: jax.Array) -> Operands:
    return Operands(
        k_in=narrow(plan, p.k * p.enter),
        q_in=narrow(plan, p.q * p.enter),
        k_out=narrow(plan, p.k * p.leave),
        write=narrow(plan, A * beta_columns(plan, beta)),
        read=narrow(plan, p.read),
        decay=p.decay,
    )


def of_chunk[Tree](plan: Plan, c: int, tree: Tree) -> Tree:
    """The pairs of chunk c of a grid step."""
    size = plan.heads // 2
    return jax.tree.map(lambda x: x[size * c : size * (c + 1)], tree)


def pseudo_values(plan: Plan, x: Operands, errors: jax.Array) -> jax.Array:
    """U, pairs `[n, C, 2V]` in the products' dtype, from V - Kd S."""
    return narrow(plan, dot(x.write, apart(narrow(plan, errors)), NN))


def advance(plan: Plan, x: Operands, U: jax.Array, S: jax.Array) -> jax.Array:
    """The state `[heads, V, K]` after a chunk."""
    return heads(x.decay) * S + dot(heads(U), heads(x.k_out), TN)


def chunk_step(plan: Plan, x: Operands, v: jax.Array, S: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Outputs of one chunk, pairs `[heads / 2, C, 2V]`, and the next state, both in float32."""
    into = above(heads(x.k_in), heads(x.q_in))
    seen = pairs(dot(into, narrow(plan, S), NT))
    U = pseudo_values(plan, x, v - seen[:, :CHUNK])
    return seen[:, CHUNK:] + dot(x.read, apart(U), NN), advance(plan, x, U, S)
