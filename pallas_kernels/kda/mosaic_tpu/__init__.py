"""Pallas kernels for TPUs: one forward kernel and one backward kernel for the whole of `kda`.

`prepare` (K1) and `recur` (K2) are functions of arrays that a kernel calls one after the other, for
up to 32 chunks times heads at once, or 64 where no gradient is asked for; `gradients` is the
reverse of `prepare`, `backward` of `recur`. A forward pass that will be differentiated saves one
state per grid step. NOTES.md tells how they came to be what they are.
"""

import functools

import jax
import jax.numpy as jnp

from .. import gates
from ..derivatives import first_alone
from ..spec import Inputs, Spec, without_tokens
from .backward import PARAMETERS, backward
from .forward import forward
from .launch import Arrays
from .plan import Plan, backward_plan, held, plan_of
from .visits import Visits, plan_visits


def refuses(spec: Spec, platform: str) -> str | None:
    if spec.dtype != "float32":
        return f"a TPU has no {spec.dtype}"
    return None


def run(spec: Spec, x: Inputs) -> tuple[jax.Array, jax.Array | None]:
    """`kda` of a checked call: o `[B, T, HV, V]` and the final states or None."""
    if spec.batch * spec.tokens == 0:
        return without_tokens(spec, x)
    return _run(spec, x)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _run(spec: Spec, x: Inputs) -> tuple[jax.Array, jax.Array | None]:
    return _planned(spec, plan_of(spec, alone=True), x)


def _run_forward(spec, x):
    return jax.vjp(functools.partial(_planned, spec, plan_of(spec)), x)


def _run_backward(spec, pull, cotangents):
    return pull(cotangents)


_run.defvjp(_run_forward, _run_backward)


def _planned(spec: Spec, plan: Plan, x: Inputs) -> tuple[jax.Array, jax.Array | None]:
    visits = None
    if plan.masked:
        ids = x.segment_ids
        if ids is None:
            ids = jnp.ones((spec.batch, spec.tokens), jnp.int32)
        visits = plan_visits(plan, ids)
    initial = x.initial_state
    if initial is not None:
        widths = (plan.value_heads, plan.key_width, plan.value_width)
        initial = _pad(initial, (*initial.shape[:2], *widths))
    o, final = _kda(spec, plan, arrays_of(spec, plan, x), initial, visits)
    o = o.reshape(*o.shape[:2], -1, plan.value_width)
    o = o[:, : spec.tokens, : spec.value_heads, : spec.value_width].astype(spec.v_dtype)
    if final is None or not spec.return_final_state:
        return o, None
    return o, final[:, :, : spec.value_heads, : spec.key_width, : spec.value_width]


def arrays_of(spec: Spec, plan: Plan, x: Inputs) -> Arrays:
    """The operands of the kernels: whole grid steps, padded widths, heads as slices of lanes."""
    q, k, v, gate, beta = x.tokens
    a_log, dt_bias = x.parameters
    value_heads = plan.value_heads
    repeats = spec.value_heads // spec.heads // plan.repeat
    if repeats > 1:
        q, k = (jnp.repeat(y, repeats, axis=2) for y in (q, k))

    def flat(y: jax.Array, heads: int, width: int) -> jax.Array:
        y = y.astype(held(y.dtype.name))
        return _pad(y, (spec.batch, plan.length, heads, width)).reshape(
            spec.batch, plan.length, heads * width
        )

    def channels(y: jax.Array) -> jax.Array:
        y = jnp.broadcast_to(y.astype(jnp.float32), (spec.value_heads, spec.key_width))
        return _pad(y, (value_heads, plan.key_width)).reshape(1, -1)

    if gate is None:
        gate = jnp.zeros_like(beta)[..., None]
    gate = jnp.broadcast_to(gate, (*gate.shape[:3], spec.key_width))
    beta = _pad(beta.astype(held(beta.dtype.name)), (spec.batch, plan.length, value_heads))
    beta = beta.reshape(spec.batch, plan.length, plan.groups, plan.heads).swapaxes(1, 2)
    return Arrays(
        flat(q, value_heads // plan.repeat, plan.key_width),
        flat(k, value_heads // plan.repeat, plan.key_width),
        flat(v, value_heads, plan.value_width),
        flat(gate, value_heads, plan.key_width),
        beta,
        None if a_log is None else channels(gates.rate(a_log.astype(jnp.float32))[:, None]),
        None if dt_bias is None else channels(dt_bias),
    )


def _pad(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """x with zeros at the ends of its axes."""
    if x.shape == shape:
        return x
    return jnp.pad(x, [(0, n - m) for n, m in zip(shape, x.shape, strict=True)])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _kda(
    spec: Spec, plan: Plan, arrays: Arrays, initial: jax.Array | None, visits: Visits | None
) -> tuple[jax.Array, jax.Array | None]:
    out = forward(spec, plan, arrays, visits, initial, save=False)
    return out["o"], out.get("final")


def _forward(spec, plan, arrays, initial, visits):
    arrays, initial = first_alone("mosaic_tpu", (arrays, initial))
    out = forward(spec, plan, arrays, visits, initial, save=True)
    saved = (arrays, visits, out["saved"], initial is not None)
    return (out["o"], out.get("final")), saved


def _backward(spec, plan, saved, cotangents):
    arrays, visits, states, has_initial = saved
    arrays, states, cotangents = first_alone("mosaic_tpu", (arrays, states, cotangents))
    do, dfinal = cotangents
    plan = backward_plan(spec, plan)
    grads = backward(spec, plan, arrays, visits, states, do, dfinal, has_initial)
    a, dt_bias = (jnp.sum(grads[n], axis=0) if n in grads else None for n in PARAMETERS)
    tokens = {n: grads[n] for n in ("q", "k", "v", "gate", "beta")}
    return Arrays(**tokens, a=a, dt_bias=dt_bias), grads.get("initial"), None


_kda.defvjp(_forward, _backward)
