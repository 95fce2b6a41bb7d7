"""A call of `kda` as data: its shapes, dtypes and options, and every check with its message.

Arguments are judged here and nowhere else. `check` returns a `Spec`, which is static and
hashable (implementations are chosen and compiled by it), and the `Inputs`. Shapes, dtypes and
options are checked always; values only where they are concrete, never under a transformation.
"""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from ..checks import as_array, concrete, fail

GATE_FORMS = ("softplus", "bounded", "log_decay")
BETA_FORMS = ("logit", "value")
MAX_WIDTH = 256


class Tokens(NamedTuple):
    """The arrays with a token axis; gate is None for DeltaNet."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    gate: jax.Array | None
    beta: jax.Array


class Parameters(NamedTuple):
    """The gate's parameters, None where absent."""

    a_log: jax.Array | None
    dt_bias: jax.Array | None


class Inputs(NamedTuple):
    """The arrays of a call; absent ones are None. Shapes are those of `kda`'s docstring."""

    tokens: Tokens
    parameters: Parameters
    initial_state: jax.Array | None
    segment_ids: jax.Array | None


@dataclasses.dataclass(frozen=True)
class Spec:
    """What is static about a call.

    `gate_width` is K (KDA), 1 (Gated DeltaNet) or 0 (DeltaNet). `dtype` is what the recurrence is
    computed in and states are held in: float64 if any input is, else float32.
    """

    batch: int
    tokens: int
    heads: int
    value_heads: int
    key_width: int
    value_width: int
    gate_width: int
    q_dtype: str
    k_dtype: str
    v_dtype: str
    gate_dtype: str
    beta_dtype: str
    dtype: str
    gate_form: str
    beta_form: str
    lower_bound: float
    qk_l2norm: bool
    scale: float
    has_a_log: bool
    has_dt_bias: bool
    has_initial_state: bool
    packed: bool
    max_documents: int
    return_final_state: bool

    @property
    def states_asked(self) -> bool:
        return self.has_initial_state or self.return_final_state

    @property
    def state_shape(self) -> tuple[int, int, int, int, int]:
        """`[B, N, HV, K, V]`."""
        widths = (self.value_heads, self.key_width, self.value_width)
        return (self.batch, self.max_documents, *widths)


def initial_states(spec: Spec, x: Inputs) -> jax.Array:
    """`[B, N, HV, K, V]`; zeros, of the type that the tokens vary with, where none were given."""
    if x.initial_state is not None:
        return x.initial_state
    like = jnp.zeros_like(x.tokens.v, spec.dtype, shape=())
    return jnp.broadcast_to(like, spec.state_shape)


def without_tokens(spec: Spec, x: Inputs) -> tuple[jax.Array, jax.Array | None]:
    """What a call with no rows or no tokens returns: no output, and the states as they were."""
    return x.tokens.v, initial_states(spec, x) if spec.return_final_state else None


def compute_dtype(*arrays: jax.Array | None) -> str:
    """float64 if any of the arrays is, else float32."""
    wide = any(x is not None and x.dtype == jnp.float64 for x in arrays)
    return "float64" if wide else "float32"


def floating(argument: str, x: ArrayLike, shape: tuple[int, ...], letters: str) -> jax.Array:
    """`x` as an array of floats of exactly this shape."""
    array = as_array(argument, x)
    if not jnp.issubdtype(array.dtype, jnp.floating):
        fail(argument, f"dtype {array.dtype} is not a floating type")
    if array.shape != shape:
        fail(argument, f"shape {list(array.shape)} is not {letters} = {list(shape)}")
    return array


def with_rank(argument: str, x: ArrayLike, letters: str) -> jax.Array:
    """`x` as an array with one axis for each of the letters."""
    array = as_array(argument, x)
    if array.ndim != letters.count(",") + 1:
        fail(argument, f"shape {list(array.shape)} is not {letters}")
    return array


def width(argument: str, value: int, letter: str) -> None:
    if not 1 <= value <= MAX_WIDTH:
        fail(argument, f"{letter} = {value} is not in 1..{MAX_WIDTH}")


def is_number(x: object) -> bool:
    """Whether `x` is a static real number; True and False are none."""
    return isinstance(x, (int, float, np.integer, np.floating)) and not isinstance(x, bool)


def flag(argument: str, value: bool) -> bool:
    if not isinstance(value, (bool, np.bool_)):
        fail(argument, f"{value!r} is not True or False (it must be static)")
    return bool(value)


def scale_of(scale: float | None, key_width: int) -> float:
    if scale is None:
        return key_width**-0.5
    if not is_number(scale) or not math.isfinite(scale):
        fail("scale", f"{scale!r} is not a finite Python number or None (K^-0.5)")
    return float(scale)


def check_documents(
    segment_ids: ArrayLike | None,
    max_documents: int,
    states_asked: bool,
    shape: tuple[int, ...],
) -> jax.Array | None:
    """`segment_ids [B, T]` of integers; the values are judged where they are concrete."""
    whole = isinstance(max_documents, (int, np.integer)) and not isinstance(max_documents, bool)
    if not whole or max_documents < 1:
        fail("max_documents", f"{max_documents!r} is not a positive Python int")
    if segment_ids is None:
        return None
    ids = as_array("segment_ids", segment_ids)
    if not jnp.issubdtype(ids.dtype, jnp.integer):
        fail("segment_ids", f"dtype {ids.dtype} is not an integer type")
    if ids.shape != shape:
        fail("segment_ids", f"shape {list(ids.shape)} is not [B, T] = {list(shape)}")
    if concrete(ids) and ids.size:
        # As they were given: jax wraps without a word what its own integers do not hold.
        values = np.asarray(segment_ids)
        if values.min() < 0 or values.max() > np.iinfo(np.int32).max:
            worst = values.min() if values.min() < 0 else values.max()
            fail("segment_ids", f"{worst} is not in 0 (padding) .. 2^31 - 1")
        back = (values > 0) & (values < np.maximum.accumulate(values, axis=1))
        if back.any():
            fail("segment_ids", f"row {back.any(axis=1).argmax()} decreases over real tokens")
        if states_asked and values.max() > max_documents:
            fail(
                "max_documents",
                f"{max_documents} is below segment_ids' largest id {values.max()}, and packed "
                "states need a slot for every document",
            )
    return ids.astype(jnp.int32)


def check_gate(
    gate: ArrayLike | None,
    a_log: ArrayLike | None,
    dt_bias: ArrayLike | None,
    gate_form: str,
    lower_bound: float,
    lead: tuple[int, ...],
    key_width: int,
    axes: str,
) -> tuple[jax.Array | None, jax.Array | None, jax.Array | None]:
    """The gate and its parameters; `lead` is the shape of beta, `[axes, HV]`."""
    if gate_form not in GATE_FORMS:
        fail("gate_form", f"{gate_form!r} is none of {', '.join(GATE_FORMS)}")
    for name, parameter in (("a_log", a_log), ("dt_bias", dt_bias)):
        if parameter is not None and gate is None:
            fail(name, "given, but gate is None (DeltaNet has no gate)")
        if parameter is not None and gate_form == "log_decay":
            fail(name, "given, but gate_form='log_decay' takes a ready log decay")
    if gate is None:
        return None, None, None
    if gate_form == "bounded" and not (is_number(lower_bound) and -math.inf < lower_bound < 0):
        fail("lower_bound", f"{lower_bound!r} is not a finite Python number below 0")
    letters = f"[{axes}, HV, K or 1]"
    gate = with_rank("gate", gate, letters)
    gate_width = 1 if gate.shape[-1] == 1 else key_width
    gate = floating("gate", gate, (*lead, gate_width), letters)
    if a_log is not None:
        a_log = floating("a_log", a_log, lead[-1:], "[HV]")
    if dt_bias is not None:
        dt_bias = floating("dt_bias", dt_bias, (lead[-1], gate_width), "[HV, gate's last axis]")
    return gate, a_log, dt_bias


def check_decay(gate: jax.Array, real: jax.Array | None) -> None:
    """A ready log decay is at most 0, save where there is no real token (`real` of `lead`)."""
    if not concrete(gate) or (real is not None and not concrete(real)):
        return
    above = np.asarray(gate) > 0
    if real is not None:
        above &= np.asarray(real)[..., None, None]
    if above.any():
        worst = np.asarray(gate)[above].max()
        fail("gate", f"{worst} is above 0, and gate_form='log_decay' takes log decays <= 0")


def _judge(
    axes: str,
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    gate: ArrayLike | None,
    beta: ArrayLike,
    *,
    a_log: ArrayLike | None,
    dt_bias: ArrayLike | None,
    gate_form: str,
    beta_form: str,
    lower_bound: float,
    qk_l2norm: bool,
    scale: float | None,
) -> tuple[Spec, Inputs]:
    """Judges what rows of tokens (`axes` "B, T") and single tokens ("B") have in common.

    Returns: the call without documents and states, which are the caller's to add.
    """
    q, v = with_rank("q", q, f"[{axes}, H, K]"), with_rank("v", v, f"[{axes}, HV, V]")
    *lead, heads, key_width = q.shape
    value_heads, value_width = v.shape[-2:]
    q = floating("q", q, q.shape, f"[{axes}, H, K]")
    k = floating("k", k, q.shape, f"[{axes}, H, K] of q")
    v = floating("v", v, (*lead, value_heads, value_width), f"[{axes}, HV, V]")
    width("q", key_width, "K")
    width("v", value_width, "V")
    if heads < 1 or value_heads < 1 or value_heads % heads:
        fail("v", f"HV = {value_heads} is not a multiple of q's H = {heads}")
    beta = floating("beta", beta, (*lead, value_heads), f"[{axes}, HV]")
    gate, a_log, dt_bias = check_gate(
        gate, a_log, dt_bias, gate_form, lower_bound, beta.shape, key_width, axes
    )
    if beta_form not in BETA_FORMS:
        fail("beta_form", f"{beta_form!r} is none of {', '.join(BETA_FORMS)}")
    batch, tokens = (*lead, 1)[:2]
    spec = Spec(
        batch=batch,
        tokens=tokens,
        heads=heads,
        value_heads=value_heads,
        key_width=key_width,
        value_width=value_width,
        gate_width=0 if gate is None else gate.shape[-1],
        q_dtype=q.dtype.name,
        k_dtype=k.dtype.name,
        v_dtype=v.dtype.name,
        gate_dtype="" if gate is None else gate.dtype.name,
        beta_dtype=beta.dtype.name,
        dtype=compute_dtype(q, k, v, gate, beta, a_log, dt_bias),
        gate_form=gate_form,
        beta_form=beta_form,
        lower_bound=float(lower_bound) if gate_form == "bounded" else 0.0,
        qk_l2norm=flag("qk_l2norm", qk_l2norm),
        scale=scale_of(scale, key_width),
        has_a_log=a_log is not None,
        has_dt_bias=dt_bias is not None,
        has_initial_state=False,
        packed=False,
        max_documents=1,
        return_final_state=False,
    )
    return spec, Inputs(Tokens(q, k, v, gate, beta), Parameters(a_log, dt_bias), None, None)


def _with_state(
    spec: Spec, argument: str, x: ArrayLike, shape: tuple[int, ...], letters: str
) -> tuple[Spec, jax.Array]:
    """The call with a state, held in the dtype of the recurrence and in no narrower one."""
    array = floating(argument, x, shape, letters)
    dtype = "float64" if array.dtype == jnp.float64 else spec.dtype
    if array.dtype != dtype:
        fail(argument, f"dtype {array.dtype} is not {dtype}, in which states are held")
    return dataclasses.replace(spec, dtype=dtype, has_initial_state=True), array


def check(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    gate: ArrayLike | None,
    beta: ArrayLike,
    *,
    initial_state: ArrayLike | None,
    segment_ids: ArrayLike | None,
    max_documents: int,
    return_final_state: bool,
    **options: Any,
) -> tuple[Spec, Inputs]:
    """Judges the arguments of `kda` and describes the call; raises ValueError in one line.

    `options` are the other keyword arguments of `kda`, all but `implementation`.
    """
    spec, x = _judge("B, T", q, k, v, gate, beta, **options)
    return_final_state = flag("return_final_state", return_final_state)
    ids = check_documents(
        segment_ids,
        max_documents,
        initial_state is not None or return_final_state,
        (spec.batch, spec.tokens),
    )
    spec = dataclasses.replace(
        spec,
        packed=ids is not None,
        max_documents=int(max_documents),
        return_final_state=return_final_state,
    )
    if initial_state is not None:
        letters = "[B, max_documents, HV, K, V]"
        spec, initial_state = _with_state(
            spec, "initial_state", initial_state, spec.state_shape, letters
        )
    if x.tokens.gate is not None and spec.gate_form == "log_decay":
        check_decay(x.tokens.gate, None if ids is None else ids > 0)
    return spec, x._replace(initial_state=initial_state, segment_ids=ids)


def check_step(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    gate: ArrayLike | None,
    beta: ArrayLike,
    state: ArrayLike,
    active: ArrayLike | None,
    **options: Any,
) -> tuple[Spec, Tokens, Parameters, jax.Array, jax.Array | None]:
    """Judges the arguments of `kda_step`.

    Returns: the call as one of a row of a single token, the tokens (which have no token axis), the
    gate's parameters, the state and the mask of active rows.
    """
    spec, x = _judge("B", q, k, v, gate, beta, **options)
    slots = spec.state_shape
    spec, state = _with_state(spec, "state", state, (slots[0], *slots[2:]), "[B, HV, K, V]")
    if active is not None:
        active = as_array("active", active)
        if active.shape != (spec.batch,) or active.dtype != jnp.bool_:
            fail("active", f"{active.dtype}{list(active.shape)} is not bool[B] = [{spec.batch}]")
    if x.tokens.gate is not None and spec.gate_form == "log_decay":
        check_decay(x.tokens.gate, active)
    spec = dataclasses.replace(spec, return_final_state=True)
    return spec, x.tokens, x.parameters, state, active
