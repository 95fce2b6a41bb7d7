"""Kimi Delta Attention, and the linear mixers that it descends from.

One layer serves four rules, so that the lineage can be ablated: `linear` (S += k v^T), `delta`
(DeltaNet), `gated_delta` (one decay per head) and `kda` (one decay per key channel). The layer
makes the streams q, k, v, gate and beta; the recurrence itself is `pallas_kernels.kda`.

Sources: KLR §3 and eq. 10; K3R §2.1, eqs. 1-6.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from jax.nn import initializers
from jax.sharding import PartitionSpec

from k3jax.config import KDAConfig, OptimiserRule, OutputGate
from k3jax.layers.conv import short_conv
from k3jax.layers.documents import Documents, documents_of
from k3jax.layers.linear import (
    gain,
    island,
    matrix,
    merge_heads,
    normal,
    project,
    rms_norm,
    split_heads,
)
from k3jax.layers.row_cache import check, empty
from k3jax.layers.stats import Stats, Sum
from k3jax.parallel.context import recur
from k3jax.parallel.local import local
from k3jax.params import ParamSpec, declare, weight
from k3jax.sharding import sequence_axis, spec_of
from pallas_kernels.kda import kda, kda_step, linear_attention
from pallas_kernels.kda.gates import l2norm, log_decay
from pallas_kernels.kda.spans import linear_span_map, span_map

HALF_LIVES = tuple(2.0**n for n in range(-3, 17))  # tokens; lower edges of the probe's bins


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KDACache:
    """What one KDA layer carries between calls; rows hold one document each.

    `state [B, 1, H, K, V]` float32; `tails`, per stream, the last W-1 inputs of its convolution,
    `[B, W-1, C]`.
    """

    state: jax.Array
    tails: dict[str, jax.Array]


def log_uniform_a(key: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
    """`A_log` of the softplus gate: log of U(1, 16) (Kimi Linear, as in Mamba-2)."""
    return jnp.log(jax.random.uniform(key, shape, dtype, 1.0, 16.0))


def inverse_softplus_dt(key: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
    """`dt_bias`: softplus^-1 of a step log-uniform in [1e-3, 1e-1], at least 1e-4 (K3R §2.1.1)."""
    low, high = math.log(1e-3), math.log(1e-1)
    dt = jnp.maximum(jnp.exp(jax.random.uniform(key, shape, dtype, low, high)), 1e-4)
    return dt + jnp.log(-jnp.expm1(-dt))


def half_life_counts(g: jax.Array, real: jax.Array) -> jax.Array:
    """How many `real [B, T]` tokens have a half-life, ln 2 / -g, in each bin: `[H, K, bins]` int32.

    `g [B, T, H, K]` are log decays per token. Bins lie below the first of `HALF_LIVES`, between
    neighbours of them (the lower one included), and from the last one on.
    """
    lows = jnp.asarray([-math.inf, *(-math.log(2) / life for life in HALF_LIVES), math.inf])

    def at_least(low: jax.Array) -> jax.Array:
        return jnp.sum((g >= low) & real[..., None, None], axis=(0, 1), dtype=jnp.int32)

    # One edge at a time: all of them at once would be as many copies of g.
    reached = jnp.moveaxis(jax.lax.map(at_least, lows.astype(g.dtype)), 0, -1)
    return reached[..., :-1] - reached[..., 1:]


def longest_documents(documents: Documents) -> Documents:
    """The longest document of each row, the last of equal ones, and padding in place of others."""
    ids, positions = documents.segment_ids, documents.positions
    last = documents.real & (positions == positions.max(axis=1, initial=0, keepdims=True))
    longest = jnp.where(last, ids, 0).max(axis=1, initial=0, keepdims=True)
    return documents_of((documents.real & (ids == longest)).astype(jnp.int32))


class KimiDeltaAttention(nnx.Module):
    """The KDA layer: projections, short convolutions, recurrence, gated norm, output projection."""

    def __init__(
        self,
        config: KDAConfig,
        d_model: int,
        *,
        norm_eps: float = 1e-5,
        init_std: float = 0.02,
        rngs: nnx.Rngs | None,
    ):
        self.config, self.norm_eps = config, norm_eps
        heads = config.heads

        def linear(inner, outer, axes, name, rule: OptimiserRule = "muon") -> nnx.Variable:
            name = f"self_attn.{name}.weight"
            # Every projection onto heads is one matrix a head; one column a head is none.
            blocks = heads if axes[1] == "heads" and outer > heads else 1
            return declare(matrix((inner, outer), axes, name, init_std, rule, heads=blocks), rngs)

        def taps(stream: str, width: int) -> nnx.Variable:
            shape, name = (config.conv_width, width), f"self_attn.{stream}_conv1d.weight"
            spec = ParamSpec(shape, (None, "heads"), normal(init_std), hf_name=name)
            return declare(spec, rngs)

        widths = self._widths().items()
        self.stream = nnx.Dict(
            {s: linear(d_model, w, ("embed", "heads"), f"{s}_proj") for s, w in widths}
        )
        if config.conv_width:
            self.taps = nnx.Dict({s: taps(s, w) for s, w in widths})
        if config.rule != "linear":
            # One column per head is no matrix for Muon.
            self.beta = linear(d_model, heads, ("embed", "heads"), "b_proj", "adamw")
        if config.rule in ("kda", "gated_delta"):
            channels, rank = config.key_dim if config.rule == "kda" else 1, config.decay_rank
            self.decay_down = linear(d_model, rank, ("embed", "lora"), "f_a_proj")
            self.decay_up = linear(rank, heads * channels, ("lora", "heads"), "f_b_proj")
            init = initializers.zeros if config.gate_form == "bounded" else log_uniform_a
            spec = ParamSpec((heads,), ("heads",), init, hf_name="self_attn.A_log")
            self.a_log = declare(spec, rngs)
            shape, name = (heads, channels), "self_attn.dt_bias"
            spec = ParamSpec(shape, ("heads", None), inverse_softplus_dt, hf_name=name)
            self.dt_bias = declare(spec, rngs)
        width, rank = heads * config.value_dim, config.output_gate_rank
        if config.output_gate != "none" and rank:
            self.gate_down = linear(d_model, rank, ("embed", "lora"), "g_a_proj")
            self.gate_up = linear(rank, width, ("lora", "heads"), "g_b_proj")
        elif config.output_gate != "none":
            self.gate = linear(d_model, width, ("embed", "heads"), "g_proj")
        self.norm = declare(gain(config.value_dim, "self_attn.o_norm.weight"), rngs)
        self.out = linear(width, d_model, ("heads", "embed"), "o_proj")

    def __call__(
        self,
        x: jax.Array,
        *,
        documents: Documents,
        cache: KDACache | None = None,
        probes: Sequence[str] = (),
    ) -> tuple[jax.Array, KDACache | None, Stats]:
        """`x [B, T, d]` -> `(y [B, T, d], cache, stats)`; y is zero at padding.

        With a cache, rows go on where it ends (see `row_cache.check`). Probe `log_decay` adds
        `log_decay [H, K]` (`[H, 1]`), g summed over real tokens, and `half_life`, its distribution
        (`half_life_counts`), where the rule has a decay; `state_norm` adds `state_square [H]`: the
        squared Frobenius norm of the state after the longest document of each row (the last of
        equal ones; with a cache, after the row), summed over rows.
        """
        check(documents, cache)
        streams, tails = self._streams(x, documents, cache)
        gate = self._decay_gate(x)
        beta = project(x, self.beta) if hasattr(self, "beta") else None
        state = None if cache is None else cache.state
        o, state = self._recur(streams, gate, beta, state, documents)
        kind = self.config.output_gate
        gated = _gated(o, self._output_gate(x), self.norm[...], self.norm_eps, kind)
        y = project(merge_heads(gated), self.out)
        y = jnp.where(documents.real[..., None], y, 0)
        stats: Stats = {}
        if "log_decay" in probes and gate is not None:
            wide, form = gate.astype(island(gate.dtype)), self.config.gate_form
            g = log_decay(wide, self.a_log[...], self.dt_bias[...], form, self.config.lower_bound)
            where = documents.real[..., None, None]
            stats["log_decay"] = Sum(jnp.sum(g, axis=(0, 1), where=where))
            stats["half_life"] = Sum(half_life_counts(g, documents.real))
        if "state_norm" in probes:
            last = state
            if last is None:
                alone, start = longest_documents(documents), self._empty_state(len(x), x.dtype)
                _, last = self._recur(streams, gate, beta, start, alone)
            assert last is not None
            stats["state_square"] = Sum(jnp.sum(jnp.square(last), axis=(0, 1, 3, 4)))
        if state is None or tails is None:
            return y, None, stats
        return y, KDACache(state, tails), stats

    def empty_cache(self, batch: int, capacity: int, dtype: jnp.dtype) -> KDACache:
        """The cache of `batch` rows whose documents have not begun, for activations in `dtype`.

        Its size does not depend on the `capacity` in tokens that other mixers ask for.
        """
        del capacity
        config = self.config
        behind = max(config.conv_width - 1, 0)
        return KDACache(
            self._empty_state(batch, dtype),
            {
                s: empty(batch, (behind, w), dtype, None, "tensor")
                for s, w in self._widths().items()
            },
        )

    def _empty_state(self, batch: int, dtype: jnp.dtype) -> jax.Array:
        config = self.config
        shape = (1, config.heads, config.key_dim, config.value_dim)
        return empty(batch, shape, island(dtype), None, "tensor", None, None)

    def _widths(self) -> dict[str, int]:
        heads, keys, values = self.config.heads, self.config.key_dim, self.config.value_dim
        return {"q": heads * keys, "k": heads * keys, "v": heads * values}

    def _streams(
        self, x: jax.Array, documents: Documents, cache: KDACache | None
    ) -> tuple[list[jax.Array], dict[str, jax.Array] | None]:
        """q, k, v as `[B, T, H, D]`, and the tails of their convolutions."""
        streams = {name: project(x, self.stream[name]) for name in self._widths()}
        tails = None if cache is None else cache.tails
        if self.config.conv_width:
            taps = {name: weight(self.taps[name], x.dtype) for name in streams}
            specs = jax.tree.map(spec_of, streams)
            ends = {name: PartitionSpec(spec[0], None, spec[2]) for name, spec in specs.items()}
            convolve = functools.partial(short_conv, axis=sequence_axis(x))
            if self.config.conv_width > 1:
                streams, tails = local(
                    convolve, streams, taps, documents, tails, out_specs=(specs, ends)
                )
            else:  # tails have no tokens, and a split array of nothing ends XLA for CPUs

                def no_tails(streams, taps, documents):
                    return convolve(streams, taps, documents, None)[0]

                streams = local(no_tails, streams, taps, documents, out_specs=specs)
        return [split_heads(streams[name], self.config.heads) for name in "qkv"], tails

    def _decay_gate(self, x: jax.Array) -> jax.Array | None:
        """The raw gate `[B, T, H, K]`, or `[B, T, H, 1]`; None for a rule without decay."""
        if not hasattr(self, "decay_up"):
            return None
        z = project(project(x, self.decay_down), self.decay_up)
        return split_heads(z, self.config.heads)

    def _recur(
        self,
        streams: list[jax.Array],
        gate: jax.Array | None,
        beta: jax.Array | None,
        state: jax.Array | None,
        documents: Documents,
    ) -> tuple[jax.Array, jax.Array | None]:
        """The recurrence over the row, or over its one token: `(o [B, T, H, V], state)`."""
        v, config, axis = streams[2], self.config, sequence_axis(streams[2])
        options = {
            "gate_form": config.gate_form,
            "lower_bound": config.lower_bound,
            "beta_form": "logit",
        }

        def row(q, k, v, gate, beta, a_log, dt_bias, state, documents):
            gates = {"a_log": a_log, "dt_bias": dt_bias, **options}
            if config.rule == "linear":  # normed as under the other rules: only the rule differs
                q, k = l2norm(q), l2norm(k)
                attention = functools.partial(linear_attention, q, k, v)
                summary = functools.partial(linear_span_map, k, v)
            else:
                attention = functools.partial(kda, q, k, v, gate, beta, **gates)
                summary = functools.partial(span_map, k, v, gate, beta, **gates)
            ids = documents.segment_ids
            carried = {"initial_state": state, "return_final_state": state is not None}
            if axis is not None:
                before = documents.before.document
                return recur(
                    attention,
                    summary,
                    segment_ids=ids,
                    documents_before=before,
                    axis=axis,
                    **carried,
                )
            if config.rule == "linear" or state is None or v.shape[1] != 1:
                return attention(segment_ids=ids, **carried)
            q, k, v, gate, beta = jax.tree.map(lambda a: a[:, 0], (q, k, v, gate, beta))
            o, after = kda_step(q, k, v, gate, beta, state[:, 0], active=ids[:, 0] > 0, **gates)
            return o[:, None], after[:, None]

        gates = (None, None) if gate is None else (self.a_log[...], self.dt_bias[...])
        rows, _, heads, _ = spec_of(v)
        return local(
            row, *streams, gate, beta, *gates, state, documents,
            out_specs=(spec_of(v), PartitionSpec(rows, None, heads, None, None)),
        )  # fmt: skip

    def _output_gate(self, x: jax.Array) -> jax.Array | None:
        """The raw gate of the output `[B, T, H, V]`, or None."""
        if self.config.output_gate == "none":
            return None
        if self.config.output_gate_rank:
            raw = project(project(x, self.gate_down), self.gate_up)
        else:
            raw = project(x, self.gate)
        return split_heads(raw, self.config.heads)


@functools.partial(jax.checkpoint, static_argnums=(3, 4))  # the backward pass saves `o` and `raw`
def _gated(
    o: jax.Array, raw: jax.Array | None, scale: jax.Array, eps: float, kind: OutputGate
) -> jax.Array:
    """`o [B, T, H, V]`, normed and times its gate, in a float32 island (K3R eq. 6, KLR eq. 10)."""
    normed = rms_norm(o.astype(island(o.dtype)), scale, eps)
    if raw is not None:
        raw = raw.astype(normed.dtype)
        normed = normed * (jax.nn.silu(raw) if kind == "swish" else jax.nn.sigmoid(raw))
    return normed.astype(o.dtype)
