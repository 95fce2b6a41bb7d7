"""Two models of one size on one GPU: Kimi Linear, and the same with all five ideas of K3.

Total and active parameters of the pair agree within 3 % (a test holds that), so that a comparison
is one of architectures.
"""

import dataclasses

from configs.kimi import kimi_k3, kimi_linear
from k3jax.config import (
    DataConfig,
    ExperimentConfig,
    ModelConfig,
    OptimiserConfig,
    ResidualConfig,
    Schedule,
    TrainConfig,
)

_SHAPE = {"vocab_size": 128_256, "d_model": 1024, "layers": 16}
_DENSE_WIDTH = 4096


def _experiment(name: str, model: ModelConfig, schedule: Schedule) -> ExperimentConfig:
    return ExperimentConfig(
        name=name,
        model=model,
        data=DataConfig(sequence_length=4096, batch_size=64, tokenizer="tokenizer.json"),
        optimiser=OptimiserConfig("muon", learning_rate=2e-3, schedule=schedule),
        train=TrainConfig(steps=20_000, micro_batches=16, checkpoint_every=500),
    )


def kimi_linear_1b() -> ExperimentConfig:
    """Kimi Linear's parts at width 1024: softplus gate, low-rank output gate, plain residual."""
    base = kimi_linear().model
    model = dataclasses.replace(
        base,
        **_SHAPE,
        kda=dataclasses.replace(base.kda, heads=16),
        mla=dataclasses.replace(base.mla, heads=16),
        ffn=dataclasses.replace(base.ffn, dense_width=_DENSE_WIDTH),
        moe=dataclasses.replace(base.moe, experts=32, expert_width=512),
    )
    return _experiment("kimi_linear_1b", model, "wsd")


def k3_1b() -> ExperimentConfig:
    """The five ideas of K3 in the same budget.

    Experts of half the width cost half, so there are twice as many and more of them are active
    (LatentMoE's trade); what full-rank gates and latent projections add is taken from their width.
    """
    base = kimi_k3().model
    model = dataclasses.replace(
        base,
        **_SHAPE,
        kda=dataclasses.replace(base.kda, heads=16),
        mla=dataclasses.replace(base.mla, heads=16, q_lora_rank=256),
        residual=ResidualConfig("attn_res_block", block_size=2),
        ffn=dataclasses.replace(base.ffn, dense_width=_DENSE_WIDTH),
        moe=dataclasses.replace(
            base.moe, experts=64, top_k=14, expert_width=480, shared_experts=1, latent_width=512
        ),
    )
    return _experiment("k3_1b", model, "cosine")
