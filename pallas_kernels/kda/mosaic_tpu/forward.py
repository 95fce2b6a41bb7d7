"""The forward kernel: K1 and K2 of a visit in one, with the states resident."""

import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp

from .. import cost
from ..spec import Spec
from . import recur, tokens
from .activate import write_strength
from .launch import Arrays, Now, launch, saved_block, slot_block, token_blocks, when
from .plan import Plan
from .prepare import prepare
from .visits import Visits


def forward(
    spec: Spec,
    plan: Plan,
    arrays: Arrays,
    visits: Visits | None,
    initial: jax.Array | None,
    save: bool,
) -> dict[str, jax.Array]:
    """Outputs by name: `o [B, L, HV * V]`; `final [B, N, HV, K, V]` if the plan has slots; if
    `save`, `saved [B, visits, HV, V, K]`, the states that visits start from, in the products'
    dtype."""
    blocks = token_blocks(plan)
    inputs = {n: (x, blocks[n]) for n, x in arrays._asdict().items()}
    inputs["initial"] = (initial, slot_block(plan))
    o = jax.ShapeDtypeStruct(arrays.v.shape, plan.v_dtype)
    outputs = {"o": (o, blocks["v"])}
    if plan.slots:
        outputs["final"] = (plan.slot_states(), slot_block(plan))
    if save:
        saved = (plan.rows, plan.visits, plan.value_heads, plan.key_width, plan.value_width)
        outputs["saved"] = (jax.ShapeDtypeStruct(saved, plan.operand), saved_block(plan))

    def body(now: Now, refs: SimpleNamespace) -> None:
        load_state(plan, refs, "initial", now.opens, now.begins)
        when(now.active, functools.partial(_visit, plan, now, refs))
        if plan.slots:
            store_state(refs, "final", now.ends)

    return launch(plan, "kda_forward", body, visits, inputs, outputs, cost.forward(spec))


def _visit(plan: Plan, now: Now, refs: SimpleNamespace) -> None:
    if hasattr(refs, "saved"):
        refs.saved[...] = refs.S[...].astype(refs.saved.dtype)
    marks, raw = tokens.read_marks(plan, refs), tokens.read_raw(refs)
    beta = write_strength(plan, raw.beta, marks)
    p = prepare(plan, raw, marks)
    x = recur.operands(plan, p, beta)
    v = tokens.read_values(plan, refs.v[...], marks)
    S, o = refs.S[...], []
    for c in range(plan.chunks):
        y, S = recur.chunk_step(plan, *recur.of_chunk(plan, c, (x, v)), S)
        o.append(y)
    refs.S[...] = S
    tokens.put(plan, refs.o, plan.scale * jnp.concatenate(o), now)


def load_state(
    plan: Plan, refs: SimpleNamespace, name: str, opens: jax.Array, begins: jax.Array
) -> None:
    """Sets `S` to zero at the first visit, and to a slot's state, from a block `[heads, K, V]` that
    may be absent (zero), where that slot begins."""

    def zero() -> None:
        refs.S[...] = jnp.zeros_like(refs.S)

    def load() -> None:
        refs.S[...] = getattr(refs, name)[...]

    when(opens, zero)
    if plan.slots:
        when(begins, load if hasattr(refs, name) else zero)


def store_state(refs: SimpleNamespace, name: str, ends: jax.Array) -> None:
    """Leaves `S` in a slot's block `[heads, K, V]`."""

    def store() -> None:
        getattr(refs, name)[...] = refs.S[...]

    when(ends, store)
