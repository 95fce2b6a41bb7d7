"""Kimi K3 at any size, from one dial: the number of layers.

Proportions are K3's own (K3R Table 1): heads of 128 whose total width is about 1.7 times the
model's, latent width a half, expert width 0.43, dense width 4.7, query rank 0.21 of it, about eight
blocks over depth, one expert in eight active. Width, rate, batch and horizon follow the scaling
ladder of AR Table 2, where heads equal layers.
"""

from k3jax.config import (
    DataConfig,
    ExperimentConfig,
    FeedForwardConfig,
    KDAConfig,
    MLAConfig,
    ModelConfig,
    MoEConfig,
    OptimiserConfig,
    ResidualConfig,
    TrainConfig,
)
from k3jax.cost import parameter_counts

_CONTEXT = 8192
_TOKENS_PER_ACTIVE = 200  # AR Table 2: 38.7B tokens for 194M active parameters


def _round(width: float, multiple: int) -> int:
    return max(multiple, multiple * round(width / multiple))


def k3_ladder(layers: int) -> ExperimentConfig:
    """The ladder's K3 of `layers` layers; raises `ValueError` below 4 (one 3:1 period)."""
    if layers < 4:
        raise ValueError(f"layers = {layers}: must be at least 4, one period of 3:1")
    d = _round(74.5 * layers, 16)
    model = ModelConfig(
        vocab_size=163_840,
        d_model=d,
        layers=layers,
        kda=KDAConfig(heads=layers, key_dim=128, value_dim=128, decay_rank=128),
        mla=MLAConfig(
            heads=layers,
            q_lora_rank=_round(d / 4.7, 16),
            kv_lora_rank=_round(d / 4, 16),
            qk_nope_dim=128,
            qk_rope_dim=64,
            value_dim=128,
        ),
        residual=ResidualConfig("attn_res_block", block_size=max(1, layers // 8)),
        ffn=FeedForwardConfig("situ", dense_width=_round(4.7 * d, 64)),
        moe=MoEConfig(
            experts=64,
            top_k=8,
            expert_width=_round(0.43 * d, 16),
            shared_experts=2,
            latent_width=d // 2,
        ),
        remat="full",
    )
    rows = _round(192 * (layers / 12) ** 2.33, 16)
    tokens = _TOKENS_PER_ACTIVE * parameter_counts(model).active
    return ExperimentConfig(
        name=f"k3_ladder_{layers}",
        model=model,
        data=DataConfig(sequence_length=_CONTEXT, batch_size=rows, tokenizer="tokenizer.json"),
        optimiser=OptimiserConfig("muon", learning_rate=2.99e-3 * (12 / layers) ** 1.1),
        train=TrainConfig(steps=tokens // (rows * _CONTEXT), checkpoint_every=500),
    )
