"""A call of `kda` as data: its shapes, dtypes and options, and every check with its message.

`check` is the only place where arguments are judged. It returns a `Spec`, which is static and
hashable (implementations are chosen and compiled by it), and the `Inputs`. Shapes, dtypes and
options are checked always; values only where they are concrete, never under a transformation.
"""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

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


def fail(argument: str, problem: str) -> None:
    raise ValueError(f"{argument}: {problem}")


def compute_dtype(*arrays: jax.Array | None) -> str:
    """float64 if any of the arrays is, else float32."""
    wide = any(x is not None and x.dtype == jnp.float64 for x in arrays)
    return "float64" if wide else "float32"


def floating(argument: str, x: ArrayLike, shape: tuple[int, ...], letters: str) -> jax.Array:
    """`x` as an array of floats of exactly this shape."""
    array = jnp.asarray(x)
    if not jnp.issubdtype(array.dtype, jnp.floating):
        fail(argument, f"dtype {array.dtype} is not a floating type")
    if array.shape != shape:
        fail(argument, f"shape {list(array.shape)} is not {letters} = {list(shape)}")
    return array


def rank4(argument: str, x: ArrayLike, letters: str) -> jax.Array:
    array = jnp.asarray(x)
    if array.ndim != 4:
        fail(argument, f"shape {list(array.shape)} is not {letters}")
    return array


def width(argument: str, value: int, letter: str) -> None:
    if not 1 <= value <= MAX_WIDTH:
        fail(argument, f"{letter} = {value} is not in 1..{MAX_WIDTH}")


def flag(argument: str, value: bool) -> bool:
    if not isinstance(value, (bool, np.bool_)):
        fail(argument, f"{value!r} is not True or False (it must be static)")
    return bool(value)


def state(
    x: ArrayLike | None, shape: tuple[int, ...], letters: str, dtype: DTypeLike
) -> jax.Array | None:
    """An initial state, which is held in the dtype of the recurrence and in no narrower one."""
    if x is None:
        return None
    array = floating("initial_state", x, shape, letters)
    if array.dtype != dtype:
        fail("initial_state", f"dtype {array.dtype} is not {dtype}, in which states are held")
    return array


def scale_of(scale: float | None, key_width: int) -> float:
    if scale is None:
        return key_width**-0.5
    if not isinstance(scale, (int, float, np.number)) or not math.isfinite(scale):
        fail("scale", f"{scale!r} is not a finite Python number or None (K^-0.5)")
    return float(scale)


def concrete(x: jax.Array) -> bool:
    """Whether the values of `x` can be read here without a transformation or another process."""
    return not isinstance(x, jax.core.Tracer) and x.is_fully_addressable


def check_documents(
    segment_ids: ArrayLike | None,
    max_documents: int,
    states_asked: bool,
    shape: tuple[int, ...],
) -> jax.Array | None:
    """`segment_ids [B, T]` of integers; the values are judged where they are concrete."""
    if not isinstance(max_documents, (int, np.integer)) or max_documents < 1:
        fail("max_documents", f"{max_documents!r} is not a positive Python int")
    if segment_ids is None:
        return None
    ids = jnp.asarray(segment_ids)
    if not jnp.issubdtype(ids.dtype, jnp.integer):
        fail("segment_ids", f"dtype {ids.dtype} is not an integer type")
    if ids.shape != shape:
        fail("segment_ids", f"shape {list(ids.shape)} is not [B, T] = {list(shape)}")
    ids = ids.astype(jnp.int32)
    if concrete(ids) and ids.size:
        values = np.asarray(ids)
        if values.min() < 0:
            fail("segment_ids", f"{values.min()} is negative (0 is padding)")
        running = np.maximum.accumulate(values, axis=1)
        if ((values > 0) & (values < running)).any():
            row = int(np.argmax(((values > 0) & (values < running)).any(axis=1)))
            fail("segment_ids", f"row {row} decreases over real tokens")
        if states_asked and values.max() > max_documents:
            fail(
                "max_documents",
                f"{max_documents} is below segment_ids' largest id {values.max()}, and packed "
                "states need a slot for every document",
            )
    return ids


def check_gate(
    gate: ArrayLike | None,
    a_log: ArrayLike | None,
    dt_bias: ArrayLike | None,
    gate_form: str,
    lower_bound: float,
    lead: tuple[int, ...],
    key_width: int,
) -> tuple[jax.Array | None, jax.Array | None, jax.Array | None]:
    """The gate and its parameters; `lead` is `[B, T, HV]`."""
    value_heads = lead[-1]
    letters = "[B, T, HV, K or 1]"
    if gate_form not in GATE_FORMS:
        fail("gate_form", f"{gate_form!r} is none of {', '.join(GATE_FORMS)}")
    for name, parameter in (("a_log", a_log), ("dt_bias", dt_bias)):
        if parameter is not None and gate is None:
            fail(name, "given, but gate is None (DeltaNet has no gate)")
        if parameter is not None and gate_form == "log_decay":
            fail(name, "given, but gate_form='log_decay' takes a ready log decay")
    if gate is None:
        return None, None, None
    if gate_form == "bounded" and not (
        isinstance(lower_bound, (int, float, np.number)) and -math.inf < lower_bound < 0
    ):
        fail("lower_bound", f"{lower_bound!r} is not a finite Python number below 0")
    gate = jnp.asarray(gate)
    gate_width = gate.shape[-1] if gate.ndim else 0
    if gate_width not in (1, key_width):
        fail("gate", f"shape {list(gate.shape)} is not {letters} = {[*lead, key_width]} or 1 last")
    gate = floating("gate", gate, (*lead, gate_width), letters)
    if a_log is not None:
        a_log = floating("a_log", a_log, (value_heads,), "[HV]")
    if dt_bias is not None:
        dt_bias = floating("dt_bias", dt_bias, (value_heads, gate_width), "[HV, gate's last axis]")
    if gate_form == "log_decay" and concrete(gate) and (np.asarray(gate) > 0).any():
        fail("gate", "a log decay above 0, and gate_form='log_decay' takes values <= 0")
    return gate, a_log, dt_bias


def check_beta_form(beta_form: str) -> None:
    if beta_form not in BETA_FORMS:
        fail("beta_form", f"{beta_form!r} is none of {', '.join(BETA_FORMS)}")


def check(
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
    initial_state: ArrayLike | None,
    segment_ids: ArrayLike | None,
    max_documents: int,
    return_final_state: bool,
) -> tuple[Spec, Inputs]:
    """Judges the arguments of `kda` and describes the call; raises ValueError in one line."""
    q, v = rank4("q", q, "[B, T, H, K]"), rank4("v", v, "[B, T, HV, V]")
    batch, tokens, heads, key_width = q.shape
    value_heads, value_width = v.shape[2:]
    q = floating("q", q, q.shape, "[B, T, H, K]")
    k = floating("k", k, q.shape, "[B, T, H, K] of q")
    v = floating("v", v, (batch, tokens, value_heads, value_width), "[B, T, HV, V]")
    width("q", key_width, "K")
    width("v", value_width, "V")
    if heads < 1 or value_heads < 1 or value_heads % heads:
        fail("v", f"HV = {value_heads} is not a multiple of q's H = {heads}")
    lead = (batch, tokens, value_heads)
    beta = floating("beta", beta, lead, "[B, T, HV]")
    gate, a_log, dt_bias = check_gate(gate, a_log, dt_bias, gate_form, lower_bound, lead, key_width)
    check_beta_form(beta_form)
    qk_l2norm = flag("qk_l2norm", qk_l2norm)
    return_final_state = flag("return_final_state", return_final_state)
    ids = check_documents(
        segment_ids, max_documents, initial_state is not None or return_final_state, q.shape[:2]
    )
    given = None if initial_state is None else jnp.asarray(initial_state)
    dtype = compute_dtype(q, k, v, gate, beta, a_log, dt_bias, given)
    shape = (batch, int(max_documents), value_heads, key_width, value_width)
    given = state(given, shape, "[B, max_documents, HV, K, V]", dtype)
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
        dtype=dtype,
        gate_form=gate_form,
        beta_form=beta_form,
        lower_bound=float(lower_bound) if gate_form == "bounded" else 0.0,
        qk_l2norm=qk_l2norm,
        scale=scale_of(scale, key_width),
        has_a_log=a_log is not None,
        has_dt_bias=dt_bias is not None,
        has_initial_state=given is not None,
        packed=ids is not None,
        max_documents=int(max_documents),
        return_final_state=return_final_state,
    )
    inputs = Inputs(Tokens(q, k, v, gate, beta), Parameters(a_log, dt_bias), given, ids)
    return spec, inputs


def check_step(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    gate: ArrayLike | None,
    beta: ArrayLike,
    carry: ArrayLike,
    active: ArrayLike | None,
    **options: Any,
) -> tuple[Spec, Tokens, Parameters, jax.Array, jax.Array | None]:
    """Judges the arguments of `kda_step`: those of `kda` with T = 1, without the token axis.

    Returns: the call as one of a single token, the tokens without their token axis, the gate's
    parameters, the state and the mask of active rows.
    """

    def with_tokens(argument: str, x: ArrayLike, rank: int) -> jax.Array:
        array = jnp.asarray(x)
        if array.ndim != rank:
            fail(argument, f"shape {list(array.shape)} has not {rank} axes (no token axis)")
        return array[:, None]

    spec, inputs = check(
        with_tokens("q", q, 3),
        with_tokens("k", k, 3),
        with_tokens("v", v, 3),
        None if gate is None else with_tokens("gate", gate, 3),
        with_tokens("beta", beta, 2),
        initial_state=with_tokens("state", carry, 4),
        segment_ids=None,
        max_documents=1,
        return_final_state=True,
        **options,
    )
    tokens = jax.tree.map(lambda x: x[:, 0], inputs.tokens)
    assert inputs.initial_state is not None
    state = inputs.initial_state[:, 0]
    if active is not None:
        active = jnp.asarray(active)
        if active.shape != (spec.batch,) or active.dtype != jnp.bool_:
            fail("active", f"{active.dtype}{list(active.shape)} is not bool[B] = [{spec.batch}]")
    return spec, tokens, inputs.parameters, state, active
