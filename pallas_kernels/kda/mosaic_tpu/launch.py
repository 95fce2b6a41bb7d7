"""What the forward and the backward kernel share of a `pallas_call`: blocks, visits, names.

The grid is rows x groups of heads x visits; the states stay in scratch memory from visit to visit.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ... import dispatch
from ..cost import Cost
from .plan import Plan, room_mib
from .tiles import PAIR
from .visits import ACTIVE, BEGINS, ENDS, FIRST, LAST, Visits


class Arrays(NamedTuple):
    """Padded operands: q, k `[B, L, H * K]`, v `[B, L, HV * V]`, gate `[B, L, HV * K]`, beta
    `[B, groups, L, heads]`; a (exp(a_log)) and dt_bias `[1, HV * K]` in float32, or None."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    gate: jax.Array
    beta: jax.Array
    a: jax.Array | None
    dt_bias: jax.Array | None


class Block(NamedTuple):
    """A block shape with None for squeezed axes, and its place: (row, group, where) to indices."""

    shape: tuple[int | None, ...]
    place: Callable[..., tuple]


class Where(NamedTuple):
    """A point of the grid within its row and group: what it visits, and the state slot it is on."""

    visit: jax.Array
    step: jax.Array
    slot: jax.Array | int


class Now(NamedTuple):
    """What is special about a visit, as flags; True stands for always.

    opens: the first one of a row and group of heads, in the order of the kernel.
    begins, ends: it starts from, or leaves, the state of its slot.
    fresh: nothing has been written to the blocks of its step.
    active: it has work.
    """

    opens: jax.Array
    begins: jax.Array
    ends: jax.Array
    fresh: jax.Array | bool
    active: jax.Array | bool


def token_blocks(plan: Plan) -> dict[str, Block]:
    """The blocks of `Arrays`, by name."""

    def tokens(width: int) -> Block:
        return Block((None, plan.block, width), lambda b, g, w: (b, w.step, g))

    keys = tokens(plan.heads // plan.repeat * plan.key_width)
    gate = tokens(plan.heads * plan.key_width)
    beta = Block((None, None, plan.block, plan.heads), lambda b, g, w: (b, g, w.step, 0))
    row = Block((1, plan.heads * plan.key_width), lambda b, g, w: (0, g))
    values = tokens(plan.heads * plan.value_width)
    return dict(q=keys, k=keys, v=values, gate=gate, beta=beta, a=row, dt_bias=row)


def marks_block(plan: Plan) -> Block:
    return Block((None, None, plan.chunks, 1, PAIR), lambda b, g, w: (b, w.visit, 0, 0, 0))


def slot_block(plan: Plan) -> Block:
    shape = (None, None, plan.heads, plan.key_width, plan.value_width)
    return Block(shape, lambda b, g, w: (b, w.slot, g, 0, 0))


def saved_block(plan: Plan) -> Block:
    shape = (None, None, plan.heads, plan.key_width, plan.value_width)
    return Block(shape, lambda b, g, w: (b, w.visit, g, 0, 0))


def sums_block(plan: Plan) -> Block:
    """Sums over the tokens of a row, `[B, 1, HV * K]`."""
    return Block((None, 1, plan.heads * plan.key_width), lambda b, g, w: (b, 0, g))


def launch(
    plan: Plan,
    name: str,
    body: Callable[[Now, SimpleNamespace], None],
    visits: Visits | None,
    inputs: dict[str, tuple[jax.Array | None, Block]],
    outputs: dict[str, tuple[jax.ShapeDtypeStruct, Block]],
    cost: Cost,
    backwards: bool = False,
) -> dict[str, jax.Array]:
    """Runs `body(now, refs)` for every visit of every row and group of heads, the last visit first
    if `backwards`. `refs` holds the blocks by name, and `S`, float32 states `[heads, V, K]` that
    stay from one visit to the next; an input that is None is not there."""
    tables = () if visits is None or visits.step is None else visits[1:]
    if visits is not None:
        inputs = inputs | {"marks": (visits.marks, marks_block(plan))}
    inputs = {n: x for n, x in inputs.items() if x[0] is not None}
    names = (*inputs, *outputs, "S")
    state = (plan.heads, plan.key_width, plan.value_width)

    def visit_of(i: jax.Array) -> jax.Array:
        return plan.visits - 1 - i if backwards else i

    def spec(block: Block) -> pl.BlockSpec:
        def index(b, g, i, *tables):
            visit = visit_of(i)
            step, slot = (tables[0][b, visit], tables[1][b, visit]) if tables else (visit, 0)
            return block.place(b, g, Where(visit, step, slot))

        return pl.BlockSpec(block.shape, index)

    def kernel(*refs):
        row, i = pl.program_id(0), pl.program_id(2)
        visit = visit_of(i)
        now = Now(i == 0, visit == 0, visit == plan.visits - 1, fresh=True, active=True)
        if tables:
            flags = refs[2][row, visit]
            bits = (BEGINS, ENDS, LAST if backwards else FIRST, ACTIVE)
            now = Now(i == 0, *((flags & bit) != 0 for bit in bits))
        blocks = refs[len(tables) :]
        body(now, SimpleNamespace(**dict(zip(names, blocks, strict=True))))

    # `kda` has made the types of its inputs vary together under shard_map.
    varies = jax.typeof(jax.tree.leaves(inputs)[0]).manual_axis_type
    call = pl.pallas_call(
        kernel,
        name=name,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(tables),
            grid=(plan.rows, plan.groups, plan.visits),
            in_specs=[spec(block) for _, block in inputs.values()],
            out_specs=[spec(block) for _, block in outputs.values()],
            scratch_shapes=[pltpu.VMEM(state, jnp.float32)],
        ),
        out_shape=[
            jax.ShapeDtypeStruct(s.shape, s.dtype, manual_axis_type=varies)
            for s, _ in outputs.values()
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"),
            vmem_limit_bytes=room_mib() << 20,
        ),
        cost_estimate=pl.CostEstimate(
            flops=cost.flops,
            bytes_accessed=cost.bytes_accessed,
            transcendentals=cost.transcendentals,
        ),
        interpret=dispatch.current_platform() != "tpu",
    )
    return dict(zip(outputs, call(*tables, *(x for x, _ in inputs.values())), strict=True))


def when(condition: jax.Array | bool, body: Callable[[], None]) -> None:
    """`body()` where a flag of `Now` is set; one that is True is no branch."""
    if condition is True:
        body()
    else:
        pl.when(condition)(body)
