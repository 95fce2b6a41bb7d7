"""Balancing rules: how a router's selection bias moves, once per optimiser step.

A rule reads statistics of all real tokens of the step, over every micro-batch and device, and moves
the bias `[E]` of one router; there is no gradient and no auxiliary loss. With m tokens, k routes
each and n experts, the target load is q = m k / n.

- `sign`: `b += rate * sign(mean load - load)`, the auxiliary-loss-free rule.
- `quantile`: K3R §2.3.3. `margin[i, j] = score[i, j] - cutoff[i]`, with the raw score and the
  token's (k+1)-th biased score; minus the (q+1)-th largest margin of an expert is the bias at which
  just q tokens would choose it. It keeps every margin of the step: exact, and for small models.
- `histogram`: K3R §D. The same quantile from counts of `-margin`, the bias that a route requires,
  in uniform bins over `[min b - 1, max b + 1]`, where all of them lie; off by a bin at most.

Both quantile rules centre the bias on zero.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.nn import initializers

from k3jax.config import MoEConfig
from k3jax.layers.stats import Gather, Stats, Sum
from k3jax.params import ParamSpec


def state_specs(config: MoEConfig) -> dict[str, ParamSpec]:
    """The state of one router, by name.

    `bias [E]` float32. The histogram rule adds the last step's `histogram [E, bins]` int32 and its
    range, `bounds [2]` float32.
    """
    experts = config.experts
    name = "block_sparse_moe.gate.e_score_correction_bias"
    state = {"bias": ParamSpec((experts,), (None,), initializers.zeros, hf_name=name)}
    if config.balancing == "histogram":
        state["histogram"] = ParamSpec(
            (experts, config.bins), (None, None), initializers.zeros, dtype=jnp.dtype(jnp.int32)
        )
        state["bounds"] = ParamSpec((2,), (None,), _initial_bounds)
    return state


def _initial_bounds(key: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
    return jnp.broadcast_to(bounds_of(jnp.zeros(1, dtype)), shape)


def statistics(
    indices: jax.Array,
    scores: jax.Array,
    cutoff: jax.Array,
    bias: jax.Array,
    valid: jax.Array,
    config: MoEConfig,
) -> Stats:
    """What the rule of `config` must know of N tokens, of which only `valid [N]` ones count.

    The first three are those of a `Routing` with one leading axis; `bias [E]` is the one it was
    made with. Always `load [E]` (routes per expert) and `tokens []`, int32 sums; `histogram
    [E, bins]` int32 or `margins [N, E]` (-inf for padding) where the rule needs them.
    """
    chosen = (indices[..., None] == jnp.arange(config.experts)) & valid[:, None, None]
    stats: Stats = {
        "load": Sum(chosen.sum(axis=(0, 1), dtype=jnp.int32)),
        "tokens": Sum(valid.sum(dtype=jnp.int32)),
    }
    margins = jax.lax.stop_gradient(scores - cutoff[:, None])
    if config.balancing == "quantile":
        stats["margins"] = Gather(jnp.where(valid[:, None], margins, -jnp.inf))
    if config.balancing == "histogram":
        stats["histogram"] = Sum(histogram(-margins, valid, bounds_of(bias), config.bins))
    return stats


def bounds_of(bias: jax.Array) -> jax.Array:
    """`[2]`: the range of required biases, as scores lie in (0, 1) and cutoffs in b + (0, 1)."""
    return jnp.stack([bias.min() - 1, bias.max() + 1])


def histogram(required: jax.Array, valid: jax.Array, bounds: jax.Array, bins: int) -> jax.Array:
    """Counts `[E, bins]` int32 of the `valid [N]` rows of `required [N, E]` over `bounds`."""
    experts = required.shape[1]
    low, high = bounds
    place = jnp.floor((required - low) / (high - low) * bins).astype(jnp.int32)
    place = jnp.clip(place, 0, bins - 1) + bins * jnp.arange(experts)
    ones = jnp.broadcast_to(valid[:, None], place.shape).astype(jnp.int32)
    return jnp.zeros(experts * bins, jnp.int32).at[place].add(ones).reshape(experts, bins)


def sign_update(bias: jax.Array, load: jax.Array, rate: float) -> jax.Array:
    """One step of `rate` towards the mean load (the rule of Kimi Linear)."""
    return bias + rate * jnp.sign(load.mean(dtype=bias.dtype) - load)


def quantile_update(margins: jax.Array, tokens: jax.Array, top_k: int) -> jax.Array:
    """The bias from all `margins [N, E]` of a step, `tokens` of them finite (K3R §2.3.3).

    Where q is not a whole number, floor(q) margins exceed the quantile.
    """
    target, _ = _target(tokens, top_k, margins.shape[1])
    ascending = jnp.sort(-margins, axis=0)
    return _centred(jax.lax.dynamic_index_in_dim(ascending, target, 0, keepdims=False))


def histogram_update(
    counts: jax.Array, bounds: jax.Array, tokens: jax.Array, top_k: int
) -> jax.Array:
    """The bias from a step's `counts [E, bins]` over `bounds`, linear within a bin (K3R §D)."""
    experts, bins = counts.shape
    target, part = _target(tokens, top_k, experts)
    reached = jnp.cumsum(counts, axis=1)
    place = jnp.argmax(reached >= target + (part > 0), axis=1)
    here = jnp.take_along_axis(counts, place[:, None], axis=1)[:, 0]
    before = jnp.take_along_axis(reached, place[:, None], axis=1)[:, 0] - here
    inside = jnp.clip((target - before + part) / jnp.maximum(here, 1), 0, 1)
    low, high = bounds
    return _centred(low + (place + inside) * ((high - low) / bins))


def _target(tokens: jax.Array, top_k: int, experts: int) -> tuple[jax.Array, jax.Array]:
    """q = tokens k / experts as a whole number and a fraction; exact, and far from overflow."""
    rest = tokens % experts * top_k
    whole = tokens // experts * top_k + rest // experts
    return whole, (rest % experts) / experts


def _centred(bias: jax.Array) -> jax.Array:
    return bias - bias.mean()


def update(state: dict[str, jax.Array], stats: Stats, config: MoEConfig) -> dict[str, jax.Array]:
    """The state of one router after a step with the reduced `stats` of `statistics`.

    A step without real tokens changes nothing.
    """
    bias, tokens = state["bias"], stats["tokens"].value
    new = dict(state)
    match config.balancing:
        case "sign":
            new["bias"] = sign_update(bias, stats["load"].value, config.sign_rate)
        case "quantile":
            new["bias"] = quantile_update(stats["margins"].value, tokens, config.top_k)
        case "histogram":
            counts, bounds = stats["histogram"].value, bounds_of(bias)
            new["bias"] = histogram_update(counts, bounds, tokens, config.top_k)
            new["histogram"], new["bounds"] = counts, bounds
    return {
        name: jnp.where(tokens > 0, new[name], old).astype(old.dtype) for name, old in state.items()
    }


def update_balancing(state: nnx.State, stats: Stats, config: MoEConfig) -> nnx.State:
    """Every router's state after an optimiser step.

    `state` is a model's `BalancingState` (`nnx.state(model, BalancingState)`); `stats` are what the
    model returned, reduced over micro-batches: nested by the same names, so that a router at
    `a.b[0]` has its statistics at `stats["a"]["b"][0]`. Stacked routers have the same leading axes
    in both.
    """
    flat: dict[Any, Any] = dict(nnx.to_flat_state(state))
    for router in {path[:-1] for path in flat}:
        mine = {path[-1]: variable for path, variable in flat.items() if path[:-1] == router}
        step = functools.partial(update, config=config)
        for _ in range(mine["bias"].ndim - 1):
            step = jax.vmap(step)
        found = functools.reduce(lambda tree, key: tree[key], router, stats)
        new = step({name: variable[...] for name, variable in mine.items()}, found)
        flat |= {(*router, name): variable.replace(new[name]) for name, variable in mine.items()}
    return nnx.from_flat_state(flat)


def load_ratio(load: jax.Array) -> jax.Array:
    """Largest over mean load, `[..., E]` to `[...]` float32: 1 is balance, 0 without tokens."""
    total = load.sum(axis=-1).astype(jnp.float32)
    return load.max(axis=-1) * load.shape[-1] / jnp.maximum(total, 1)
