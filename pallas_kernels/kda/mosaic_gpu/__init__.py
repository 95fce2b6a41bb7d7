"""KDA on Hopper in Pallas Mosaic GPU: two kernels forward, three backward.

    prepare    every chunk on its own: raw inputs to the operands of the scan
    scan       the state through the chunks of a row, and the outputs
    reverse    the gradient of the state back through them
    gradients  every chunk on its own: the gradients of the inputs

Long rows of few heads are cut for `scan` and `reverse` (`pieces`), at the cost of a kernel each.

Saved between the passes are the inputs, the operands of the scan, the state before every chunk and
U, all in bfloat16. See NOTES.md for what was measured.
"""

import functools

import jax
import jax.numpy as jnp

from .. import gates, recurrent
from ..derivatives import first_alone
from ..spec import Inputs, Spec, initial_states, without_tokens
from . import gradients, pieces, prepare, regions, reverse, scan
from .chunks import Chunks
from .rows import by_rows
from .tiles import CHUNK

HOPPER = ("H100", "H200", "H800", "H20", "GH200")
WIDTHS = (64, 128)


def refuses(spec: Spec, platform: str) -> str | None:
    if platform != "gpu":
        return f"it runs on Hopper GPUs, and the platform is {platform}"
    if reason := _other_than_hopper():
        return reason
    dtypes = {
        "q": spec.q_dtype,
        "k": spec.k_dtype,
        "v": spec.v_dtype,
        "gate": spec.gate_dtype or "bfloat16",
    }
    for name, dtype in dtypes.items():
        if dtype != "bfloat16":
            return f"{name} is {dtype}, and it takes bfloat16"
    if spec.dtype != "float32":
        return f"the recurrence is in {spec.dtype}, and it computes in float32"
    if not spec.gate_width:
        return "gate is None, and bfloat16 products are not accurate enough where nothing decays"
    for letter, width in (("K", spec.key_width), ("V", spec.value_width)):
        if width > WIDTHS[-1]:
            return f"{letter} = {width}, and it takes widths up to {WIDTHS[-1]}"
    return None


def _other_than_hopper() -> str | None:
    """Why the device that a call is compiled for is not one; of an abstract one the kind is known,
    of those at hand the compute capability."""
    device = jax.sharding.get_abstract_mesh().abstract_device or jax.local_devices()[0]
    capability = getattr(device, "compute_capability", None)
    hopper = any(name in device.device_kind for name in HOPPER)
    if capability == "9.0" if capability else hopper:
        return None
    return f"it runs on Hopper GPUs, and the device is {device.device_kind}"


def run(spec: Spec, x: Inputs) -> tuple[jax.Array, jax.Array | None]:
    """`kda` of a checked call: o `[B, T, HV, V]` and the final states or None."""
    if spec.batch * spec.tokens == 0:
        return without_tokens(spec, x)
    states = x.initial_state
    c = describe(spec)
    pad_k, pad_v = c.key_width - spec.key_width, c.value_width - spec.value_width
    short = c.held - spec.tokens

    def token_array(y, pad):
        if not (short or pad):
            return y
        return jnp.pad(y, ((0, 0), (0, short), (0, 0), (0, pad)))

    q, k, v, gate, beta = x.tokens
    q, k, v = token_array(q, pad_k), token_array(k, pad_k), token_array(v, pad_v)
    wide = (c.batch, spec.tokens, c.value_heads, spec.key_width)
    assert gate is not None  # refused
    gate = token_array(jnp.broadcast_to(gate, wide), pad_k)
    beta = jnp.swapaxes(beta.astype(jnp.float32), 1, 2).reshape(c.rows, spec.tokens)
    a_log, dt_bias = x.parameters
    if a_log is None:
        a = jnp.ones(c.value_heads, jnp.float32)
    else:
        a = gates.rate(a_log.astype(jnp.float32))
    bias = jnp.zeros((c.value_heads, c.key_width), jnp.float32)
    if dt_bias is not None:
        bias = jnp.broadcast_to(dt_bias.astype(jnp.float32), (c.value_heads, spec.key_width))
        bias = jnp.pad(bias, ((0, 0), (0, pad_k)))

    initial = None
    if states is not None:
        initial = jnp.pad(states, ((0, 0), (0, 0), (0, 0), (0, pad_k), (0, pad_v)))
        if not c.packed:
            initial = initial[:, :1]
    if x.segment_ids is None:
        tables = regions.empty(c)
    else:
        tables = regions.tabulate(x.segment_ids, c.regions // c.pieces, c.chunks)
    if c.pieces > 1:
        tables = regions.cut(c, tables)
    arrays = (q, k, v, gate, beta, a, bias)
    o, final = _kda(c, spec.return_final_state, arrays, initial, tables)
    o = o[:, : spec.tokens, :, : spec.value_width]
    if not spec.return_final_state:
        return o, None
    final = final[..., : spec.key_width, : spec.value_width]
    if not c.packed and spec.max_documents > 1:
        return o, jnp.concatenate([final, initial_states(spec, x)[:, 1:]], axis=1)
    return o, final


def describe(spec: Spec) -> Chunks:
    """The static description of a call that is not refused and has tokens."""
    # One width for keys and values: the warpgroups of `gradients` take 64 channels of both.
    width = WIDTHS[0] if max(spec.key_width, spec.value_width) <= WIDTHS[0] else WIDTHS[1]
    count = spec.max_documents + 1 if spec.packed and spec.states_asked else 1
    whole = -(-spec.tokens // CHUNK)
    chunks = regions.chunk_count(spec.tokens, count) if spec.packed else whole
    cut = 1
    if count == 1:
        cut = pieces.count(spec.batch * spec.value_heads, whole, width)
    return Chunks(
        batch=spec.batch,
        tokens=spec.tokens,
        held=max(spec.tokens, CHUNK),
        regions=count * cut,
        slots=max(count - 1, 1) * cut,
        pieces=cut,
        chunks=chunks,
        heads=spec.heads,
        value_heads=spec.value_heads,
        key_width=width,
        value_width=width,
        gate_form=spec.gate_form,
        beta_form=spec.beta_form,
        lower_bound=spec.lower_bound,
        has_dt_bias=spec.has_dt_bias,
        l2norm=spec.qk_l2norm,
        scale=spec.scale,
        packed=spec.packed,
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _kda(c, return_final, arrays, initial, tables):
    return _forward_kernels(c, (return_final, False), *_arguments(arrays, initial, tables))[:2]


def _arguments(arrays, initial, tables, *others):
    """What all rows share, and what has an axis of rows."""
    *tokens, a, bias = arrays
    return (a, bias), (tokens, initial, tables, *others)


@by_rows
def _forward_kernels(c, options, shared, rows):
    """o, final states and what `save` keeps: the operands of `reverse`, A beta, the states before
    every chunk, U and the maps of pieces."""
    return_final, save = options
    _, initial, tables = rows
    used = jnp.max(tables.used, keepdims=True)
    prepared = prepare.kernel(c, save)(*_operands(c, shared, rows), used)
    w, kr, qd, u0, p, decay, *inverse = prepared
    maps = None
    if c.pieces > 1:
        initial, maps = pieces.states_before(c, (w, kr, u0, decay), initial, tables.spans)
    has_initial = initial is not None
    if not has_initial:
        initial = jnp.zeros((c.batch, 1, 1, 8, 8), jnp.float32)
    scanned = scan.kernel(c, has_initial, return_final, save)
    o, final, *saved = scanned(w, kr, qd, u0, p, decay, initial, tables.spans)
    if c.pieces > 1:
        final = final[:, -1:]
    return o, final, ((w, kr, qd, p, decay), *inverse, *saved, maps) if save else ()


def _operands(c, shared, rows):
    """What `prepare` takes."""
    (q, k, v, gate, beta), _, tables = rows[:3]
    return q, k, v, gate, regions.by_place(c, tables, beta), *shared, tables.chunks, tables.labels


def _forward(c, return_final, arrays, initial, tables):
    arrays, initial = first_alone("mosaic_gpu", (arrays, initial))
    arguments = _arguments(arrays, initial, tables)
    o, final, saved = _forward_kernels(c, (return_final, True), *arguments)
    return (o, final), (arrays, initial, tables, saved)


def _backward(c, return_final, saved, cotangents):
    saved, cotangents = first_alone("mosaic_gpu", (saved, cotangents))
    arrays, initial, tables, kept = saved
    arguments = _arguments(arrays, initial, tables, kept, *cotangents)
    *dtokens, dinitial, sums = _backward_kernels(c, (return_final,), *arguments)
    sums = sums.reshape(-1, c.value_heads, *sums.shape[1:])
    da, dbias = sums[..., 1, :].sum(axis=(0, 2, 3)), sums[..., 0, :].sum(axis=(0, 2))
    return (*dtokens, da, dbias), None if initial is None else dinitial, None


@by_rows
def _backward_kernels(c, options, shared, rows):
    """The gradients of q, k, v, the gate, beta and the initial states, and every chunk's share of
    those of the gate's parameters, `[B HV, NC, 2, K]`."""
    (return_final,) = options
    _, initial, tables, (scanned, inverse, states, u, maps), do, dfinal = rows
    if c.pieces > 1:
        dfinal = dfinal if return_final else None
        operands = (*scanned, do, tables.keeps)
        dfinal = pieces.gradients_after(c, operands, maps, dfinal, tables.spans)
    has_final = return_final or c.pieces > 1
    if not has_final:
        dfinal = jnp.zeros((c.batch, 1, 1, 8, 8), jnp.float32)
    back = reverse.kernel(c, has_final, initial is not None)
    du, dstates, dinitial = back(*scanned, do, tables.keeps, dfinal, tables.spans)
    if c.pieces > 1:
        dinitial = dinitial[:, :1]
    q, k, _, gate, beta, a, bias, table, labels = _operands(c, shared, rows)
    labels = jax.lax.bitcast_convert_type(labels, jnp.float32)
    dq, dk, dv, dgate, dbeta, sums = gradients.kernel(c)(
        q, k, gate, beta, a, bias, table, labels, do, scanned[-1], inverse, u, du, states, dstates
    )
    if c.packed:
        # No program wrote to chunks that do not exist.
        used = jnp.repeat(tables.chunks[:, 1] >= 0, c.value_heads, axis=0)
        sums = jnp.where(used[..., None, None], sums, 0)
    if c.gate_form == "log_decay":
        sums = sums.at[:, :, 1].set(0)

    dq, dk = (recurrent.to_key_heads(x, q) for x in (dq, dk))
    dbeta = regions.by_token(c, tables, dbeta)
    return dq, dk, dv, dgate, dbeta, dinitial, sums


_kda.defvjp(_forward, _backward)
