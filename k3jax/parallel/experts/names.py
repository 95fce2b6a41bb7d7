"""Names of what a transport leaves for the backward pass, for `jax.checkpoint` policies.

A policy that saves `NAMES` never repeats a collective of a transport: the plan (who sends what
where), the rows as they arrived, and the sums that came back.
"""

from __future__ import annotations

import jax
from jax.ad_checkpoint import checkpoint_name

_PLAN, _ROWS, _SUM = NAMES = ("expert_plan", "expert_rows", "expert_sum")


def name_plan[Plan](plan: Plan) -> Plan:
    return jax.tree.map(lambda a: checkpoint_name(a, _PLAN), plan)


def name_rows(rows: jax.Array) -> jax.Array:
    return checkpoint_name(rows, _ROWS)


def name_sum(y: jax.Array) -> jax.Array:
    return checkpoint_name(y, _SUM)
