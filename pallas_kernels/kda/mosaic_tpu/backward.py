"""The backward kernel: every visit is prepared again from its tokens and from the state that it
started from, and the gradient of the state runs from the last visit to the first.

    dU = P^T dO + Kr dS      y = A^T dU      dE = beta y        (E = V - Kd S, U = A beta E)
    dM = -dE U^T    dP = dO U^T    dKd = -dE S^T    dQd = dO S^T    dKr = U dS^T    dV = dE
    dS <- diag(exp G_C) dS + Qd^T dO - Kd^T dE
"""

import functools
from types import SimpleNamespace
from typing import NamedTuple

import jax
import jax.numpy as jnp

from .. import cost
from ..spec import Spec
from . import gradients, recur, tokens
from .activate import beta_slope, write_strength
from .forward import load_state, store_state
from .launch import (
    Arrays,
    Now,
    launch,
    saved_block,
    slot_block,
    sums_block,
    token_blocks,
    when,
)
from .plan import Plan
from .prepare import Prepared, narrow, prepare, times_columns
from .tiles import (
    CHUNK,
    NN,
    NT,
    PAIR,
    TN,
    Parts,
    above,
    apart,
    beside,
    dot,
    heads,
    iota,
    pairs,
    split,
)
from .visits import Visits

PARAMETERS = ("a", "dt_bias")


def backward(
    spec: Spec,
    plan: Plan,
    arrays: Arrays,
    visits: Visits | None,
    saved: jax.Array,
    do: jax.Array,
    dfinal: jax.Array | None,
    has_initial: bool,
) -> dict[str, jax.Array]:
    """Gradients by name: those of `Arrays`, of which `a` and `dt_bias` per row as `[B, 1, HV * K]`,
    and that of the initial states, `initial`, if there are any."""
    blocks = token_blocks(plan)
    inputs = {n: (x, blocks[n]) for n, x in arrays._asdict().items()}
    outputs = {
        "d" + n: (jax.ShapeDtypeStruct(x.shape, x.dtype), blocks[n])
        for n, x in arrays._asdict().items()
        if x is not None and n not in PARAMETERS
    }
    sums = jax.ShapeDtypeStruct((plan.rows, 1, plan.value_heads * plan.key_width), jnp.float32)
    for name in PARAMETERS:
        if inputs[name][0] is not None:
            outputs["d" + name] = (sums, sums_block(plan))
    inputs["do"] = (do, blocks["v"])
    inputs["saved"] = (saved, saved_block(plan))
    inputs["dfinal"] = (dfinal, slot_block(plan))
    if has_initial:
        outputs["dinitial"] = (plan.slot_states(), slot_block(plan))

    def body(now: Now, refs: SimpleNamespace) -> None:
        load_state(plan, refs, "dfinal", now.opens, now.ends)
        when(now.opens, functools.partial(_clear_sums, refs))
        when(now.active, functools.partial(_visit, plan, now, refs))
        if has_initial:
            store_state(refs, "dinitial", now.begins)

    cotangents = launch(
        plan, "kda_backward", body, visits, inputs, outputs, cost.backward(spec), backwards=True
    )
    return {name[1:]: x for name, x in cotangents.items()}


def _clear_sums(refs: SimpleNamespace) -> None:
    for name in PARAMETERS:
        if hasattr(refs, name):
            ref = getattr(refs, "d" + name)
            ref[...] = jnp.zeros_like(ref)


class Chain(NamedTuple):
    """What the chain of states leaves of the heads of a chunk, in float32 if not said otherwise.

    both: -dE above dO, `[heads, 2C, V]` in the products' dtype. errors, y: gradients of E and, per
    beta, of it, `[heads, C, V]`. into: of Kd above Qd, `[heads, 2C, K]`; k_out: of Kr,
    `[heads, C, K]`; decay: of the chunk's, `[heads, K, 1]`.
    """

    both: jax.Array
    errors: jax.Array
    y: jax.Array
    into: jax.Array
    k_out: jax.Array
    decay: jax.Array


def _visit(plan: Plan, now: Now, refs: SimpleNamespace) -> None:
    marks, raw = tokens.read_marks(plan, refs), tokens.read_raw(refs)
    beta = write_strength(plan, raw.beta, marks)
    p = prepare(plan, raw, marks)
    x = recur.operands(plan, p, beta)
    v = tokens.read_values(plan, refs.v[...], marks)
    do = heads(narrow(plan, plan.scale * tokens.read_values(plan, refs.do[...], marks)))
    strength = heads(x.strength)
    k_in, q_in, kept = heads(x.k_in), heads(x.q_in), split(p.k_out, plan.operand)
    k_out = beside(*(heads(y) for y in kept))

    starts, errors, U = _again(plan, x, v, refs.saved[...])
    solve = _transposed(x.solve)
    from_outputs = dot(_transposed(x.read), above(*[do] * len(x.read)), NN)
    dS, chain = refs.S[...], []
    for c in reversed(range(plan.chunks)):
        own = slice(plan.heads * c, plan.heads * (c + 1))
        after = narrow(plan, dS)
        dU = from_outputs[own] + dot(k_out[own], above(*[after] * len(kept)), NN)
        parts = split(dU, plan.operand)
        # Each part of A^T against each of dU.
        columns = above(*(above(*[y] * len(parts)) for y in parts))
        y = dot(beside(*[solve[own]] * len(parts)), columns, NN)
        dE = strength[own] * y
        down = split(-dE, plan.operand)
        both = above(down[0], do[own])
        ddecay = jnp.sum(starts[c].astype(jnp.float32) * dS, axis=2, keepdims=True)
        into = dot(both, starts[c], NT)
        pseudo = beside(*(heads(u) for u in U[c]))
        dk_out = dot(pseudo, beside(*[after] * len(U[c])), NT)
        chain.append(Chain(both, dE, y, into, dk_out, ddecay))
        rows = above(*[k_in[own]] * len(down), q_in[own])
        dS = x.decay[own] * dS + dot(rows, above(*down, do[own]), TN)
    refs.S[...] = dS

    d = Chain(*(jnp.concatenate(parts[::-1]) for parts in zip(*chain, strict=True)))
    values = tuple(jnp.concatenate(part) for part in zip(*U, strict=True))
    dbeta = _dbeta(plan, p, d.y, values, jnp.concatenate(errors))
    cotangents = gradients.Cotangents(
        products=times_columns(pairs(d.both), values),
        k_in=pairs(d.into[:, :CHUNK]),
        q_in=pairs(d.into[:, CHUNK:]),
        k_out=pairs(d.k_out),
        decay=_rows(d.decay),
    )
    g = gradients.pull(plan, raw, marks, p, x, cotangents)
    tokens.put_keys(plan, refs.dq, g.q, now)
    tokens.put_keys(plan, refs.dk, g.k, now)
    tokens.put(plan, refs.dv, pairs(d.errors), now)
    tokens.put(plan, refs.dgate, g.gate, now)
    tokens.put_beta(plan, refs.dbeta, dbeta, beta_slope(plan, raw.beta, marks), now)
    if g.a is not None:
        tokens.add_rows(plan, refs.da, g.a)
    if g.dt_bias is not None:
        tokens.add_rows(plan, refs.ddt_bias, g.dt_bias)


def _again(
    plan: Plan, x: recur.Operands, v: jax.Array, saved: jax.Array
) -> tuple[list[jax.Array], list[jax.Array], list[Parts]]:
    """Per chunk: the state it starts from, in the products' dtype, the errors V - Kd S and the
    pseudo-values."""
    starts, errors, values = [saved], [], []
    S = saved.astype(jnp.float32)
    for c in range(plan.chunks):
        xc, vc = recur.of_chunk(plan, c, (x, v))
        errors.append(vc - dot(xc.k_in, apart(pairs(starts[-1])), NN))
        values.append(recur.pseudo_values(plan, xc, errors[-1]))
        if c + 1 < plan.chunks:
            S = recur.advance(plan, xc, values[-1], S)
            starts.append(narrow(plan, S))
    return starts, errors, values


def _transposed(parts: Parts) -> jax.Array:
    """Parts of pairs `[n, C, 128]` as the transposes of their heads' matrices, beside each other:
    `[2n, C, parts * C]`."""
    x = jnp.swapaxes(above(*parts), 1, 2)
    return x.reshape(2 * x.shape[0], CHUNK, -1)


def _rows(columns: jax.Array) -> jax.Array:
    """Columns of heads `[2n, K, 1]` as pairs of rows `[n, 1, 2K]`."""
    n, K, _ = columns.shape
    lane = iota((K, -(-n // PAIR) * PAIR), 1)
    square = functools.reduce(
        lambda x, h: jnp.where(lane == h, columns[h], x), range(n), jnp.zeros(lane.shape)
    )
    return pairs(square.T[:n, None])


def _dbeta(plan: Plan, p: Prepared, y: jax.Array, U: Parts, errors: jax.Array) -> jax.Array:
    """Gradient of beta, `[2n, C, 1]`, times beta in the logit form, where U = beta (E - M U) saves
    the product."""
    if plan.beta_form == "logit":
        per_beta = functools.reduce(jnp.add, (u.astype(jnp.float32) for u in U))
    else:
        per_beta = errors - recur.times(narrow(plan, p.delta), U)
    return jnp.sum(y * heads(per_beta), axis=-1, keepdims=True)
