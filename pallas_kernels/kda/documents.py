"""What `segment_ids` means, in one place.

`segment_ids [B, T]` is non-decreasing over real tokens and 0 at padding, which may stand anywhere.
Document n owns state slot n - 1. A document that has no slot (its id is above `max_documents`,
which `spec.check` allows only where no states are asked) starts from the zero state.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

_COMPARED = 1 << 24


class Documents(NamedTuple):
    """`real`: not padding; `live`: the document that the state belongs to after the token (0 before
    the first one); `first`: the first token of its document. All `[B, T]`."""

    real: jax.Array
    live: jax.Array
    first: jax.Array


def read(segment_ids: jax.Array) -> Documents:
    """Documents of a row: padding keeps the document before it alive."""
    real = segment_ids > 0
    live = jax.lax.cummax(segment_ids, axis=1)
    before = jnp.pad(live, ((0, 0), (1, 0)))[:, :-1]
    return Documents(real, live, real & (live != before))


def mask(real: jax.Array, x: jax.Array) -> jax.Array:
    """x with zeros at padding, so that neither garbage nor a gradient passes."""
    return jnp.where(real.reshape(real.shape + (1,) * (x.ndim - real.ndim)), x, 0)


def places(rows: jax.Array, values: jax.Array, side: str = "left") -> jax.Array:
    """Where `values [N]` belong in each of sorted `rows [B, T]`, `[B, N]`, as `jnp.searchsorted`
    has it: by all comparisons in one kernel, where they are not too many, since a binary search
    starts several for each of its steps."""
    method = "compare_all" if rows.shape[1] * values.size <= _COMPARED else "scan"

    def one(row):
        return jnp.searchsorted(row, values, side=side, method=method)

    return jax.vmap(one)(rows)
