"""Attention residuals: a sublayer reads a softmax mix of what came before, over depth.

Sources of a mix are the embedding, the sums of finished blocks, and the running sum of the current
block. Keys are the RMS-normalised sources, values the raw ones; the learned pseudo-query does not
depend on the input (AR eqs. 2-4 and §3.2, K3R eqs. 8-9). Nothing is mixed across tokens.

The stream is a `Depth`: a fixed buffer of stored sources, how many of them there are, and the
running sum. It has one size however deep the model is, so that equal blocks can be scanned.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jax.nn import initializers

from k3jax.layers.linear import gain, island
from k3jax.layers.stats import Stats, Sum
from k3jax.params import ParamSpec, declare


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Depth:
    """The residual stream under attention residuals.

    `stored [N, B, T, d]`: embedding and finished blocks, the first `count` (int32 scalar) of them
    valid; `run [B, T, d]`: the sum of the current block's outputs, meaningful where `running` (bool
    scalar).
    """

    stored: jax.Array
    count: jax.Array
    run: jax.Array
    running: jax.Array

    def push(self) -> Depth:
        """Stores the running sum as a finished block and starts the next one."""
        stored = jax.lax.dynamic_update_index_in_dim(self.stored, self.run, self.count, 0)
        return Depth(stored, self.count + 1, jnp.zeros_like(self.run), jnp.zeros((), bool))

    def add(self, y: jax.Array) -> Depth:
        """Adds a sublayer's output to the running sum."""
        return Depth(self.stored, self.count, self.run + y, jnp.ones((), bool))


def depth_of(embedding: jax.Array, slots: int) -> Depth:
    """The stream at the first layer: the embedding `[B, T, d]` runs, no source is stored yet."""
    stored = jnp.stack([jnp.zeros_like(embedding)] * slots)
    return Depth(stored, jnp.zeros((), jnp.int32), embedding, jnp.ones((), bool))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PartialMix:
    """An unfinished softmax over sources: weighted sum, total weight and largest score.

    `out [..., B, T, d]`, `total [..., B, T]`, `top [..., B, T]`, in the island's dtype; leading
    axes are queries. Two of them over different sources merge exactly (AR Alg. 1).
    """

    out: jax.Array
    total: jax.Array
    top: jax.Array

    def merge(self, other: PartialMix) -> PartialMix:
        """The partial mix over the sources of both."""
        top = jnp.maximum(self.top, other.top)
        mine, theirs = jnp.exp(self.top - top), jnp.exp(other.top - top)
        out = mine[..., None] * self.out + theirs[..., None] * other.out
        return PartialMix(out, mine * self.total + theirs * other.total, top)

    def finish(self, dtype: jnp.dtype) -> jax.Array:
        """The mix `[..., B, T, d]`."""
        return (self.out / self.total[..., None]).astype(dtype)


# Scores of sources that are not there: finite, so that a mix of nothing stays free of NaN.
_ABSENT = -1e30
_EXACT = jax.lax.Precision.HIGHEST


def partial_mix(
    sources: jax.Array, present: jax.Array, queries: jax.Array, eps: float
) -> PartialMix:
    """Scores `queries [..., d]` against `sources [S, B, T, d]` where `present [S]`.

    Score = query . RMSNorm(source), with `eps` in the norm; no 1/sqrt(d) (K3R eq. 8).
    """
    wide = sources.astype(island(sources.dtype))
    scores = _scores(wide, present, queries, eps)
    top = jnp.max(scores, axis=-3)
    weights = jnp.exp(scores - top[..., None, :, :]) * present[:, None, None]
    out = jnp.einsum("...sbt,sbtd->...btd", weights, wide, precision=_EXACT)
    return PartialMix(out, weights.sum(axis=-3), top)


def _scores(wide: jax.Array, present: jax.Array, queries: jax.Array, eps: float) -> jax.Array:
    """Scores `[..., S, B, T]` of the sources `wide [S, B, T, d]`, in their dtype."""
    queries = queries.astype(wide.dtype)
    scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1) + eps)
    # The norm is a factor per source and token: no normalised copy of the sources is made.
    scores = scale * jnp.einsum("sbtd,...d->...sbt", wide, queries, precision=_EXACT)
    return jnp.where(present[:, None, None], scores, _ABSENT)


class AttentionResidual(nnx.Module):
    """One pseudo-query over depth: zero at the start, which makes the mix a plain mean.

    The official code has a gain on the keys and a query; they only ever appear as a product.
    """

    def __init__(self, d_model: int, eps: float, name: str, *, rngs: nnx.Rngs | None):
        self.eps = eps
        self.gain = declare(gain(d_model, f"{name}_norm.weight"), rngs)
        spec = ParamSpec(
            (d_model,), (None,), initializers.zeros, hf_name=f"{name}_proj.weight"
        )  # zero is essential, AR §5
        self.query = declare(spec, rngs)

    def folded(self, dtype: jnp.dtype) -> jax.Array:
        """Gain times query `[d]`, in the island of `dtype`."""
        dtype = island(dtype)
        return self.gain[...].astype(dtype) * self.query[...].astype(dtype)

    def __call__(self, depth: Depth, stored: PartialMix | None = None) -> jax.Array:
        """The mix `[B, T, d]` that the sublayer reads.

        `stored` is the partial mix over the stored sources where a first phase has made it (AR
        Alg. 1); without it all sources are scored here.
        """
        return _mix(depth, self.folded(depth.run.dtype), stored, self.eps)

    def measure(self, depth: Depth, real: jax.Array) -> Stats:
        """Probe `mix_weights`: each source's weight `[N + 1]`, summed over `real [B, T]` tokens.

        Place 0 is the embedding's, place n that of block n (full AttnRes: of sublayer n), whether
        its sum is stored or still runs. A token's weights add up to 1.
        """
        query, run = self.folded(depth.run.dtype), depth.run[None]
        sources = ((depth.stored, present(depth)), (run, depth.running[None]))
        parts = [_scores(x.astype(query.dtype), there, query, self.eps) for x, there in sources]
        weights = jax.nn.softmax(jnp.concatenate(parts), axis=0)
        stored = jnp.pad(weights[:-1], ((0, 1), (0, 0), (0, 0)))
        places = jnp.arange(len(weights))[:, None, None]
        mix = jnp.where(places == depth.count, weights[-1], stored)
        return {"mix_weights": Sum(jnp.sum(mix, axis=(1, 2), where=real))}


def present(depth: Depth) -> jax.Array:
    """`[N]` bool: which slots of the buffer hold a source."""
    return jnp.arange(depth.stored.shape[0]) < depth.count


@functools.partial(jax.checkpoint, static_argnums=3)  # the backward pass saves the sources only
def _mix(depth: Depth, query: jax.Array, stored: PartialMix | None, eps: float) -> jax.Array:
    run = partial_mix(depth.run[None], depth.running[None], query, eps)
    if stored is None:
        stored = partial_mix(depth.stored, present(depth), query, eps)
    return stored.merge(run).finish(depth.run.dtype)
