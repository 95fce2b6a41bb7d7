"""Decoder layers, and super-blocks of them.

A layer is two sublayers, mixer and feed-forward, each behind its RMS norm. How a sublayer reads
what came before is the residual's business: it adds up (`plain`), or attends over depth (AR; K3R
§2.2).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypedDict

import jax
import jax.numpy as jnp
from flax import nnx

from k3jax.config import ModelConfig
from k3jax.layers.attn_res import AttentionResidual, Depth, PartialMix, partial_mix, present
from k3jax.layers.documents import Documents
from k3jax.layers.ffn import GatedMLP
from k3jax.layers.gqa import GroupedQueryAttention
from k3jax.layers.kda import KimiDeltaAttention
from k3jax.layers.latent_moe import LatentMoE
from k3jax.layers.linear import gain, island, rms_norm
from k3jax.layers.mla import MultiHeadLatentAttention
from k3jax.layers.stats import Stats, Sum
from k3jax.parallel.experts import NAMES
from k3jax.params import declare
from k3jax.stacking import LayerKind

# What layers measure on request; a layer reports those that apply to it.
PROBES = ("log_decay", "state_norm", "mix_weights", "output_norm")

type Stream = jax.Array | Depth  # the residual stream: a sum `[B, T, d]`, or sources over depth


class _Options(TypedDict):
    init_std: float
    rngs: nnx.Rngs | None


class DecoderLayer(nnx.Module):
    """One layer: `norm -> mixer`, `norm -> feed-forward`, and how each reads the stream."""

    def __init__(self, config: ModelConfig, kind: LayerKind, *, rngs: nnx.Rngs | None):
        self.config, self.kind = config, kind
        d_model, options = config.d_model, _Options(init_std=config.init_std, rngs=rngs)
        self.mixer_norm = declare(gain(d_model, "input_layernorm.weight"), rngs)
        self.ffn_norm = declare(gain(d_model, "post_attention_layernorm.weight"), rngs)
        if kind.mixer == "kda":
            self.mixer: Any = KimiDeltaAttention(
                config.kda, d_model, norm_eps=config.norm_eps, **options
            )
        elif config.full_attention == "mla":
            self.mixer = MultiHeadLatentAttention(config.mla, d_model, **options)
        else:
            self.mixer = GroupedQueryAttention(config.gqa, d_model, **options)
        if kind.moe:
            self.ffn: Any = LatentMoE(config, rngs=rngs)
        else:
            self.ffn = GatedMLP(d_model, config.ffn.dense_width, config.ffn, **options)
        if config.residual.kind != "plain":
            names = {"mixer": "self_attention_res", "ffn": "mlp_res"}
            self.residual = nnx.Dict(
                {
                    sublayer: AttentionResidual(d_model, config.norm_eps, name, rngs=rngs)
                    for sublayer, name in names.items()
                }
            )

    def __call__(
        self,
        stream: Stream,
        *,
        documents: Documents,
        cache: Any = None,
        probes: Sequence[str] = (),
        stored: tuple[PartialMix, PartialMix] | None = None,
    ) -> tuple[Stream, Any, Stats]:
        """Runs both sublayers: `(stream, cache, stats)`.

        `stored` has each sublayer's partial mix over the stored sources, where a first phase has
        made them. Probe `output_norm` adds the mean square of what each sublayer reads of the
        stream (before its norm) and of its output, as sums over real tokens; `mix_weights` adds
        those of `AttentionResidual.measure`.
        """
        stats: Stats = {}
        full = self.config.residual.kind == "attn_res_full"
        for place, name in enumerate(("mixer", "ffn")):
            starts = full or (place == 0 and self.kind.starts_block)
            if "mix_weights" in probes and isinstance(stream, Depth):
                mix = self.residual[name].measure(stream, documents.real)
                stats["residual"] = stats.get("residual", {}) | {name: mix}
            h, stream = self._read(stream, name, starts, None if stored is None else stored[place])
            if "output_norm" in probes:
                stats[f"{name}_input_square"] = _square(h, documents)
            h = rms_norm(h, getattr(self, f"{name}_norm")[...], self.config.norm_eps)
            sublayer = getattr(self, name)
            if name == "mixer":
                y, cache, found = sublayer(h, documents=documents, cache=cache, probes=probes)
            else:
                y, _, found = sublayer(h, documents=documents, probes=probes)
            if found:
                stats[name] = found
            if "output_norm" in probes:
                stats[f"{name}_output_square"] = _square(y, documents)
            stream = stream.add(y) if isinstance(stream, Depth) else stream + y
        return stream, cache, stats

    def _read(
        self, stream: Stream, name: str, starts: bool, stored: PartialMix | None
    ) -> tuple[jax.Array, Stream]:
        """What the sublayer reads, and the stream it then adds to."""
        if not isinstance(stream, Depth):
            return stream, stream
        if starts and stored is not None:  # the finished block is among the stored sources already
            return stored.finish(stream.run.dtype), stream
        h = self.residual[name](stream, stored)
        return h, stream.push() if starts else stream


def _square(x: jax.Array, documents: Documents) -> Sum:
    """The mean square of `x [B, T, d]` over its width, summed over real tokens."""
    square = jnp.mean(jnp.square(x.astype(island(x.dtype))), axis=-1)
    return Sum(jnp.sum(square, where=documents.real))


class SuperBlock(nnx.Module):
    """Consecutive layers that are traced together; a stack of equal ones is scanned."""

    def __init__(self, config: ModelConfig, pattern: Sequence[LayerKind], *, rngs: nnx.Rngs | None):
        self.config = config
        self.layers = nnx.List([DecoderLayer(config, kind, rngs=rngs) for kind in pattern])

    def __call__(
        self,
        stream: Stream,
        *,
        documents: Documents,
        cache: list[Any] | None = None,
        probes: Sequence[str] = (),
    ) -> tuple[Stream, list[Any] | None, Stats]:
        """Runs the layers in turn; `cache` has one entry per layer, stats are keyed by place."""
        caches, stats = [], {}
        stored: list[tuple[PartialMix, PartialMix] | None] = [None] * len(self.layers)
        for place, layer in enumerate(self.layers):
            two_phase = self.config.residual.two_phase and layer.kind.starts_block
            if two_phase and isinstance(stream, Depth):
                stream, stored[place:] = self._first_phase(stream, place)
            graphdef, state = nnx.split(layer)
            run = _layer_function(graphdef, self.config.remat, tuple(probes))
            before = None if cache is None else cache[place]
            stream, after, found = run(state, stream, documents, before, stored[place])
            caches.append(after)
            if found:
                stats[place] = found
        return stream, None if cache is None else caches, {"layers": stats}

    def _first_phase(
        self, stream: Depth, place: int
    ) -> tuple[Depth, list[tuple[PartialMix, PartialMix] | None]]:
        """Scores the stored sources for all queries of the block from `place` on (AR Alg. 1)."""
        stream = stream.push()
        ends = [p for p in range(place + 1, len(self.layers)) if self.layers[p].kind.starts_block]
        block = self.layers[place : min(ends, default=len(self.layers))]
        queries = [
            layer.residual[name].folded(stream.run.dtype)
            for layer in block
            for name in ("mixer", "ffn")
        ]
        eps = self.config.norm_eps
        mixes = partial_mix(stream.stored, present(stream), jnp.stack(queries), eps)
        one = [jax.tree.map(lambda a, i=i: a[i], mixes) for i in range(len(queries))]
        pairs = list(zip(one[::2], one[1::2], strict=True))
        return stream, [*pairs, *[None] * (len(self.layers) - place - len(block))]


# "dots" and "full" keep what came from other devices on the way to experts and back, so that no
# collective of a transport runs twice; "everything" keeps the inputs of a layer alone. At 16 routes
# a token what came is the larger part of what a deep model would hold.
_MOVED = jax.checkpoint_policies.save_only_these_names(*NAMES)
_POLICIES: dict[str, Callable[..., bool] | None] = {
    "dots": jax.checkpoint_policies.save_from_both_policies(
        jax.checkpoint_policies.dots_with_no_batch_dims_saveable, _MOVED
    ),
    "full": _MOVED,
    "everything": None,
}


@functools.cache
def _layer_function(
    graphdef: nnx.GraphDef, policy: str, probes: tuple[str, ...]
) -> Callable[..., Any]:
    """A layer as a function of its state, whose backward pass recomputes what `policy` says.

    One function object per kind of layer, and a `jit` of its own: a decoder's equal layers are then
    traced and differentiated once, wherever they stand.
    """

    def run(state, stream, documents, cache, stored):
        layer = nnx.merge(graphdef, state)
        return layer(stream, documents=documents, cache=cache, probes=probes, stored=stored)

    return jax.jit(run if policy == "none" else jax.checkpoint(run, policy=_POLICIES[policy]))
