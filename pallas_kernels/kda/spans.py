"""The affine map of a span of tokens, S_out = M S_in + N, and its composition.

A token maps the state by (I - beta k k^T) diag(exp g) and adds beta k v^T, so a span of them maps
it by a matrix M `[K, K]` and adds N `[K, V]`. Maps compose associatively (K3R §5.1.2): a long row
is split into spans that are summarised side by side, and under context parallelism every shard
sends one (M, N) of fixed size whatever its length. Everything is at least float32, with gradients.

What is mapped is the state of the document that is live: S_in is that of the document live before
the span, S_out of the one live after it. Where these differ, M is zero and N is the whole state of
the new document.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from ..checks import as_array, concrete, fail
from ..vma import vary_together
from . import chunked, documents, linear
from .pairs import einsum
from .spec import Inputs, Spec, check, width, with_rank


class SpanMap(NamedTuple):
    """S_out = M S_in + N, with M `[..., K, K]` and N `[..., K, V]`."""

    M: jax.Array
    N: jax.Array


def span_map(
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
    initial_state: ArrayLike | None = None,
    segment_ids: ArrayLike | None = None,
    max_documents: int = 1,
    document_before: ArrayLike | None = None,
) -> SpanMap:
    """The map of a span, for the state of the live document.

    The arguments are those of `kda`, without q. With `segment_ids`, a document that starts inside
    the span starts from its slot of `initial_state` (zeros if None); whether the span's first
    document does is told by `document_before`.

    Args:
      document_before: `[B]` int32, the id live before the span, that is the largest id among the
        row's earlier tokens; 0 (None) if there are none.

    Returns: M `[B, HV, K, K]` and N `[B, HV, K, V]`, float32 (float64). A span of padding, or of no
    tokens, is the identity.
    """
    # `check` is given k in q's place, and would name it so.
    k = with_rank("k", k, "[B, T, H, K]")
    width("k", k.shape[-1], "K")
    spec, x = check(
        k,
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
        scale=None,
        initial_state=initial_state,
        segment_ids=segment_ids,
        max_documents=max_documents,
        return_final_state=False,
    )
    return _map(spec, x, document_before, chunked.run)


def linear_span_map(
    k: ArrayLike,
    v: ArrayLike,
    gate: ArrayLike | None = None,
    *,
    initial_state: ArrayLike | None = None,
    segment_ids: ArrayLike | None = None,
    max_documents: int = 1,
    document_before: ArrayLike | None = None,
) -> SpanMap:
    """As `span_map`, for `linear_attention`, whose arguments these are, without q."""
    k = with_rank("k", k, "[B, T, H, K]")
    width("k", k.shape[-1], "K")
    spec, x = linear.describe(
        k,
        k,
        v,
        gate,
        scale=None,
        initial_state=initial_state,
        segment_ids=segment_ids,
        max_documents=max_documents,
        return_final_state=False,
    )
    return _map(spec, x, document_before, linear.run)


def _map(
    spec: Spec,
    x: Inputs,
    document_before: ArrayLike | None,
    run: Callable[[Spec, Inputs], tuple[jax.Array, jax.Array | None]],
) -> SpanMap:
    """The map of a checked call; `run` is the recurrence over a row."""
    before = _check_before(document_before, x.segment_ids, spec.batch)
    x, before = vary_together((x, before))
    ids = x.segment_ids
    if ids is not None:
        # Of all tokens only those of the document that is live at the end matter.
        live = jnp.maximum(documents.read(ids).live, before[:, None])
        last = live[:, -1] if spec.tokens else before
        ids = jnp.where((ids > 0) & (live == last[:, None]), 1, 0)

    # One pass gives both: the columns of V start from zero and end as N, and K more columns, with
    # values of zero, start from the identity and end as M.
    shape = (spec.batch, 1, spec.value_heads, spec.key_width)
    start = jnp.zeros((*shape, spec.value_width + spec.key_width), spec.dtype)
    start = start.at[..., spec.value_width :].set(jnp.eye(spec.key_width, dtype=spec.dtype))
    wide = jnp.pad(x.tokens.v, ((0, 0), (0, 0), (0, 0), (0, spec.key_width)))
    one = dataclasses.replace(
        spec,
        value_width=spec.value_width + spec.key_width,
        max_documents=1,
        has_initial_state=True,
        return_final_state=True,
    )
    inputs = x._replace(tokens=x.tokens._replace(v=wide), initial_state=start, segment_ids=ids)
    _, end = run(one, vary_together(inputs))
    assert end is not None
    N, M = end[:, 0, ..., : spec.value_width], end[:, 0, ..., spec.value_width :]
    if ids is None:
        return SpanMap(M, N)

    starts = (last != before)[:, None, None, None]
    if x.initial_state is not None:
        rows, slot = jnp.arange(spec.batch), jnp.maximum(last - 1, 0)
        own = x.initial_state.at[rows, slot].get(mode="fill", fill_value=0)
        N = jnp.where(starts, apply(SpanMap(M, N), own), N)
    return SpanMap(jnp.where(starts, 0, M), N)


def _check_before(
    document_before: ArrayLike | None, segment_ids: jax.Array | None, batch: int
) -> jax.Array:
    """`document_before [B]`, which the span's own ids may not go below."""
    if document_before is None:
        return jnp.zeros(batch, jnp.int32)
    before = as_array("document_before", document_before)
    if segment_ids is None:
        fail("document_before", "given without segment_ids")
    if before.shape != (batch,) or not jnp.issubdtype(before.dtype, jnp.integer):
        fail("document_before", f"{before.dtype}{list(before.shape)} is not int32[B] = [{batch}]")
    if concrete(before) and concrete(segment_ids):
        ids = np.asarray(segment_ids)
        back = ((ids > 0) & (ids < np.asarray(before)[:, None])).any(axis=1)
        if back.any():
            row = back.argmax()
            fail("document_before", f"{before[row]} is above an id of the span in row {row}")
    return before.astype(jnp.int32)


def apply(span: SpanMap, S: jax.Array) -> jax.Array:
    """M S + N."""
    return einsum("...ij,...jv->...iv", span.M, S) + span.N


def compose(first: SpanMap, second: SpanMap) -> SpanMap:
    """The map of `first`'s tokens followed by `second`'s; associative."""
    return SpanMap(einsum("...ij,...jk->...ik", second.M, first.M), apply(second, first.N))


def states_before(spans: SpanMap, initial: jax.Array) -> jax.Array:
    """The state before each of a row of spans, by an associative scan.

    Args:
      spans: their maps in order, on a new leading axis: `[S, B, HV, K, K]`, `[S, B, HV, K, V]`.
      initial: the state before the first, `[B, HV, K, V]`.

    Returns: `[S, B, HV, K, V]`.
    """
    through = jax.lax.associative_scan(compose, spans)
    return jnp.concatenate([initial[None], apply(through, initial)[:-1]])
