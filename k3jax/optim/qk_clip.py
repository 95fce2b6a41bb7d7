"""QK clip: attention logits kept below a limit by shrinking the weights that make them.

After each step, per head, `gamma = min(1, tau / S_max)` with the largest logit S_max that the step
saw, over all rows, micro-batches and devices. Queries and keys of a head's own shrink by
`sqrt(gamma)` each; a query part whose key is shared by the heads, as the "rope" part of MLA,
shrinks by gamma alone (Kimi K2, arXiv 2507.20534, §2.1; K3R §2.5). A `ParamSpec` says which powers
apply to which columns. KDA normalises queries and keys and needs none.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec

from k3jax.params import ParamSpec, spec_of_variable
from k3jax.sharding import spec_of, under_mesh


def clip_logits(
    params: nnx.State, stats: dict[str, Any], limit: float
) -> tuple[nnx.State, dict[str, jax.Array]]:
    """`params` with the heads whose largest logit exceeds `limit` scaled back to it; 0 clips none.

    `stats` are what the model returned, reduced over micro-batches, nested by the same names as
    `params`; a mixer's has `max_logit [..., heads]`, with the leading axes of its stack. Heads that
    share keys (GQA) shrink together, by the largest logit among them. All other values keep their
    bits.

    Also returns `qk_logit_max`, over all heads, and `qk_clipped_heads`; nothing where no layer has
    such logits.
    """
    flat: dict[Any, Any] = dict(nnx.to_flat_state(params))
    specs = {path: spec_of_variable(variable) for path, variable in flat.items()}
    # In one order whatever the process: all processes of a run compile one program.
    clipped = [path for path, spec in specs.items() if spec.qk_clip]
    tops, excessive = [], []
    for mixer in dict.fromkeys(path[:-1] for path in clipped):
        top = functools.reduce(lambda tree, key: tree[key], mixer, stats)["max_logit"].value
        if under_mesh():
            top = jax.sharding.reshard(top, PartitionSpec())
        over = top > limit if limit else jnp.zeros_like(top, bool)
        tops.append(jnp.max(top))
        excessive.append(jnp.sum(over, dtype=jnp.int32))
        mine = [path for path in clipped if path[:-1] == mixer]
        groups = min(specs[path].heads for path in mine)
        gamma = jnp.where(over, limit / top, 1).reshape(*top.shape[:-1], groups, -1).min(-1)
        for path in mine if limit else ():
            value = flat[path][...]
            factor = _of_columns(gamma, specs[path]).astype(value.dtype)
            if under_mesh():
                lead, columns = spec_of(value)[:-2], spec_of(value)[-1]
                factor = jax.sharding.reshard(factor, PartitionSpec(*lead, None, columns))
            flat[path] = flat[path].replace(value * factor)
    if not tops:
        return params, {}
    figures = {
        "qk_logit_max": jnp.max(jnp.stack(tops)),
        "qk_clipped_heads": jnp.sum(jnp.stack(excessive)),
    }
    return nnx.from_flat_state(flat), figures


def _of_columns(gamma: jax.Array, spec: ParamSpec) -> jax.Array:
    """The factor `[..., 1, columns]` of each column, from `gamma [..., groups]`."""
    widths, powers = zip(*spec.qk_clip, strict=True)
    gamma = jnp.repeat(gamma, spec.heads // gamma.shape[-1], axis=-1)
    factor = gamma[..., None] ** np.repeat(powers, widths)  # [..., heads, a head's columns]
    return factor.reshape(*gamma.shape[:-1], 1, spec.shape[-1])
