"""Grouped-query attention (Ainslie et al., arXiv 2305.13245): the plain alternative to MLA."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from k3jax.config import GQAConfig
from k3jax.layers.attention import attend, causal
from k3jax.layers.documents import Documents
from k3jax.layers.linear import matrix, merge_heads, project, split_heads
from k3jax.layers.rope import rotate
from k3jax.layers.row_cache import empty, grow, write
from k3jax.layers.stats import Max, Stats
from k3jax.params import declare


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class GQACache:
    """What one GQA layer carries between calls; rows hold one document each.

    `keys` (rotated) and `values`, `[B, S, kv_heads, head_dim]`, of S tokens at most; `length [B]`
    int32: the tokens in them.
    """

    keys: jax.Array
    values: jax.Array
    length: jax.Array

    @property
    def capacity(self) -> int:
        return self.keys.shape[-3]


class GroupedQueryAttention(nnx.Module):
    """The GQA layer: `heads` queries over `kv_heads` keys and values, with or without RoPE."""

    def __init__(
        self,
        config: GQAConfig,
        d_model: int,
        *,
        init_std: float = 0.02,
        rngs: nnx.Rngs | None,
    ):
        self.config = config

        def linear(inner, outer, axes: tuple[str, str], name: str, **more: Any) -> nnx.Variable:
            name = f"self_attn.{name}.weight"
            return declare(matrix((inner, outer), axes, name, init_std, **more), rngs)

        width, kv_width = config.heads * config.head_dim, config.kv_heads * config.head_dim
        columns, kv, both = ("embed", "heads"), config.kv_heads, ((config.head_dim, 0.5),)
        self.query = linear(d_model, width, columns, "q_proj", heads=config.heads, qk_clip=both)
        self.key = linear(d_model, kv_width, columns, "k_proj", heads=kv, qk_clip=both)
        self.value = linear(d_model, kv_width, columns, "v_proj", heads=kv)
        self.out = linear(width, d_model, ("heads", "embed"), "o_proj")

    def __call__(
        self,
        x: jax.Array,
        *,
        documents: Documents,
        cache: GQACache | None = None,
        probes: Sequence[str] = (),
    ) -> tuple[jax.Array, GQACache | None, Stats]:
        """`x [B, T, d]` -> `(y [B, T, d], cache, stats)`; y is zero at padding.

        Rotary positions count the tokens of a document. With a cache, the real tokens of `x` are
        appended to it (see `row_cache.grow`, also for what happens past its capacity) and see all
        that it holds. `stats["max_logit"]` is the largest logit of each head, `[heads]`. No probes.
        """
        config = self.config

        q = split_heads(project(x, self.query), config.heads)
        k, v = (split_heads(project(x, w), config.kv_heads) for w in (self.key, self.value))
        if config.rope:
            before = 0 if cache is None else cache.length[:, None]
            positions = before + documents.positions
            q, k = (rotate(y, positions, config.rope_theta) for y in (q, k))
        if cache is None:
            seen = causal(documents)
        else:
            growth = grow(documents, cache)
            cache = GQACache(
                write(cache.keys, k, growth.slots),
                write(cache.values, v, growth.slots),
                growth.length,
            )
            k, v, seen = cache.keys.astype(x.dtype), cache.values.astype(x.dtype), growth.seen
        o, max_logit = attend(q, (k, v), seen, config.head_dim**-0.5)
        y = project(merge_heads(o).astype(x.dtype), self.out)
        return y, cache, {"max_logit": Max(max_logit)}

    def empty_cache(self, batch: int, capacity: int, dtype: jnp.dtype) -> GQACache:
        """The cache of `batch` rows of at most `capacity` tokens that have not begun."""
        shape = (capacity, self.config.kv_heads, self.config.head_dim)
        keys = empty(batch, shape, dtype, None, "tensor", None)
        return GQACache(keys, jnp.zeros_like(keys), empty(batch, (), jnp.int32))
