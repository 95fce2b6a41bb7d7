"""Small K3s with every idea in them: `nano` for two CPU cores, `mini` for one GPU."""

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


def nano() -> ExperimentConfig:
    """A byte-level K3 that learns Python's standard library on two CPU cores in minutes."""
    model = ModelConfig(
        vocab_size=257,
        d_model=128,
        layers=4,
        kda=KDAConfig(heads=4, key_dim=32, value_dim=32, decay_rank=32),
        mla=MLAConfig(
            heads=4, q_lora_rank=64, kv_lora_rank=32, qk_nope_dim=32, qk_rope_dim=16, value_dim=32
        ),
        residual=ResidualConfig("attn_res_block", block_size=2),
        ffn=FeedForwardConfig("situ", dense_width=512),
        moe=MoEConfig(experts=8, top_k=2, expert_width=128, shared_experts=1, latent_width=64),
        dtype="float32",
    )
    return ExperimentConfig(
        name="nano",
        model=model,
        data=DataConfig(sequence_length=256, batch_size=16),
        optimiser=OptimiserConfig("muon", learning_rate=4e-3),
        train=TrainConfig(steps=200, eval_every=100, checkpoint_every=100),
    )


def mini() -> ExperimentConfig:
    """The size of the ablation studies: 16 layers, so that every ratio up to 15:1 exists."""
    model = ModelConfig(
        vocab_size=257,
        d_model=384,
        layers=16,
        kda=KDAConfig(heads=4, key_dim=128, value_dim=128, decay_rank=128),
        mla=MLAConfig(
            heads=4,
            q_lora_rank=96,
            kv_lora_rank=96,
            qk_nope_dim=128,
            qk_rope_dim=64,
            value_dim=128,
        ),
        residual=ResidualConfig("attn_res_block", block_size=2),
        ffn=FeedForwardConfig("situ", dense_width=1792),
        moe=MoEConfig(experts=16, top_k=4, expert_width=160, shared_experts=1, latent_width=192),
    )
    return ExperimentConfig(
        name="mini",
        model=model,
        data=DataConfig(sequence_length=1024, batch_size=64, sources=("python:site-packages",)),
        optimiser=OptimiserConfig("muon", learning_rate=3e-3),
        train=TrainConfig(steps=1000, eval_every=200, checkpoint_every=200),
    )
