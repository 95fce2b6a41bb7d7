"""Calls of `kda` that between them compile every variant of the Mosaic GPU kernels."""

import jax
import jax.numpy as jnp

from pallas_kernels.kda import check, mosaic_gpu


def call(
    T=128,
    B=1,
    H=2,
    HV=2,
    K=128,
    V=128,
    gate_width=None,
    documents=1,
    packed=False,
    states=True,
    parameters=True,
    gradient=True,
    **options,
):
    """A function of one tree of arrays, and that tree's shapes."""
    bf16, f32 = jnp.bfloat16, jnp.float32
    shape = jax.ShapeDtypeStruct
    width = K if gate_width is None else gate_width
    floats = {
        "q": shape((B, T, H, K), bf16),
        "k": shape((B, T, H, K), bf16),
        "v": shape((B, T, HV, V), bf16),
        "gate": shape((B, T, HV, width), bf16),
        "beta": shape((B, T, HV), bf16),
        "a_log": shape((HV,), f32) if parameters else None,
        "dt_bias": shape((HV, width), f32) if parameters else None,
        "initial_state": shape((B, documents, HV, K, V), f32) if states else None,
    }
    ids = shape((B, T), jnp.int32) if packed else None
    static = {
        "gate_form": "bounded",
        "beta_form": "logit",
        "lower_bound": -5.0,
        "qk_l2norm": True,
        "scale": None,
        "max_documents": documents,
        "return_final_state": states,
    } | options

    def outputs(floats, ids):
        return mosaic_gpu.run(*check(**floats, segment_ids=ids, **static))

    def with_gradient(floats, ids):
        out, pull = jax.vjp(lambda floats: outputs(floats, ids), floats)
        return out, pull(jax.tree.map(jnp.ones_like, out))

    return (with_gradient if gradient else outputs), (floats, ids)


def mapped(**options):
    """The same, mapped over a leading axis of three."""
    function, arguments = call(**options)
    wide = jax.tree.map(lambda x: jax.ShapeDtypeStruct((3, *x.shape), x.dtype), arguments)
    return jax.vmap(function), wide


def programs():
    soft = {"gate_form": "softplus"}
    ready = {"gate_form": "log_decay", "parameters": False}
    return {
        "forward": call(gradient=False, states=False),
        "many heads, forward": call(H=96, HV=96, gradient=False),
        "many heads": call(H=96, HV=96),
        "bounded": call(),
        "exact": call(**soft),
        "far bound": call(lower_bound=-40.0),
        "cut": call(T=8300, H=8, HV=8),
        "cut, packed": call(T=8300, packed=True, documents=9, states=False),
        "ragged": call(T=100, states=False),
        "short": call(T=5, K=20, V=12, H=1),
        "width 64": call(K=64, V=64, **soft),
        "packed": call(T=300, packed=True, documents=3),
        "packed, exact": call(T=300, packed=True, documents=3, **ready),
        "packed, no states": call(T=300, packed=True, documents=9, states=False),
        "gdn": call(gate_width=1, **soft),
        "no norm": call(**ready, beta_form="value", qk_l2norm=False),
        "grouped": call(HV=8),
        "mapped": mapped(),
    }
