"""Multi-head latent attention (MLA) without rotation: K3R eq. 7, KLR §4.

Keys and values of all heads are projections of one latent vector per token. One more key part is
shared by the heads: the "rope" part of the official code, which is scored and cached but, in the
Kimi models, never rotated (NoPE). A cache holds these two.

The scores can be taken in two exact ways. Expanded: every head has its keys and values, as in
training and prefill. Absorbed: the up-projections move to the query's and the output's side, and
all heads attend to the latents themselves, which is how one new token reads a long cache.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from k3jax.config import MLAConfig
from k3jax.layers.attention import Visibility, attend, causal
from k3jax.layers.documents import Documents
from k3jax.layers.linear import (
    gain,
    matmul,
    matrix,
    merge_heads,
    project,
    rms_norm,
    split_heads,
)
from k3jax.layers.row_cache import empty, grow, write
from k3jax.layers.stats import Max, Stats
from k3jax.params import declare, weight


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MLACache:
    """What one MLA layer carries between calls; rows hold one document each.

    `latents [B, S, kv_lora_rank + qk_rope_dim]`: normalised latent | shared key part, of S tokens
    at most; `length [B]` int32: the tokens in it.
    """

    latents: jax.Array
    length: jax.Array

    @property
    def capacity(self) -> int:
        return self.latents.shape[-2]


class MultiHeadLatentAttention(nnx.Module):
    """The MLA layer: projections through low ranks, attention, sigmoid gate, output projection."""

    def __init__(
        self,
        config: MLAConfig,
        d_model: int,
        *,
        init_std: float = 0.02,
        rngs: nnx.Rngs | None,
    ):
        self.config = config
        heads, rank = config.heads, config.kv_lora_rank
        query, value = heads * (config.qk_nope_dim + config.qk_rope_dim), heads * config.value_dim

        def linear(
            inner: int, outer: int, axes: tuple[str, str], name: str, **more: Any
        ) -> nnx.Variable:
            name, blocks = f"self_attn.{name}.weight", heads if axes[1] == "heads" else 1
            return declare(matrix((inner, outer), axes, name, init_std, heads=blocks, **more), rngs)

        def norm(width: int, name: str) -> nnx.Variable:
            return declare(gain(width, f"self_attn.{name}.weight", "lora"), rngs)

        # A logit's own part takes half of QK clip's gamma on each side; the shared key stays.
        nope, rope = config.qk_nope_dim, config.qk_rope_dim
        of_query = {"qk_clip": ((nope, 0.5), (rope, 1.0))}
        of_keys = {"qk_clip": ((nope, 0.5), (config.value_dim, 0.0))}
        if config.q_lora_rank:
            self.query_down = linear(d_model, config.q_lora_rank, ("embed", "lora"), "q_a_proj")
            self.query_norm = norm(config.q_lora_rank, "q_a_layernorm")
            self.query_up = linear(
                config.q_lora_rank, query, ("lora", "heads"), "q_b_proj", **of_query
            )
        else:
            self.query = linear(d_model, query, ("embed", "heads"), "q_proj", **of_query)
        latent = rank + config.qk_rope_dim
        self.kv_down = linear(d_model, latent, ("embed", "lora"), "kv_a_proj_with_mqa")
        self.kv_norm = norm(rank, "kv_a_layernorm")
        expanded = heads * (config.qk_nope_dim + config.value_dim)
        self.kv_up = linear(rank, expanded, ("lora", "heads"), "kv_b_proj", **of_keys)
        if config.output_gate:
            self.gate = linear(d_model, value, ("embed", "heads"), "g_proj")
        self.out = linear(value, d_model, ("heads", "embed"), "o_proj")

    def __call__(
        self,
        x: jax.Array,
        *,
        documents: Documents,
        cache: MLACache | None = None,
        probes: Sequence[str] = (),
    ) -> tuple[jax.Array, MLACache | None, Stats]:
        """`x [B, T, d]` -> `(y [B, T, d], cache, stats)`; y is zero at padding.

        With a cache, the real tokens of `x` are appended to it (see `row_cache.grow`, also for what
        happens past its capacity) and see all that it holds; one token a row takes the absorbed
        form. `stats["max_logit"]` is the largest logit of each head, `[heads]`. No probes.
        """
        q, latents = self._queries(x), self._latents(x)
        if cache is None:
            o, max_logit = self._expanded(q, latents, causal(documents))
        else:
            growth = grow(documents, cache)
            cache = MLACache(write(cache.latents, latents, growth.slots), growth.length)
            form = self._absorbed if x.shape[1] == 1 else self._expanded
            o, max_logit = form(q, cache.latents.astype(x.dtype), growth.seen)
        o = merge_heads(o)
        if self.config.output_gate:
            o = o * jax.nn.sigmoid(project(x, self.gate).astype(o.dtype))
        y = project(o.astype(x.dtype), self.out)
        return y, cache, {"max_logit": Max(max_logit)}

    def empty_cache(self, batch: int, capacity: int, dtype: jnp.dtype) -> MLACache:
        """The cache of `batch` rows of at most `capacity` tokens that have not begun."""
        width = self.config.kv_lora_rank + self.config.qk_rope_dim
        return MLACache(
            empty(batch, (capacity, width), dtype, None, None), empty(batch, (), jnp.int32)
        )

    def _queries(self, x: jax.Array) -> jax.Array:
        """`[B, T, H, nope + rope]`."""
        if self.config.q_lora_rank:
            x = project(x, self.query_down)
            x = rms_norm(x, self.query_norm[...], self.config.lora_norm_eps)
            q = project(x, self.query_up)
        else:
            q = project(x, self.query)
        return split_heads(q, self.config.heads)

    def _latents(self, x: jax.Array) -> jax.Array:
        """`[B, T, R + rope]`: what the cache holds of a token."""
        latent, shared = jnp.split(project(x, self.kv_down), [self.config.kv_lora_rank], -1)
        latent = rms_norm(latent, self.kv_norm[...], self.config.lora_norm_eps)
        return jnp.concatenate([latent, shared], -1)

    @property
    def _scale(self) -> float:
        return (self.config.qk_nope_dim + self.config.qk_rope_dim) ** -0.5

    def _expanded(
        self, q: jax.Array, latents: jax.Array, seen: Visibility
    ) -> tuple[jax.Array, jax.Array]:
        """Attention with keys and values per head: `o [B, T, H, V]` and `max_logit [H]`."""
        config = self.config

        def keys_values(latents: jax.Array, up: jax.Array) -> tuple[jax.Array, jax.Array]:
            latent, shared = jnp.split(latents, [config.kv_lora_rank], -1)
            heads = up.shape[-1] // (config.qk_nope_dim + config.value_dim)
            own, v = jnp.split(split_heads(matmul(latent, up), heads), [config.qk_nope_dim], -1)
            return _keys(own, shared), v

        up = weight(self.kv_up, latents.dtype)
        return attend(q, (latents,), seen, self._scale, keys_values, (up,))

    def _absorbed(
        self, q: jax.Array, latents: jax.Array, seen: Visibility
    ) -> tuple[jax.Array, jax.Array]:
        """The same with the latents as the one key and value of all heads (arXiv 2405.04434)."""
        config = self.config
        rank = config.kv_lora_rank
        up = split_heads(weight(self.kv_up, q.dtype), config.heads)
        up_k, up_v = jnp.split(up, [config.qk_nope_dim], -1)
        own, rest = jnp.split(q, [config.qk_nope_dim], -1)
        q = jnp.concatenate([_einsum("bthn,rhn->bthr", own, up_k), rest], -1)
        k = latents[:, :, None]
        # The shared key part is summed too and dropped: slicing it off here would copy the cache.
        o, max_logit = attend(q, (k,), seen, self._scale, lambda k: (k, k))
        return _einsum("bthr,rhv->bthv", o[..., :rank], up_v.astype(o.dtype)), max_logit


def _keys(own: jax.Array, shared: jax.Array) -> jax.Array:
    """`own [B, T, H, K]` with `shared [B, T, P]` behind it in every head."""
    shared = jnp.broadcast_to(shared[:, :, None], (*own.shape[:3], shared.shape[-1]))
    return jnp.concatenate([own, shared], -1)


def _einsum(subscripts: str, x: jax.Array, w: jax.Array) -> jax.Array:
    precision = None if x.dtype == jnp.bfloat16 else jax.lax.Precision.HIGHEST
    return jnp.einsum(subscripts, x, w, precision=precision)
