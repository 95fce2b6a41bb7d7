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
# Of a core's fast memory: 16 MiB on v4, at least 64 on every chip since.
ROOM_MIB = 60
# How far a factor of an anchored block may go to either side of 1, in nats. float32 and bfloat16
# hold e^-87 to e^88: components of a unit vector of down to 6e-4 stay above the smaller one, and
# those of vectors of other lengths are given more room.
REACH_OF_UNIT_VECTORS, REACH = 80.0, 64.0
# A token that forgets more is taken to keep e^-16 of the state, 1e-7, where the gate has no bound.
FLOOR = 16.0


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is static about a pair of kernels; widths and heads are those of the padded arrays.

    chunks, heads: of a grid step; `heads` is even. repeat: value heads per query head.
    anchored: tokens of a block whose pairs are split at one anchor; larger distances by halving.
    reach: of that block's factors, in nats. floor: the least log decay of a token, in nats.
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

    def slot_states(self) -> jax.ShapeDtypeStruct:
        """States of documents, `[B, N, HV, K, V]`."""
        shape = (self.rows, self.slots, self.value_heads, self.key_width, self.value_width)
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    @property
    def length(self) -> int:
        """Tokens of a padded row."""
        return self.steps * self.block


def held(dtype: str) -> str:
    """The dtype in which a TPU holds what comes in one: it has no float16."""
    return "float32" if dtype == "float16" else dtype


def room_mib() -> int:
    """MiB of fast memory that a kernel may use on the chip that is compiled for."""
    if dispatch.current_platform() != "tpu":
        return ROOM_MIB
    return min(ROOM_MIB, (pltpu.get_tpu_info().vmem_capacity_bytes >> 20) - 1)


def padded_width(width: int) -> int:
    return next(w for w in (64, 128, 256) if width <= w)


def padded_heads(spec: Spec) -> int:
    """Query heads such that the number of value heads is even."""
    repeat = spec.value_heads // spec.heads
    return spec.heads + (spec.heads * repeat) % 2


def plan_of(spec: Spec) -> Plan:
    """The plan of a call that has tokens."""
    repeat = spec.value_heads // spec.heads
    value_heads = padded_heads(spec) * repeat
    K, V = padded_width(spec.key_width), padded_width(spec.value_width)
    whole = math.lcm(repeat, 2)
    narrow = {spec.q_dtype, spec.k_dtype, spec.v_dtype} == {"bfloat16"}
    operand = "bfloat16" if narrow else "float32"
    units = UNITS
    while units > 2 and units * UNIT_MIB[operand] * max(K, V, 128) / 128 > room_mib():
        units //= 2
    most = max(units, whole)
    heads = max(h for h in range(whole, most + 1, whole) if value_heads % h == 0)
    chunks = 1
    while 2 * chunks * heads <= units and chunks * CHUNK < spec.tokens:
        chunks *= 2
    steps = -(-spec.tokens // (chunks * CHUNK))
    slots = spec.max_documents if spec.states_asked else 0
    masked = spec.packed or spec.tokens != steps * chunks * CHUNK or slots > 1
    anchored, reach, floor = _anchors(spec, operand)
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
        masked=masked,
        slots=slots,
        visits=steps + slots if slots and masked else steps,
    )


def _anchors(spec: Spec, operand: str) -> tuple[int, float, float | None]:
    """`anchored`, `reach` and `floor`: the largest block that the gate's bound allows. In float32
    it is the smallest one, whose exponents lose the least to rounding."""
    bounded = spec.gate_form == "bounded" and spec.gate_width > 0
    steepest = min(-spec.lower_bound, FLOOR) if bounded else FLOOR
    most = REACH_OF_UNIT_VECTORS if spec.qk_l2norm else REACH
    sizes = (8,) if operand == "float32" else (32, 16, 8)
    size = next(s for s in sizes if s * steepest <= 2 * most)
    floor = None if bounded and -spec.lower_bound <= FLOOR else -FLOOR
    return size, size * steepest / 2, floor
