"""Settings of the decoder: mixers, residuals, feed-forward layers, experts.

Names follow the Kimi papers. Sources: KLR = Kimi Linear report (arXiv 2510.26692), K3R = Kimi K3
technical report (arXiv 2607.24653), AR = Attention Residuals (arXiv 2603.15031).
"""

from __future__ import annotations

import dataclasses
import math
from typing import Literal, get_args

from k3jax.config.checks import choices, positive, require

MixerRule = Literal["kda", "gated_delta", "delta", "linear"]
GateForm = Literal["softplus", "bounded"]
OutputGate = Literal["sigmoid", "swish", "none"]
FullAttention = Literal["mla", "gqa"]
MixerKind = Literal["kda", "full"]
Residual = Literal["plain", "attn_res_block", "attn_res_full"]
Activation = Literal["swiglu", "situ"]
Balancing = Literal["none", "sign", "quantile", "histogram"]
Transport = Literal["auto", "local", "ring", "padded", "ragged"]
Remat = Literal["none", "dots", "full", "everything"]  # `k3jax.layers.block` says what each keeps
DType = Literal["float32", "bfloat16", "float64"]


@dataclasses.dataclass(frozen=True)
class KDAConfig:
    """Kimi Delta Attention (KLR §3, K3R §2.1) and the mixers it descends from.

    `rule` walks the lineage: `linear` (plain linear attention), `delta` (DeltaNet), `gated_delta`
    (one scalar decay per head), `kda` (one decay per key channel).
    """

    rule: MixerRule = "kda"
    heads: int = 4
    key_dim: int = 32
    value_dim: int = 32
    conv_width: int = 4  # taps of the causal depthwise convolution on q, k and v; 0 leaves it out
    gate_form: GateForm = "bounded"
    lower_bound: float = -5.0  # of the bounded gate, nats per token
    decay_rank: int = 32  # of the projection to the decay gate; the head width in both models
    output_gate: OutputGate = "sigmoid"
    output_gate_rank: int = 0  # 0: full rank (K3); Kimi Linear has the head width

    def __post_init__(self) -> None:
        choices(self, "kda", rule=MixerRule, gate_form=GateForm, output_gate=OutputGate)
        positive(self, "kda", "heads", "key_dim", "value_dim", "decay_rank")
        for name in ("key_dim", "value_dim"):
            require(getattr(self, name) <= 256, f"kda.{name}", getattr(self, name), "at most 256")
        require(self.conv_width >= 0, "kda.conv_width", self.conv_width, "must not be negative")
        require(self.lower_bound < 0, "kda.lower_bound", self.lower_bound, "must be negative")
        rank = self.output_gate_rank
        require(rank >= 0, "kda.output_gate_rank", rank, "must be 0 (full rank) or positive")


@dataclasses.dataclass(frozen=True)
class MLAConfig:
    """Multi-head latent attention without rotation (NoPE); K3R eq. 7, KLR §4."""

    heads: int = 4
    q_lora_rank: int = 0  # 0: one plain query projection (Kimi Linear)
    kv_lora_rank: int = 64
    qk_nope_dim: int = 32
    qk_rope_dim: int = (
        16  # the "rope" part of the official code: shared by all heads, never rotated
    )
    value_dim: int = 32
    output_gate: bool = True
    lora_norm_eps: float = 1e-6  # the official class default, whatever norm_eps says

    def __post_init__(self) -> None:
        positive(self, "mla", "heads", "kv_lora_rank", "qk_nope_dim", "value_dim")
        for name in ("q_lora_rank", "qk_rope_dim"):
            require(getattr(self, name) >= 0, f"mla.{name}", getattr(self, name), "must be >= 0")


@dataclasses.dataclass(frozen=True)
class GQAConfig:
    """Grouped-query attention, the plain alternative to MLA; with or without rotary positions."""

    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    rope: bool = False
    rope_theta: float = 10_000.0

    def __post_init__(self) -> None:
        positive(self, "gqa", "heads", "kv_heads", "head_dim")
        require(
            self.heads % self.kv_heads == 0,
            "gqa.kv_heads",
            self.kv_heads,
            f"must divide gqa.heads = {self.heads}",
        )
        require(
            not self.rope or self.head_dim % 2 == 0,
            "gqa.head_dim",
            self.head_dim,
            "must be even where gqa.rope is on",
        )


@dataclasses.dataclass(frozen=True)
class ResidualConfig:
    """How sublayers read what came before: by addition, or by attention over depth (AR, K3R §2.2).

    `block_size` counts transformer layers (two sublayers each), as the K3 config does; AR counts
    sublayers. `two_phase` evaluates the same mix block by block (AR Alg. 1), exactly.
    """

    kind: Residual = "attn_res_block"
    block_size: int = 12
    two_phase: bool = False

    def __post_init__(self) -> None:
        choices(self, "residual", kind=Residual)
        positive(self, "residual", "block_size")
        require(
            not self.two_phase or self.kind == "attn_res_block",
            "residual.two_phase",
            True,
            "needs residual.kind = attn_res_block",
        )


@dataclasses.dataclass(frozen=True)
class FeedForwardConfig:
    """Gated feed-forward layers: `swiglu`, or the saturating `situ` (K3R eq. 12)."""

    activation: Activation = "situ"
    situ_beta: float = 4.0
    situ_linear_beta: float = 25.0  # 0: the up branch is linear
    dense_width: int = 512  # of the dense layers

    def __post_init__(self) -> None:
        choices(self, "ffn", activation=Activation)
        positive(self, "ffn", "dense_width")
        require(self.situ_beta > 0, "ffn.situ_beta", self.situ_beta, "must be > 0")
        beta = self.situ_linear_beta
        require(beta >= 0, "ffn.situ_linear_beta", beta, "must be 0 (linear) or positive")


@dataclasses.dataclass(frozen=True)
class MoEConfig:
    """Mixture of experts (K3R §2.3): routed at full or latent width, beside shared experts.

    `experts = 0` makes every layer dense.
    """

    experts: int = 8
    top_k: int = 2
    expert_width: int = 64
    shared_experts: int = 1
    latent_width: int = 0  # 0: experts work at the full model width (Kimi Linear)
    latent_norm: bool = True  # RMS norm between combination and up-projection
    first_k_dense: int = 1  # leading layers with a dense feed-forward
    renormalise: bool = True
    scaling: float = 1.0
    balancing: Balancing = "histogram"
    sign_rate: float = 1e-3  # step of the sign rule
    bins: int = 1000  # of the quantile histogram
    transport: Transport = "auto"  # of tokens to experts on other devices; auto: fewest bytes
    buffer_factor: float = 2.0  # room to receive, over a balanced load; 0: for any (few tokens)
    allow_drops: bool = False  # train on where that was too little, in place of an error

    def __post_init__(self) -> None:
        choices(self, "moe", balancing=Balancing, transport=Transport)
        factor = self.buffer_factor
        require(
            factor == 0 or 1 <= factor < math.inf,
            "moe.buffer_factor",
            factor,
            "must be at least 1, or 0 for any load",
        )
        for name in ("experts", "shared_experts", "latent_width", "first_k_dense"):
            require(getattr(self, name) >= 0, f"moe.{name}", getattr(self, name), "must be >= 0")
        if self.experts:
            positive(self, "moe", "top_k", "expert_width", "bins")
            require(
                self.top_k <= self.experts,
                "moe.top_k",
                self.top_k,
                f"must be at most moe.experts = {self.experts}",
            )
            require(
                self.top_k < self.experts or self.balancing in ("none", "sign"),
                "moe.top_k",
                self.top_k,
                f"quantile balancing needs an expert left out: below moe.experts = {self.experts}",
            )


def parse_ratio(ratio: str) -> tuple[int, int]:
    """`"3:1"` -> `(3, 1)`: KDA layers to full-attention layers in one period."""
    parts = ratio.split(":")
    ok = len(parts) == 2 and all(part.strip().isdecimal() for part in parts)
    numbers = tuple(int(part) for part in parts) if ok else (0, 0)
    require(ok and sum(numbers) > 0, "model.kda_to_full", ratio, "must read a:b, like 3:1, not 0:0")
    return numbers[0], numbers[1]


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """The decoder. Every part of Kimi K3 and Kimi Linear is a switch of it."""

    vocab_size: int = 256
    d_model: int = 128
    layers: int = 4
    kda_to_full: str = "3:1"
    mixers: tuple[
        MixerKind, ...
    ] = ()  # an explicit list, one entry per layer, in place of the ratio
    full_attention: FullAttention = "mla"
    kda: KDAConfig = KDAConfig()
    mla: MLAConfig = MLAConfig()
    gqa: GQAConfig = GQAConfig()
    residual: ResidualConfig = ResidualConfig()
    ffn: FeedForwardConfig = FeedForwardConfig()
    moe: MoEConfig = MoEConfig()
    norm_eps: float = 1e-5
    init_std: float = 0.02
    tie_embeddings: bool = False
    dtype: DType = "bfloat16"  # of activations; parameters are float32
    remat: Remat = "none"  # what the backward pass recomputes, per layer
    unroll: bool = False  # unroll the scan over equal super-blocks (tests)

    def __post_init__(self) -> None:
        choices(
            self,
            "model",
            full_attention=FullAttention,
            dtype=DType,
            remat=Remat,
        )
        positive(self, "model", "vocab_size", "d_model", "layers")
        require(self.norm_eps > 0, "model.norm_eps", self.norm_eps, "must be > 0")
        require(self.init_std >= 0, "model.init_std", self.init_std, "must not be negative")
        if self.mixers:
            require(
                len(self.mixers) == self.layers,
                "model.mixers",
                self.mixers,
                f"must have one entry for each of the {self.layers} layers",
            )
            for kind in self.mixers:
                require(kind in get_args(MixerKind), "model.mixers", kind, "must be kda or full")
            return
        a, b = parse_ratio(self.kda_to_full)
        require(
            self.layers >= a + b or 0 in (a, b),
            "model.kda_to_full",
            self.kda_to_full,
            f"needs at least {a + b} layers, model.layers = {self.layers}",
        )

    def mixer_kinds(self) -> tuple[MixerKind, ...]:
        """The mixer of each layer. Ratio a:b: layer i is full iff i mod (a+b) >= a or it is last.

        The last layer is always full (K3R §2.1: the 3:1 pattern ends in an extra MLA layer), unless
        b = 0.
        """
        if self.mixers:
            return self.mixers
        a, b = parse_ratio(self.kda_to_full)
        return tuple(
            "full" if b > 0 and (i % (a + b) >= a or i == self.layers - 1) else "kda"
            for i in range(self.layers)
        )

    def is_moe(self, layer: int) -> bool:
        """Whether layer `layer` (0-based) has routed experts."""
        return self.moe.experts > 0 and layer >= self.moe.first_k_dense
