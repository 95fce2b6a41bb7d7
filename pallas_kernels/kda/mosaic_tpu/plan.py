"""How a call is cut into grid steps, and every static choice of the kernels."""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from ... import dispatch
from ..spec import Spec
from .tiles import CHUNK

# Chunks times heads of a grid step: enough independent products to hide the matrix unit's latency,
# as far as the backward kernel's values for them, MiB a unit of 128 wide heads, find room.
UNITS = 32
UNIT_MIB = {"bfloat16": 1.5, "float32": 4.2}
# A forward pass that will not be differentiated has room for more. Where documents have states,
# each adds a visit, which had better be short.
UNITS_ALONE, UNIT_MIB_ALONE = 64, 0.6
# Of a core's fast memory: 16 MiB on v4, at least 64 on every chip since.
ROOM_MIB = 60
# How far a factor of an anchored block may go to either side of 1, in nats. float32 and bfloat16
# hold e^-87 to e^88: components of a unit vector of down to 6e-4 stay above the smaller one. What
# has any size, cotangents above all (those of a mean over many tokens are 1e-9), is given room for
# 1e-20 to 1e20.
REACH_OF_UNIT_VECTORS, REACH = 80.0, 40.0
# Where the gate has no bound, a token that forgets more is taken to keep e^-10 (5e-5) or, in
# float32, e^-16 (1e-7) between two tokens of an anchored block: less than the products resolve.
FLOOR = {"bfloat16": 10.0, "float32": 16.0}


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is static about a pair of kernels; widths and heads are those of the padded arrays.

    rows: B. steps, groups: grid steps of a row, and groups of value heads that share no step.
    chunks, heads: of a grid step; `heads` is even. repeat: value heads per query head that the
      kernels are given.
    operand: dtype of the products' operands; v_dtype: of v and o.
    anchored: tokens of a block whose pairs are split at one anchor; larger distances by halving.
    reach: of that block's factors, in nats. floor: the least log decay of a token, in nats.
    level_parts: bfloat16 numbers that the columns of larger blocks are sums of, at most.
    masked: some tokens are padding, or documents meet inside a chunk. visits: see `visits.py`.
    slots: states of documents are read or written.
    """

    rows: int
    steps: int
    chunks: int
    groups: int
    heads: int
    repeat: int
    key_width: int
    value_width: int
    operand: str
    v_dtype: str
    gate_form: str
    beta_form: str
    lower_bound: float
    qk_l2norm: bool
    scale: float
    anchored: int
    reach: float
    floor: float | None
    level_parts: int
    masked: bool
    slots: int
    visits: int

    @property
    def block(self) -> int:
        """Tokens of a grid step."""
        return self.chunks * CHUNK

    @property
    def value_heads(self) -> int:
        return self.groups * self.heads

    @property
    def length(self) -> int:
        """Tokens of a padded row."""
        return self.steps * self.block

    def slot_states(self) -> jax.ShapeDtypeStruct:
        """States of documents, `[B, N, HV, K, V]`."""
        shape = (self.rows, self.slots, self.value_heads, self.key_width, self.value_width)
        return jax.ShapeDtypeStruct(shape, jnp.float32)


def held(dtype: str) -> str:
    """The dtype in which kernels hold what comes in one: a TPU has no float16, and not every
    generation has an 8-bit float."""
    return dtype if dtype == "bfloat16" else "float32"


def room_mib() -> int:
    """MiB of fast memory that a kernel may use on the chip that is compiled for."""
    if dispatch.current_platform() != "tpu":
        return ROOM_MIB
    return min(ROOM_MIB, (pltpu.get_tpu_info().vmem_capacity_bytes >> 20) - 1)


def padded_width(width: int) -> int:
    return next(w for w in (64, 128, 256) if width <= w)


def plan_of(spec: Spec, alone: bool = False) -> Plan:
    """The plan of a call that has tokens; `alone` if no backward kernel will share it."""
    K, V = padded_width(spec.key_width), padded_width(spec.value_width)
    narrow = {spec.q_dtype, spec.k_dtype, spec.v_dtype} == {"bfloat16"}
    operand = "bfloat16" if narrow else "float32"
    units, unit_mib = UNITS, UNIT_MIB[operand]
    if alone and narrow and not (spec.packed and spec.states_asked):
        units, unit_mib = UNITS_ALONE, UNIT_MIB_ALONE
    while units > 2 and units * unit_mib * max(K, V, 128) / 128 > room_mib():
        units //= 2
    repeat = spec.value_heads // spec.heads
    if math.lcm(repeat, 2) > units:
        repeat = 1  # such a group is no step: its queries and keys are repeated before the kernel
    query_heads = spec.value_heads // repeat
    value_heads = (query_heads + query_heads * repeat % 2) * repeat
    whole = math.lcm(repeat, 2)
    most = min(units, max(UNITS, whole))  # 48 of 96 heads would leave no room for a second chunk
    heads = max(h for h in range(whole, most + 1, whole) if value_heads % h == 0)
    chunks = 1
    while 2 * chunks * heads <= units and chunks * CHUNK < spec.tokens:
        chunks *= 2
    steps = -(-spec.tokens // (chunks * CHUNK))
    slots = spec.max_documents if spec.states_asked else 0
    masked = spec.packed or spec.tokens != steps * chunks * CHUNK or slots > 1
    reach = REACH_OF_UNIT_VECTORS if spec.qk_l2norm else REACH
    anchored, reach, floor = _anchors(spec, operand, reach)
    return Plan(
        rows=spec.batch,
        steps=steps,
        chunks=chunks,
        groups=value_heads // heads,
        heads=heads,
        repeat=repeat,
        key_width=K,
        value_width=V,
        operand=operand,
        v_dtype=held(spec.v_dtype),
        gate_form=spec.gate_form if spec.gate_width else "log_decay",
        beta_form=spec.beta_form,
        lower_bound=spec.lower_bound,
        qk_l2norm=spec.qk_l2norm,
        scale=spec.scale,
        anchored=anchored,
        reach=reach,
        floor=floor,
        level_parts=1,
        masked=masked,
        slots=slots,
        visits=steps + slots if slots and masked else steps,
    )


def backward_plan(spec: Spec, plan: Plan) -> Plan:
    """The plan of the backward kernel, whose factors meet cotangents, and which has more levels,
    and the time to multiply their columns in two parts."""
    anchored, reach, floor = _anchors(spec, plan.operand, REACH)
    return dataclasses.replace(plan, anchored=anchored, reach=reach, floor=floor, level_parts=2)


def _anchors(spec: Spec, operand: str, most: float) -> tuple[int, float, float | None]:
    """`anchored`, `reach` and `floor`: the largest block that the gate's bound allows with a reach
    of at most `most`. In float32 it is the smallest one, whose exponents lose the least to
    rounding."""
    bounded = spec.gate_form == "bounded" and spec.gate_width > 0
    least = FLOOR[operand]
    steepest = min(-spec.lower_bound, least) if bounded else least
    if spec.gate_width == 0:  # nothing decays, and no factor leaves 1
        return CHUNK, 0.0, None
    sizes = (4,) if operand == "float32" else (32, 16, 8)
    size = next(s for s in sizes if s * steepest <= 2 * most)
    floor = None if bounded and -spec.lower_bound <= least else -least
    return size, size * steepest / 2, floor
