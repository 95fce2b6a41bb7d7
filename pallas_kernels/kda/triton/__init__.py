"""KDA in Triton kernels, through jax-triton: one code for every GPU that Triton serves.

Forward: `prepare` (token-parallel) and `scan` (chunk by chunk). Backward, from the inputs and the
state before every chunk: `prepare` again, `reverse_scan`, then `value_gradients` and
`key_gradients` (token-parallel). No atomics: a run repeats bit for bit. NOTES.md has the times.

On a CPU the same kernels run in Triton's interpreter where TRITON_INTERPRET=1.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from ...vma import vary_together
from .. import documents, gates, recurrent
from ..derivatives import first_alone
from ..spec import Inputs, Spec, without_tokens
from . import chunks, launch


def refuses(spec: Spec, platform: str) -> str | None:
    if spec.batch * spec.tokens == 0:
        return None  # nothing is launched
    if spec.dtype == "float64":
        return "float64 is not a dtype of its products"
    if platform != "gpu" and not (platform == "cpu" and launch.interpreted()):
        return f"it needs a GPU, not {platform} (on a CPU, TRITON_INTERPRET=1 interprets it)"
    return launch.missing()


def run(spec: Spec, x: Inputs) -> tuple[jax.Array, jax.Array | None]:
    """`kda` of a checked call: o `[B, T, HV, V]` and the final states or None."""
    if spec.batch * spec.tokens == 0:
        return without_tokens(spec, x)
    from . import configs, operation  # and with it triton

    plan = chunks.plan(x.segment_ids, spec.max_documents, spec.states_asked)
    real = None if plan.marks is None else plan.marks > 0

    # What is small is activated here, with jax's own gradients: beta, exp(a_log), gates of width 1.
    beta = gates.write_strength(_wide(x.tokens.beta, real), spec.beta_form)
    gate, parameters = x.tokens.gate, None
    if gate is not None and spec.gate_width == 1:
        raw = _wide(gate, real)
        gate = gates.log_decay(raw, *x.parameters, spec.gate_form, spec.lower_bound)
        spec = dataclasses.replace(spec, gate_form="log_decay", gate_dtype="float32")
    elif gate is not None and spec.gate_form != "log_decay":
        a_log, dt_bias = jax.tree.map(lambda p: p.astype(jnp.float32), x.parameters)
        shape = (spec.value_heads, spec.key_width)
        rate = jnp.ones(shape[:1]) if a_log is None else gates.rate(a_log)
        bias = jnp.zeros(shape) if dt_bias is None else dt_bias
        rate, bias = vary_together((rate, bias, beta))[:2]
        parameters = jnp.stack([jnp.broadcast_to(rate[:, None], shape), bias], axis=1)[None]
    rows = operation.Rows(
        *x.tokens[:3],
        gate=gate,
        beta=beta,
        parameters=parameters,
        initial=x.initial_state,
        bounds=plan.bounds,
        groups=plan.groups,
        marks=plan.marks,
    )
    documents_apart = spec.max_documents if plan.groups is not None else 1
    config = configs.config_of(spec, documents_apart, launch.current_target())
    o, final = _kda(spec, config, rows)
    return o.astype(spec.v_dtype), final


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _kda(spec, config, rows):
    from . import operation

    return operation.forward(spec, config, False)((rows,))[:2]


def _forward(spec, config, rows):
    from . import operation

    rows = first_alone("triton", rows)
    o, final, saved = operation.forward(spec, config, True)((rows,))
    return (o, final), (rows, o, saved)


def _backward(spec, config, residuals, cotangents):
    from . import operation

    residuals, cotangents = first_alone("triton", (residuals, cotangents))
    rows, o, saved = residuals
    grads = operation.backward(spec, config)((rows, o, saved, *cotangents))
    dparameters = grads.parameters
    if rows.parameters is not None and rows.parameters.shape != dparameters.shape:
        dparameters = dparameters.sum(axis=0, keepdims=True)
    rows = rows._replace(
        q=recurrent.to_key_heads(grads.q, rows.q),
        k=recurrent.to_key_heads(grads.k, rows.k),
        v=grads.v.astype(rows.v.dtype),
        gate=grads.gate,
        beta=grads.beta,
        parameters=dparameters,
        initial=grads.initial,
        bounds=None,
        groups=None,
        marks=None,
    )
    return (rows,)


_kda.defvjp(_forward, _backward)


def _wide(x: jax.Array, real: jax.Array | None) -> jax.Array:
    """x in float32, 0 at padding."""
    x = x.astype(jnp.float32)
    return x if real is None else documents.mask(real, x)
