"""The recurrence token by token: the oracle that every implementation is held to.

    S <- diag(exp g) S ;  u = beta (v - S^T k) ;  S <- S + k u^T ;  o = S^T q          KLR eq. 1-2

The decay comes first, the delta rule sees the decayed state, and the output reads the state after
the token's own write. Plain `lax.scan`; gradients are autodiff's. Time is linear in T, and memory
of a gradient too, but with a whole state per token: for tests and for short calls.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from . import documents, gates
from .spec import Inputs, Spec


def refuses(spec: Spec, platform: str) -> str | None:
    return None


def delta_step(
    S: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array, g: jax.Array, beta: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """One token of every head: state `[B, HV, K, V]`, q, k, g `[B, HV, K]`, v `[B, HV, V]`,
    beta `[B, HV]`. Returns the new state and o `[B, HV, V]`."""
    precision = jax.lax.Precision.HIGHEST
    S = jnp.exp(g)[..., None] * S
    seen = jnp.einsum("bhkv,bhk->bhv", S, k, precision=precision)
    u = beta[..., None] * (v - seen)
    S = S + k[..., None] * u[..., None, :]
    return S, jnp.einsum("bhkv,bhk->bhv", S, q, precision=precision)


def to_value_heads(spec: Spec, x: jax.Array) -> jax.Array:
    """`[..., H, K]` to `[..., HV, K]`: value head h reads query and key head h // (HV / H)."""
    return jnp.repeat(x, spec.value_heads // spec.heads, axis=-2)


def to_key_heads(grad: jax.Array, like: jax.Array) -> jax.Array:
    """A gradient `[B, T, HV, K]` summed over the value heads that read one query or key head, in
    float32 at least: of the shape `[B, T, H, K]` and dtype of `like`."""
    if grad.shape != like.shape:
        grad = grad.astype(jnp.promote_types(grad.dtype, jnp.float32))
        grad = grad.reshape(*like.shape[:3], -1, like.shape[3]).sum(axis=3)
    return grad.astype(like.dtype)


def run(spec: Spec, x: Inputs) -> tuple[jax.Array, jax.Array | None]:
    """`kda` of a checked call: o `[B, T, HV, V]` and the final states or None."""
    return scan_tokens(spec, x, delta_step)


def scan_tokens(
    spec: Spec, x: Inputs, token_step: Callable[..., tuple[jax.Array, jax.Array]]
) -> tuple[jax.Array, jax.Array | None]:
    """A row of documents, one token at a time: `token_step` says what a token does to a state."""
    ids = x.segment_ids
    if ids is None:
        ids = jnp.ones((spec.batch, spec.tokens), jnp.int32)
    docs = documents.read(ids)
    tokens = jax.tree.map(lambda y: documents.mask(docs.real, y), x.tokens)
    q, k, v, g, beta = gates.activate(spec, tokens, x.parameters)
    q, k = to_value_heads(spec, q), to_value_heads(spec, k)

    states = x.initial_state
    if states is None:
        states = jnp.zeros(spec.state_shape, spec.dtype)
    # One more slot, which no caller sees: documents that own none, and leading padding.
    slots = jnp.pad(states, ((0, 0), (0, 1)) + ((0, 0),) * 3)
    spare = spec.max_documents
    owned = (docs.live >= 1) & (docs.live <= spec.max_documents)
    slot = jnp.where(owned, docs.live - 1, spare)
    restart = docs.first & ~owned
    rows = jnp.arange(spec.batch)

    def step(states, token):
        q, k, v, g, beta, real, slot, restart = token
        old = states[rows, slot]
        S = jnp.where(restart[:, None, None, None], 0, old)
        S, o = token_step(S, q, k, v, g, beta)
        S = jnp.where(real[:, None, None, None], S, old)
        return states.at[rows, slot].set(S), documents.mask(real, o)

    xs = (q, k, v, g, beta, docs.real, slot, restart)
    slots, o = jax.lax.scan(step, slots, jax.tree.map(lambda y: jnp.moveaxis(y, 1, 0), xs))
    o = jnp.moveaxis(o, 0, 1).astype(spec.v_dtype)
    return o, slots[:, :spare] if spec.return_final_state else None
