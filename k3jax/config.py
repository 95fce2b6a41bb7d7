"""Every setting of an experiment, as frozen dataclasses.

A configuration is data: it holds sizes, names and rates, builds nothing and imports nothing of
this project, so that cost models, flags, checkpoints and tests can all read it. Each class checks
its own values on construction; a wrong one raises `ValueError` with one line that names the
setting, its value and what is allowed.

Names follow the Kimi papers. Sources: KLR = Kimi Linear report (arXiv 2510.26692), K3R = Kimi K3
technical report (arXiv 2607.24653), AR = Attention Residuals (arXiv 2603.15031).
"""

from __future__ import annotations

import dataclasses
from typing import Literal, get_args

MixerRule = Literal["kda", "gated_delta", "delta", "linear"]
GateForm = Literal["softplus", "bounded"]
OutputGate = Literal["sigmoid", "swish", "none"]
FullAttention = Literal["mla", "gqa"]
MixerKind = Literal["kda", "full"]
Residual = Literal["plain", "attn_res_block", "attn_res_full"]
Activation = Literal["swiglu", "situ"]
Balancing = Literal["none", "sign", "quantile", "histogram"]
Remat = Literal["none", "dots", "full"]
DType = Literal["float32", "bfloat16", "float64"]
Schedule = Literal["cosine", "wsd"]
OptimiserRule = Literal["adamw", "muon"]


def _require(condition: bool, name: str, value: object, allowed: str) -> None:
    if not condition:
        raise ValueError(f"{name} = {value!r}: {allowed}")


def _positive(config: object, prefix: str, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        _require(value >= 1, f"{prefix}.{name}", value, "must be at least 1")


def _choices(config: object, prefix: str, **literals: object) -> None:
    for name, literal in literals.items():
        value, allowed = getattr(config, name), get_args(literal)
        _require(
            value in allowed, f"{prefix}.{name}", value, f"must be one of {', '.join(allowed)}"
        )


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
        _choices(self, "kda", rule=MixerRule, gate_form=GateForm, output_gate=OutputGate)
        _positive(self, "kda", "heads", "key_dim", "value_dim", "decay_rank")
        for name in ("key_dim", "value_dim"):
            _require(getattr(self, name) <= 256, f"kda.{name}", getattr(self, name), "at most 256")
        _require(self.conv_width >= 0, "kda.conv_width", self.conv_width, "must not be negative")
        _require(self.lower_bound < 0, "kda.lower_bound", self.lower_bound, "must be negative")
        rank = self.output_gate_rank
        _require(rank >= 0, "kda.output_gate_rank", rank, "must be 0 (full rank) or positive")


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
        _positive(self, "mla", "heads", "kv_lora_rank", "qk_nope_dim", "value_dim")
        for name in ("q_lora_rank", "qk_rope_dim"):
            _require(getattr(self, name) >= 0, f"mla.{name}", getattr(self, name), "must be >= 0")


@dataclasses.dataclass(frozen=True)
class GQAConfig:
    """Grouped-query attention, the plain alternative to MLA; with or without rotary positions."""

    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    rope: bool = False
    rope_theta: float = 10_000.0

    def __post_init__(self) -> None:
        _positive(self, "gqa", "heads", "kv_heads", "head_dim")
        _require(
            self.heads % self.kv_heads == 0,
            "gqa.kv_heads",
            self.kv_heads,
            f"must divide gqa.heads = {self.heads}",
        )
        _require(
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
        _choices(self, "residual", kind=Residual)
        _positive(self, "residual", "block_size")
        _require(
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
        _choices(self, "ffn", activation=Activation)
        _positive(self, "ffn", "dense_width")
        _require(self.situ_beta > 0, "ffn.situ_beta", self.situ_beta, "must be > 0")
        beta = self.situ_linear_beta
        _require(beta >= 0, "ffn.situ_linear_beta", beta, "must be 0 (linear) or positive")


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

    def __post_init__(self) -> None:
        _choices(self, "moe", balancing=Balancing)
        for name in ("experts", "shared_experts", "latent_width", "first_k_dense"):
            _require(getattr(self, name) >= 0, f"moe.{name}", getattr(self, name), "must be >= 0")
        if self.experts:
            _positive(self, "moe", "top_k", "expert_width", "bins")
            _require(
                self.top_k <= self.experts,
                "moe.top_k",
                self.top_k,
                f"must be at most moe.experts = {self.experts}",
            )
            _require(
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
    _require(
        ok and sum(numbers) > 0, "model.kda_to_full", ratio, "must read a:b, like 3:1, not 0:0"
    )
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
        _choices(
            self,
            "model",
            full_attention=FullAttention,
            dtype=DType,
            remat=Remat,
        )
        _positive(self, "model", "vocab_size", "d_model", "layers")
        _require(self.norm_eps > 0, "model.norm_eps", self.norm_eps, "must be > 0")
        _require(self.init_std >= 0, "model.init_std", self.init_std, "must not be negative")
        if self.mixers:
            _require(
                len(self.mixers) == self.layers,
                "model.mixers",
                self.mixers,
                f"must have one entry for each of the {self.layers} layers",
            )
            for kind in self.mixers:
                _require(kind in get_args(MixerKind), "model.mixers", kind, "must be kda or full")
            return
        a, b = parse_ratio(self.kda_to_full)
        _require(
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


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """Where tokens come from and how they are packed into rows.

    A source is `python:stdlib` (the source code of the running Python's standard library),
    `python:site-packages` (that of the installed packages), a text file, a folder of text files, or
    a `.jsonl` file whose `jsonl_field` holds the text.
    """

    sources: tuple[str, ...] = ("python:stdlib",)
    weights: tuple[float, ...] = ()  # one per source; empty: in proportion to their tokens
    tokenizer: str = (
        "bytes"  # or a local Hugging Face tokenizer.json, its folder, or a .tiktoken file
    )
    jsonl_field: str = "text"
    sequence_length: int = 256
    batch_size: int = 8  # rows per optimiser step, over all micro-batches
    validation_fraction: float = 0.05  # of documents, chosen by the hash of their text
    seed: int = 0

    def __post_init__(self) -> None:
        _positive(self, "data", "sequence_length", "batch_size")
        _require(
            len(self.sources) > 0, "data.sources", self.sources, "must name at least one source"
        )
        _require(
            len(self.weights) in (0, len(self.sources)),
            "data.weights",
            self.weights,
            f"must be empty or have one entry for each of the {len(self.sources)} sources",
        )
        _require(
            not self.weights or all(w > 0 for w in self.weights),
            "data.weights",
            self.weights,
            "must be positive",
        )
        _require(
            0 < self.validation_fraction < 1,
            "data.validation_fraction",
            self.validation_fraction,
            "must lie between 0 and 1",
        )


@dataclasses.dataclass(frozen=True)
class OptimiserConfig:
    """AdamW everywhere (`adamw`), or Muon for matrices and AdamW for the rest (`muon`)."""

    kind: OptimiserRule = "muon"
    learning_rate: float = 2e-3
    schedule: Schedule = "cosine"
    warmup_fraction: float = 0.01  # of all steps
    decay_fraction: float = 0.2  # of all steps, the last stretch of wsd
    final_fraction: float = 0.1  # of the peak rate, at the last step
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    muon_momentum: float = 0.95
    muon_per_head: bool = True  # one matrix per head of Q, K, V, gates and latents (K3R §2.5)
    qk_clip: float = 100.0  # largest attention logit, kept by scaling weights back; 0: no limit
    clip_norm: float = 1.0  # global gradient norm; 0 turns clipping off

    def __post_init__(self) -> None:
        _choices(self, "optimiser", kind=OptimiserRule, schedule=Schedule)
        _require(
            self.learning_rate > 0, "optimiser.learning_rate", self.learning_rate, "must be > 0"
        )
        for name in ("warmup_fraction", "decay_fraction", "final_fraction"):
            value = getattr(self, name)
            _require(0 <= value <= 1, f"optimiser.{name}", value, "must lie in [0, 1]")
        for name in ("beta1", "beta2", "muon_momentum"):
            value = getattr(self, name)
            _require(0 <= value < 1, f"optimiser.{name}", value, "must lie in [0, 1)")
        for name in ("weight_decay", "clip_norm", "qk_clip"):
            value = getattr(self, name)
            _require(value >= 0, f"optimiser.{name}", value, "must not be negative")
        _require(self.eps > 0, "optimiser.eps", self.eps, "must be > 0")


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """The loop: how long, how often, and what to keep."""

    steps: int = 300
    micro_batches: int = 1  # gradient accumulation
    seed: int = 0
    log_every: int = 10
    eval_every: int = 100  # 0: only after the last step
    eval_batches: int = 8
    checkpoint_every: int = 100
    keep: int = 3  # newest checkpoints kept
    keep_every: int = 0  # steps whose checkpoints are kept for good; 0: none
    sample_tokens: int = 200  # generated after the last step; 0: none
    tensorboard: bool = False
    profile_start: int = 0  # first step of the profiler's window
    profile_steps: int = 0  # its length; 0: no profile

    def __post_init__(self) -> None:
        _positive(
            self,
            "train",
            "steps",
            "micro_batches",
            "log_every",
            "eval_batches",
            "checkpoint_every",
            "keep",
        )
        for name in ("eval_every", "keep_every", "sample_tokens", "profile_start", "profile_steps"):
            value = getattr(self, name)
            _require(value >= 0, f"train.{name}", value, "must not be negative")
        _require(self.steps < 2**31, "train.steps", self.steps, "must be below 2^31")
        _require(0 <= self.seed < 2**32, "train.seed", self.seed, "must be in [0, 2^32)")


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """Devices along each mesh axis; their product is the number of devices used."""

    data: int = 1
    fsdp: int = 1
    expert: int = 1
    context: int = 1
    tensor: int = 1

    def __post_init__(self) -> None:
        _positive(self, "mesh", *(field.name for field in dataclasses.fields(self)))


@dataclasses.dataclass(frozen=True)
class ExperimentConfig:
    """One experiment: all that decides its numbers."""

    name: str = "nano"
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    optimiser: OptimiserConfig = OptimiserConfig()
    train: TrainConfig = TrainConfig()
    mesh: MeshConfig = MeshConfig()

    def __post_init__(self) -> None:
        rows, parts = self.data.batch_size, self.train.micro_batches
        _require(
            rows % parts == 0, "train.micro_batches", parts, f"must divide data.batch_size = {rows}"
        )
        shards = self.mesh.data * self.mesh.fsdp * self.mesh.expert
        _require(
            rows // parts % shards == 0,
            "data.batch_size",
            rows,
            f"the {rows // parts} rows of a micro-batch must divide by the {shards} of "
            "mesh.data x mesh.fsdp x mesh.expert",
        )
        length, context = self.data.sequence_length, self.mesh.context
        _require(
            length % context == 0,
            "data.sequence_length",
            length,
            f"must divide by mesh.context = {context}",
        )
