"""The chunkwise form in plain JAX, with its own VJP: the reference that kernels are compared with.

Per chunk of C tokens, with G the cumulative log decay inside it (KLR §3.1, K3R eq. 3-4):

    prepare   Kd = exp(G) K            Qd = exp(G) Q            Kr = exp(G_C - G) K
              L = stril(beta Kd Kd'^T)     P = tril(Qd Kd'^T)     A = (I + L)^-1
    scan      U = A beta (V - Kd S)    O = Qd S + P U           S <- diag(exp G_C) S + Kr^T U
    reverse   dU = P^T dO + Kr dS      dR = A^T dU              dL = -dR U^T   ...

where Kd' stands for the keys decayed by the inverse, which `pairs.halving` never forms. Tokens are
taken in spans of a few chunks: a span is prepared side by side and scanned chunk by chunk. Saved
for the gradient are the inputs and one state per span; `_backward` prepares and scans again.
The gradient of everything before the state (activations, decays, pairs) is that of `prepare`
itself, which has no state in it; the gradient of the scan is written out.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from . import documents, gates, layout
from .layout import CHUNK, Layout
from .pairs import RESET, einsum, halving
from .recurrent import to_value_heads
from .spec import Inputs, Parameters, Spec, Tokens, initial_states, without_tokens


def refuses(spec: Spec, platform: str) -> str | None:
    return None


class Chunk(NamedTuple):
    """A prepared chunk, leading axes `[B, HV]` (`[n, B, HV]` for a span of n).

    `k_in`, `q_in`: keys and queries as they see the state at the chunk's start, `[C, K]`.
    `k_out`: keys as the state at the chunk's end holds them, `[C, K]`; `decay`: the chunk's, `[K]`.
    `delta` (L, with beta in it) and `read` (P): products of pairs `[C, C]`.
    `v [C, V]` and `beta [C]` as activated.
    """

    k_in: jax.Array
    q_in: jax.Array
    k_out: jax.Array
    decay: jax.Array
    delta: jax.Array
    read: jax.Array
    v: jax.Array
    beta: jax.Array


class Edges(NamedTuple):
    """Per chunk and row: its state slot, and whether it begins or ends with that slot's state."""

    slot: jax.Array
    begins: jax.Array
    ends: jax.Array


def run(spec: Spec, x: Inputs) -> tuple[jax.Array, jax.Array | None]:
    """`kda` of a checked call: o `[B, T, HV, V]` and the final states or None."""
    return by_chunks(spec, x, _kda)


def by_chunks(
    spec: Spec, x: Inputs, scan: Callable[..., tuple[jax.Array, jax.Array]]
) -> tuple[jax.Array, jax.Array | None]:
    """Lays a row of documents out in chunks for `scan`, which has the signature of `_kda`."""
    if spec.batch * spec.tokens == 0:
        return without_tokens(spec, x)
    states = initial_states(spec, x)
    plan = layout.plan(
        spec.batch, spec.tokens, x.segment_ids, spec.max_documents, spec.states_asked
    )
    tokens = jax.tree.map(functools.partial(layout.gather, plan), x.tokens)
    # Gradients of the gate's parameters are summed in the recurrence's dtype, over all tokens.
    parameters = jax.tree.map(lambda p: p.astype(spec.dtype), x.parameters)
    spare = ((0, 0), (0, 1), (0, 0), (0, 0), (0, 0))
    o, states = scan(spec, tokens, parameters, jnp.pad(states, spare), plan)
    o = layout.scatter(plan, o, spec.tokens)
    return o, states[:, :-1] if spec.return_final_state else None


def prepare(
    spec: Spec, tokens: Tokens, parameters: Parameters, real: jax.Array, reset: jax.Array
) -> Chunk:
    """Activations, decays and pairs of a span `[B, n C, ...]`: everything that needs no state.

    real, reset: `[B, n C]`, no padding, and where everything before is forgotten.
    """
    tokens = jax.tree.map(functools.partial(documents.mask, real), tokens)
    # The barrier: fused with what follows, these products may or may not be contracted into its
    # additions, and the bits of a token would depend on how many spans the row has.
    q, k, v, g, beta = jax.lax.optimization_barrier(gates.activate(spec, tokens, parameters))
    # At padding the keys are zero already; no decay and no write, and the state passes through.
    g, beta = documents.mask(real, g), documents.mask(real, beta)
    g = jnp.where(reset[..., None, None], RESET, g)
    q, k, v, g, beta = (
        to_chunks(y) for y in (to_value_heads(spec, q), to_value_heads(spec, k), v, g, beta)
    )
    pairs, prefix, suffix, total = halving(jnp.stack([k, q], axis=-2), k, g)
    own = jnp.sum(q * k, axis=-1)
    seen = jnp.exp(prefix)
    return Chunk(
        k_in=k * seen,
        q_in=q * seen,
        k_out=k * jnp.exp(suffix),
        decay=jnp.exp(total),
        delta=beta[..., None] * pairs[..., 0, :],
        read=pairs[..., 1, :] + own[..., None] * jnp.eye(CHUNK, dtype=own.dtype),
        v=v,
        beta=beta,
    )


def inverse(delta: jax.Array) -> jax.Array:
    """A = (I + L)^-1 by forward substitution, exact for collinear keys without decay, where a
    Neumann product loses every digit."""
    eye = jnp.zeros_like(delta) + jnp.eye(CHUNK, dtype=delta.dtype)  # laid out as delta is

    def by_rows(delta: jax.Array, eye: jax.Array) -> jax.Array:
        def row(i: jax.Array, A: jax.Array) -> jax.Array:
            return A.at[..., i, :].add(-einsum("...j,...jk->...k", delta[..., i, :], A))

        return jax.lax.fori_loop(1, CHUNK, row, eye)

    solve = functools.partial(
        jax.lax.linalg.triangular_solve, left_side=True, lower=True, unit_diagonal=True
    )
    # On CPUs that is a BLAS whose threads wait for one another in every matrix of this size.
    return jax.lax.platform_dependent(delta, eye, cpu=by_rows, default=solve)


def write(c: Chunk, A: jax.Array, S: jax.Array) -> tuple[jax.Array, jax.Array]:
    """One chunk of the scan: pseudo-values U `[B, HV, C, V]` and the next state."""
    U = einsum("bhij,bhjv->bhiv", A, c.beta[..., None] * error(c, S))
    return U, c.decay[..., None] * S + einsum("bhck,bhcv->bhkv", c.k_out, U)


def error(c: Chunk, S: jax.Array) -> jax.Array:
    """V - Kd S: what the values are beyond what the decayed state answers to their keys."""
    return c.v - einsum("bhck,bhkv->bhcv", c.k_in, S)


def reverse(
    c: Chunk, A: jax.Array, S: jax.Array, U: jax.Array, do: jax.Array, dS: jax.Array
) -> tuple[jax.Array, Chunk]:
    """The gradient of `write` and of O = Qd S + P U, given those of O and of the next state.

    Returns: the gradient of the state at the chunk's start, and that of the prepared chunk.
    """
    dU = einsum("bhij,bhiv->bhjv", c.read, do) + einsum("bhck,bhkv->bhcv", c.k_out, dS)
    dR = einsum("bhij,bhiv->bhjv", A, dU)
    dv = c.beta[..., None] * dR
    dchunk = Chunk(
        k_in=-einsum("bhcv,bhkv->bhck", dv, S),
        q_in=einsum("bhcv,bhkv->bhck", do, S),
        k_out=einsum("bhcv,bhkv->bhck", U, dS),
        decay=jnp.sum(S * dS, axis=-1),
        delta=-einsum("bhiv,bhjv->bhij", dR, U),
        read=einsum("bhiv,bhjv->bhij", do, U),
        v=dv,
        beta=jnp.sum(dR * error(c, S), axis=-1),
    )
    dS = (
        c.decay[..., None] * dS
        + einsum("bhck,bhcv->bhkv", c.q_in, do)
        - einsum("bhck,bhcv->bhkv", c.k_in, dv)
    )
    return dS, dchunk


def take(edges: Edges, states: jax.Array, S: jax.Array) -> jax.Array:
    """The state that a chunk starts from: its slot's where it begins one, else the carried one."""
    rows = jnp.arange(S.shape[0])
    return jnp.where(_rows(edges.begins), states[rows, edges.slot], S)


def put(edges: Edges, finals: jax.Array, S: jax.Array) -> jax.Array:
    """`finals` with the state that a chunk leaves, where the chunk ends its slot."""
    rows = jnp.arange(S.shape[0])
    kept = finals[rows, edges.slot]
    return finals.at[rows, edges.slot].set(jnp.where(_rows(edges.ends), S, kept))


def scan_spans(
    write: Callable[..., tuple[jax.Array, jax.Array]],
    spec: Spec,
    tokens: Tokens,
    parameters: Parameters,
    states: jax.Array,
    plan: Layout,
) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
    """Rows of tokens, span by span; `write` is what a chunk does to the state.

    Returns: o `[B, L, HV, V]`, the final states `[B, N + 1, HV, K, V]`, and the state carried into
    every span `[spans, B, HV, K, V]`.
    """

    @jax.checkpoint
    def span_step(carry, xs):
        span, real, reset, edges = xs
        chunk = prepare(spec, span, parameters, real, reset)

        def chunk_step(carry, xs):
            S, finals = carry
            c, A, e = xs
            S = take(e, states, S)
            U, S_next = write(c, A, S)
            o = einsum("bhck,bhkv->bhcv", c.q_in, S) + einsum("bhij,bhjv->bhiv", c.read, U)
            return (S_next, put(e, finals, S_next)), o

        S = carry[0]
        carry, o = jax.lax.scan(chunk_step, carry, (chunk, inverse(chunk.delta), edges))
        return carry, (from_chunks(o).astype(spec.v_dtype), S)

    carry = (states[:, 0], states)
    (_, finals), (o, carried) = jax.lax.scan(span_step, carry, _by_span(tokens, plan))
    return (layout.from_spans(o), finals), carried


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _kda(spec, tokens, parameters, states, plan):
    return scan_spans(write, spec, tokens, parameters, states, plan)[0]


def _forward(spec, tokens, parameters, states, plan):
    """Saves the inputs and one state per span."""
    out, carried = scan_spans(write, spec, tokens, parameters, states, plan)
    return out, (tokens, parameters, states, plan, carried)


def _backward(spec, saved, cotangents):
    tokens, parameters, states, plan, carried = saved
    do, dfinals = cotangents
    do = documents.mask(plan.real, do.astype(spec.dtype))
    rows = jnp.arange(spec.batch)

    def span_step(carry, xs):
        dS, dstates, dparameters = carry
        (span, real, reset, edges), do, S = xs
        chunk, pull = jax.vjp(
            lambda span, parameters: prepare(spec, span, parameters, real, reset), span, parameters
        )
        A = inverse(chunk.delta)

        def again(S, xs):
            c, A, e = xs
            S = take(e, states, S)
            U, S_next = write(c, A, S)
            return S_next, (S, U)

        def chunk_step(carry, xs):
            dS, dstates = carry
            c, A, e, S, U, do = xs
            dS = dS + jnp.where(_rows(e.ends), dfinals[rows, e.slot], 0)
            dS, dchunk = reverse(c, A, S, U, do, dS)
            begins = _rows(e.begins)
            dstates = dstates.at[rows, e.slot].add(jnp.where(begins, dS, 0))
            return (jnp.where(begins, 0, dS), dstates), dchunk

        _, (S, U) = jax.lax.scan(again, S, (chunk, A, edges))
        xs = (chunk, A, edges, S, U, to_chunks(do))
        (dS, dstates), dchunk = jax.lax.scan(chunk_step, (dS, dstates), xs, reverse=True)
        dspan, dp = pull(dchunk)
        return (dS, dstates, jax.tree.map(jnp.add, dparameters, dp)), dspan

    # A slot that no chunk begins from passes through.
    used = jnp.zeros(states.shape[:2], bool).at[rows[:, None], plan.slot].max(plan.begins)
    dstates = jnp.where(used[:, :, None, None, None], 0, dfinals)
    carry = (jnp.zeros_like(states[:, 0]), dstates, jax.tree.map(jnp.zeros_like, parameters))
    xs = (_by_span(tokens, plan), layout.to_spans(do), carried)
    (_, dstates, dparameters), dtokens = jax.lax.scan(span_step, carry, xs, reverse=True)
    return jax.tree.map(layout.from_spans, dtokens), dparameters, dstates, None


_kda.defvjp(_forward, _backward)


def to_chunks(x: jax.Array) -> jax.Array:
    """`[B, n C, HV, ...]` to `[n, B, HV, C, ...]`."""
    x = x.reshape(x.shape[0], -1, CHUNK, *x.shape[2:])
    return jnp.moveaxis(jnp.moveaxis(x, 1, 0), 3, 2)


def from_chunks(x: jax.Array) -> jax.Array:
    """Back from `to_chunks`."""
    x = jnp.moveaxis(jnp.moveaxis(x, 2, 3), 0, 1)
    return x.reshape(x.shape[0], -1, *x.shape[3:])


def _by_span(tokens: Tokens, plan: Layout) -> tuple[Tokens, jax.Array, jax.Array, Edges]:
    """Tokens and their marks as `[spans, B, n C, ...]`, edges as `[spans, n, B]`."""
    tokens, real, reset = jax.tree.map(layout.to_spans, (tokens, plan.real, plan.reset))
    edges = Edges(plan.slot, plan.begins, plan.ends)
    edges = jax.tree.map(lambda x: x.T.reshape(-1, layout.SPAN, x.shape[0]), edges)
    return tokens, real, reset, edges


def _rows(x: jax.Array) -> jax.Array:
    """A flag per row, shaped to select among states `[B, HV, K, V]`."""
    return x[:, None, None, None]
