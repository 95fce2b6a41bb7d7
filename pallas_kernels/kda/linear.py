"""Gated linear attention, the recurrence of KDA without its delta rule:

    S <- diag(exp g) S + k v^T ;  o = scale S^T q

The same documents, states and chunks as `kda`. Its chunkwise form solves nothing, so autodiff of a
scan over rematerialised spans is as good as a hand-written VJP and as lean: the inputs and one
state per span are saved.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from ..checks import fail
from ..vma import vary_together
from . import chunked, recurrent
from .pairs import einsum
from .spec import Inputs, Spec, check, with_rank


def linear_attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    gate: ArrayLike | None = None,
    *,
    scale: float | None = None,
    initial_state: ArrayLike | None = None,
    segment_ids: ArrayLike | None = None,
    max_documents: int = 1,
    return_final_state: bool = False,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """Linear attention over whole rows of tokens, differentiable in every array of floats.

    Args:
      q, k: `[B, T, H, K]`, used as they are (no norm). v: `[B, T, HV, V]`, HV a multiple of H.
      gate: log decay in nats per token, <= 0, `[B, T, HV, K]` or `[B, T, HV, 1]`; None: no decay.
      implementation: "chunked" (None) or "recurrent", the oracle.
      scale, initial_state, segment_ids, max_documents, return_final_state: as in `kda`.

    Returns: o `[B, T, HV, V]` in v's dtype; final states `[B, N, HV, K, V]` in float32 (float64)
    or None.

    Raises:
      ValueError: one line that names the argument, its value and what is allowed.
    """
    if implementation not in (None, "chunked", "recurrent"):
        fail("implementation", f"{implementation!r} is none of chunked, recurrent")
    spec, inputs = describe(
        q,
        k,
        v,
        gate,
        scale=scale,
        initial_state=initial_state,
        segment_ids=segment_ids,
        max_documents=max_documents,
        return_final_state=return_final_state,
    )
    inputs = vary_together(inputs)
    if implementation == "recurrent":
        return recurrent.scan_tokens(spec, inputs, _token_step)
    return run(spec, inputs)


def describe(
    q: ArrayLike, k: ArrayLike, v: ArrayLike, gate: ArrayLike | None, **options: Any
) -> tuple[Spec, Inputs]:
    """A checked call of `linear_attention`, whose other arguments are `options`."""
    v = with_rank("v", v, "[B, T, HV, V]")
    return check(
        q,
        k,
        v,
        gate,
        jnp.ones(v.shape[:3], jnp.float32),
        a_log=None,
        dt_bias=None,
        gate_form="log_decay",
        beta_form="value",
        lower_bound=-1.0,
        qk_l2norm=False,
        **options,
    )


def run(spec: Spec, x: Inputs) -> tuple[jax.Array, jax.Array | None]:
    """`linear_attention` of a checked call, chunk by chunk."""
    return chunked.by_chunks(spec, x, _scan)


def _token_step(S, q, k, v, g, beta):
    S = jnp.exp(g)[..., None] * S + k[..., None] * v[..., None, :]
    return S, einsum("bhkv,bhk->bhv", S, q)


def _write(c, A, S):
    """Values are written as they are: no inverse, no error."""
    return c.v, c.decay[..., None] * S + einsum("bhck,bhcv->bhkv", c.k_out, c.v)


def _scan(*arguments):
    return chunked.scan_spans(_write, *arguments)[0]
