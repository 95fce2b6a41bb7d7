"""Which tokens of a row a grid step works on, for rows with padding or documents.

Without states a grid step is a stretch of the row, and documents that meet in a chunk are kept
apart by masks. With states, every document that owns a slot is *visited* by itself: a stretch in
which two such documents meet is visited twice, each time with the other's tokens dead, so that a
visit begins and ends with one state. A row of N slots takes at most N visits more than it has
stretches; a document without tokens takes one, to hand its state on.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from .. import documents
from .plan import Plan
from .tiles import CHUNK, PAIR

BEGINS, ENDS, FIRST, LAST, ACTIVE = 1, 2, 4, 8, 16
# Lanes of a chunk's marks after its tokens.
BEFORE, AFTER = CHUNK, CHUNK + 1


class Visits(NamedTuple):
    """marks: `[B, visits, chunks, 1, 128]` float32. The first 64 lanes hold the number of a token's
    document in the row, or -1 where there is none or the visit leaves it alone; then the numbers of
    the documents that are alive before the chunk and after it.
    step, slot, flags: `[B, visits]` int32, None where a visit is a step. BEGINS, ENDS: it starts
    from, or leaves, the state of its slot; FIRST, LAST: of the visits of its step; ACTIVE: it has
    work. Visits without any come last.
    """

    marks: jax.Array
    step: jax.Array | None
    slot: jax.Array | None
    flags: jax.Array | None


def plan_visits(plan: Plan, ids: jax.Array) -> Visits:
    """The visits of rows with segment ids `[B, T]`."""
    docs = documents.read(ids)
    tail = ((0, 0), (0, plan.length - ids.shape[1]))
    real = jnp.pad(docs.real, tail)
    rank = jnp.pad(jnp.cumsum(docs.first, axis=1), tail, mode="edge")
    chunks = plan.length // CHUNK
    if not plan.slots:
        code = jnp.where(real, rank, -1).reshape(plan.rows, chunks, CHUNK)
        after = rank[:, CHUNK - 1 :: CHUNK]
        before = jnp.pad(after, ((0, 0), (1, 0)), constant_values=-1)[:, :-1]
        return Visits(_marks(plan, code, before, after), None, None, None)

    slots = plan.slots
    group = jnp.pad(jnp.clip(docs.live, 1, slots + 1) - 1, tail, mode="edge")
    bounds = jax.vmap(lambda row: jnp.searchsorted(row, jnp.arange(slots + 1)))(group)
    start, end = bounds, jnp.pad(bounds[:, 1:], ((0, 0), (0, 1)), constant_values=plan.length)
    first_step = jnp.minimum(start // plan.block, plan.steps - 1)
    least = jnp.arange(slots + 1) < slots
    count = jnp.where(end > start, -(-end // plan.block) - first_step, least)
    stop = jnp.cumsum(count, axis=1)

    visit = jnp.arange(plan.visits)
    owner = jax.vmap(lambda row: jnp.searchsorted(row, visit, side="right"))(stop)
    active = owner <= slots
    owner = jnp.minimum(owner, slots)

    def of(table: jax.Array) -> jax.Array:
        return jnp.take_along_axis(table, owner, axis=1)

    index = visit - of(stop - count)
    step = jnp.where(active, of(first_step) + index, plan.steps - 1)
    owned = active & (owner < slots)
    turns = jnp.diff(jnp.where(active, step, plan.steps), axis=1, prepend=-1, append=plan.steps) > 0
    flags = BEGINS * (owned & (index == 0)) + ENDS * (owned & (index == of(count) - 1))
    flags += FIRST * turns[:, :-1] + LAST * turns[:, 1:] + ACTIVE * active

    token = step[:, :, None] * plan.block + jnp.arange(plan.block)
    low, high = of(start)[:, :, None], of(end)[:, :, None]

    def at(table: jax.Array, place: jax.Array) -> jax.Array:
        place = jnp.clip(place, 0, plan.length - 1)
        return jnp.take_along_axis(table, place.reshape(plan.rows, -1), axis=1).reshape(place.shape)

    alive = active[:, :, None] & (token >= low) & (token < high) & at(real, token)
    code = jnp.where(alive, at(rank, token), -1)
    # A visit of a slot has one document, whose state is there before its first token.
    own = at(rank, high - 1)
    edge = token[:, :, ::CHUNK]
    before = jnp.where(edge > low, at(rank, edge - 1), -1)
    end_of_chunk = jnp.minimum(edge + CHUNK, high) - 1
    after = jnp.where(end_of_chunk >= low, at(rank, end_of_chunk), -1)
    before, after = (jnp.where(owned[:, :, None], own, x) for x in (before, after))
    slot = jnp.minimum(owner, slots - 1)
    marks = _marks(plan, code, before, after)
    return Visits(marks, *(x.astype(jnp.int32) for x in (step, slot, flags)))


def _marks(plan: Plan, code: jax.Array, before: jax.Array, after: jax.Array) -> jax.Array:
    lead = (plan.rows, plan.visits, plan.chunks)
    parts = (code.reshape(*lead, CHUNK), before.reshape(*lead, 1), after.reshape(*lead, 1))
    marks = jnp.concatenate(parts, axis=-1).astype(jnp.float32)
    spare = ((0, 0),) * 3 + ((0, PAIR - marks.shape[-1]),)
    return jnp.pad(marks, spare)[:, :, :, None]
