"""Two models of one size on one GPU: Kimi Linear, and the same with all five ideas of K3.

Total and active parameters of the pair agree within 3 % (a test holds that), so that a comparison
is one of architectures.
"""

import dataclasses

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


def kimi_linear_1b() -> ExperimentConfig:
    """Kimi Linear's parts at width 1024: softplus gate, low-rank output gate, plain residual."""
    model = ModelConfig(
        vocab_size=128_256,
        d_model=1024,
        layers=16,
        kda_to_full="3:1",
        kda=KDAConfig(
            heads=16,
            key_dim=128,
            value_dim=128,
            decay_rank=128,
            gate_form="softplus",
            output_gate_rank=128,
        ),
        mla=MLAConfig(
            heads=16,
            kv_lora_rank=512,
            qk_nope_dim=128,
            qk_rope_dim=64,
            value_dim=128,
            output_gate=False,
        ),
        residual=ResidualConfig("plain"),
        ffn=FeedForwardConfig("swiglu", dense_width=4096),
        moe=MoEConfig(
            experts=32,
            top_k=8,
            expert_width=512,
            shared_experts=1,
            scaling=2.446,
            balancing="sign",
        ),
        remat="full",
    )
    return ExperimentConfig(
        name="kimi_linear_1b",
        model=model,
        data=DataConfig(sequence_length=4096, batch_size=64, tokenizer="tokenizer.json"),
        optimiser=OptimiserConfig("muon", learning_rate=2e-3, schedule="wsd"),
        train=TrainConfig(steps=20_000, micro_batches=16, checkpoint_every=500),
    )


def k3_1b() -> ExperimentConfig:
    """The five ideas of K3 in the same budget.

    Experts of half the width cost half, so there are twice as many and more of them are active
    (LatentMoE's trade); what full-rank gates and latent projections add is taken from their width.
    """
    base = kimi_linear_1b()
    model = dataclasses.replace(
        base.model,
        kda=KDAConfig(heads=16, key_dim=128, value_dim=128, decay_rank=128),
        mla=MLAConfig(
            heads=16,
            q_lora_rank=256,
            kv_lora_rank=512,
            qk_nope_dim=128,
            qk_rope_dim=64,
            value_dim=128,
        ),
        residual=ResidualConfig("attn_res_block", block_size=2),
        ffn=FeedForwardConfig("situ", dense_width=4096),
        moe=MoEConfig(experts=64, top_k=14, expert_width=480, shared_experts=1, latent_width=512),
    )
    optimiser = dataclasses.replace(base.optimiser, schedule="cosine")
    return dataclasses.replace(base, name="k3_1b", model=model, optimiser=optimiser)
