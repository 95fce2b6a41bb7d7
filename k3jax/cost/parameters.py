"""Parameters of each part, as the shapes of the architecture give them (K3R Table 1).

Counted by hand from the configuration, so that a cost model needs no model; a test holds the
figures to the declared parameters of the real one.
"""

from __future__ import annotations

import dataclasses

from k3jax.config import GQAConfig, KDAConfig, MLAConfig, ModelConfig, MoEConfig


@dataclasses.dataclass(frozen=True)
class ParameterCounts:
    """`total`: all of them. `active`: those that one token's prediction uses.

    Active counts the head and not the embedding (a lookup), and top_k of the routed experts.
    """

    total: int
    active: int


@dataclasses.dataclass(frozen=True)
class Weights:
    """Parameters of a part: those in matrix products, and the rest (gains, biases, taps)."""

    matrices: int
    vectors: int = 0

    def __add__(self, other: Weights) -> Weights:
        return Weights(self.matrices + other.matrices, self.vectors + other.vectors)

    @property
    def all(self) -> int:
        return self.matrices + self.vectors


def kda_weights(config: KDAConfig, d: int) -> Weights:
    """One KDA layer, or one of its ancestors."""
    keys, values = config.heads * config.key_dim, config.heads * config.value_dim
    matrices = d * (2 * keys + values) + values * d
    vectors = config.conv_width * (2 * keys + values) + config.value_dim
    if config.rule != "linear":
        matrices += d * config.heads
    if config.rule in ("kda", "gated_delta"):
        channels = keys if config.rule == "kda" else config.heads
        matrices += config.decay_rank * (d + channels)
        vectors += config.heads + channels
    if config.output_gate != "none":
        rank = config.output_gate_rank
        matrices += rank * (d + values) if rank else d * values
    return Weights(matrices, vectors)


def mla_weights(config: MLAConfig, d: int) -> Weights:
    """One MLA layer."""
    queries = config.heads * (config.qk_nope_dim + config.qk_rope_dim)
    values = config.heads * config.value_dim
    keys = config.heads * config.qk_nope_dim
    rank, kv_rank = config.q_lora_rank, config.kv_lora_rank
    matrices = rank * (d + queries) if rank else d * queries
    matrices += d * (kv_rank + config.qk_rope_dim) + kv_rank * (keys + values) + values * d
    matrices += d * values if config.output_gate else 0
    return Weights(matrices, rank + kv_rank)


def gqa_weights(config: GQAConfig, d: int) -> Weights:
    """One grouped-query attention layer."""
    return Weights(2 * d * (config.heads + config.kv_heads) * config.head_dim)


def moe_weights(config: MoEConfig, d: int) -> tuple[Weights, Weights]:
    """One mixture of experts: what every token uses, and one routed expert."""
    width = config.latent_width or d
    shared = 3 * d * config.expert_width * config.shared_experts
    common = Weights(shared + d * config.experts, config.experts)  # router, and its bias
    if config.latent_width:
        common += Weights(2 * d * width, width if config.latent_norm else 0)
    return common, Weights(3 * width * config.expert_width)


def layer_weights(config: ModelConfig, layer: int) -> tuple[Weights, Weights]:
    """Layer `layer`: what every token uses, and one routed expert (nothing in a dense layer)."""
    d = config.d_model
    if config.mixer_kinds()[layer] == "kda":
        used = kda_weights(config.kda, d)
    elif config.full_attention == "mla":
        used = mla_weights(config.mla, d)
    else:
        used = gqa_weights(config.gqa, d)
    used += Weights(0, 2 * d)
    if config.residual.kind != "plain":
        used += Weights(0, 4 * d)
    if not config.is_moe(layer):
        return used + Weights(3 * d * config.ffn.dense_width), Weights(0)
    common, expert = moe_weights(config.moe, d)
    return used + common, expert


def parameter_counts(config: ModelConfig) -> ParameterCounts:
    """Total and active parameters of a decoder."""
    table = config.vocab_size * config.d_model
    ends = config.d_model * (1 if config.residual.kind == "plain" else 3)
    layers = [layer_weights(config, layer) for layer in range(config.layers)]
    used = table + ends + sum(common.all for common, _ in layers)
    experts = sum(expert.all for _, expert in layers)
    return ParameterCounts(
        total=used + config.moe.experts * experts + (0 if config.tie_embeddings else table),
        active=used + config.moe.top_k * experts,
    )
