"""Kimi Delta Attention: the public operations `kda`, `kda_step` and `linear_attention`.

KLR is the Kimi Linear report (arXiv 2510.26692), K3R the Kimi K3 report (arXiv 2607.24653). Per
head, with a state S of `[K, V]` in float32:

    S <- diag(exp g) S ;  u = beta (v - S^T k) ;  S <- S + k u^T ;  o = scale S^T q    KLR eq. 1-2

Implementations are registered here, fastest first; `pallas_kernels.dispatch` says what each must
offer and how a call finds its own.
"""

import functools

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from .. import dispatch
from ..vma import vary_together
from . import documents, gates, recurrent
from .linear import linear_attention
from .spec import Inputs, Spec, check, check_step

__all__ = ["Inputs", "Spec", "check", "kda", "kda_step", "linear_attention"]

_EVERYWHERE = ("cpu", "gpu", "tpu")
_ROWS = (
    ("mosaic_tpu", ("tpu",)),
    ("mosaic_gpu", ("gpu",)),  # on Hopper, in bfloat16
    ("triton", ("gpu",)),
    ("chunked", _EVERYWHERE),
    ("recurrent", _EVERYWHERE),
)
for _name, _platforms in _ROWS:
    dispatch.register("kda", dispatch.Implementation(_name, f"{__name__}.{_name}", _platforms))


def kda(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    gate: ArrayLike | None,
    beta: ArrayLike,
    *,
    a_log: ArrayLike | None = None,
    dt_bias: ArrayLike | None = None,
    gate_form: str,
    beta_form: str,
    lower_bound: float = -5.0,
    qk_l2norm: bool = True,
    scale: float | None = None,
    initial_state: ArrayLike | None = None,
    segment_ids: ArrayLike | None = None,
    max_documents: int = 1,
    return_final_state: bool = False,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """Kimi Delta Attention over whole rows of tokens, differentiable in every array of floats.

    Everything inside is float32 (float64 if any input is), whatever the inputs are held in. K and
    V are at most 256; HV is a multiple of H, and value head h reads query head h // (HV / H); any
    T >= 0. Inputs are never overwritten. A gradient has the dtype of its input: that of a saturated
    gate held in float16 underflows.

    Args:
      q, k: `[B, T, H, K]`.
      v: `[B, T, HV, V]`.
      gate: `[B, T, HV, K]`, `[B, T, HV, 1]` (Gated DeltaNet) or None (DeltaNet: no decay).
      beta: write strength `[B, T, HV]`.
      a_log: `[HV]`, or None for A = 1.
      dt_bias: `[HV, K]` (`[HV, 1]` with a gate of width 1), or None for 0.
      gate_form: "softplus": g = -exp(a_log) softplus(gate + dt_bias); "bounded":
        g = lower_bound sigmoid(exp(a_log) (gate + dt_bias)), K3R eq. 5; "log_decay": g = gate, in
        nats per token, <= 0. Not read if gate is None.
      beta_form: "logit" (beta is passed through a sigmoid) or "value".
      lower_bound: of the bounded form, nats per token, < 0.
      qk_l2norm: normalise q and k per head; 1e-6 is added to the sum of squares.
      scale: multiplies q; None is K^-0.5.
      initial_state: `[B, N, HV, K, V]` in float32 (float64), or None for zeros.
      segment_ids: `[B, T]` int32, or None for one document. 0 is padding, anywhere: output and
        gradients are zero there and the state passes through. Ids count from 1 and do not
        decrease over real tokens; document n owns state slot n - 1.
      max_documents: N, static. Without states a row may hold any number of documents. Values of
        segment_ids are checked only where they are concrete; under jit a document beyond N starts
        from zeros and its final state is dropped.
      return_final_state: also return the states after the last token of each document; that of a
        document with no tokens is its initial state.
      implementation: a name of `dispatch.names("kda")`, or None for the fastest.

    Returns:
      o: `[B, T, HV, V]` in v's dtype.
      final_state: `[B, N, HV, K, V]` in float32 (float64), or None.

    Raises:
      ValueError: one line that names the argument, its value and what is allowed.
    """
    spec, inputs = check(
        q,
        k,
        v,
        gate,
        beta,
        a_log=a_log,
        dt_bias=dt_bias,
        gate_form=gate_form,
        beta_form=beta_form,
        lower_bound=lower_bound,
        qk_l2norm=qk_l2norm,
        scale=scale,
        initial_state=initial_state,
        segment_ids=segment_ids,
        max_documents=max_documents,
        return_final_state=return_final_state,
    )
    return dispatch.choose("kda", spec, implementation).run(spec, vary_together(inputs))


def kda_step(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    gate: ArrayLike | None,
    beta: ArrayLike,
    state: ArrayLike,
    *,
    a_log: ArrayLike | None = None,
    dt_bias: ArrayLike | None = None,
    gate_form: str,
    beta_form: str,
    lower_bound: float = -5.0,
    qk_l2norm: bool = True,
    scale: float | None = None,
    active: ArrayLike | None = None,
) -> tuple[jax.Array, jax.Array]:
    """One token of `kda` for every row: the decode step.

    The state is not overwritten, as nothing is in jax; to update it in place, donate it:
    `jax.jit(step, donate_argnums=...)` aliases the new state with the old one, since both have one
    shape and dtype.

    Args:
      q, k: `[B, H, K]`.
      v: `[B, HV, V]`.
      gate: `[B, HV, K]`, `[B, HV, 1]` or None.
      beta: `[B, HV]`.
      state: `[B, HV, K, V]` in float32 (float64).
      active: `[B]` bool, or None for all: a row that is not active is a no-op, whatever stands in
        it: its output is zero and its state is returned bit for bit.
      The other options are those of `kda`.

    Returns:
      o: `[B, HV, V]` in v's dtype; the new state, of state's shape and dtype.

    Raises:
      ValueError: as `kda` does.
    """
    spec, tokens, parameters, state, live = check_step(
        q,
        k,
        v,
        gate,
        beta,
        state,
        active,
        a_log=a_log,
        dt_bias=dt_bias,
        gate_form=gate_form,
        beta_form=beta_form,
        lower_bound=lower_bound,
        qk_l2norm=qk_l2norm,
        scale=scale,
    )
    tokens, parameters, state, live = vary_together((tokens, parameters, state, live))
    if live is not None:
        tokens = jax.tree.map(functools.partial(documents.mask, live), tokens)
    operands = gates.activate(spec, tokens, parameters)
    query, key = (recurrent.to_value_heads(spec, x) for x in operands[:2])
    new, o = recurrent.delta_step(state, query, key, *operands[2:])
    if live is not None:
        new = jnp.where(live[:, None, None, None], new, state)
        o = documents.mask(live, o)
    return o.astype(spec.v_dtype), new
