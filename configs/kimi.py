"""The released models, after their official `config.json`: Kimi K3 and Kimi-Linear-48B-A3B."""

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


def kimi_k3() -> ExperimentConfig:
    """Kimi K3: 93 layers, 2.78T parameters, 104B active (K3R Table 1)."""
    model = ModelConfig(
        vocab_size=163_840,
        d_model=7168,
        layers=93,
        kda_to_full="3:1",
        kda=KDAConfig(heads=96, key_dim=128, value_dim=128, decay_rank=128),
        mla=MLAConfig(
            heads=96,
            q_lora_rank=1536,
            kv_lora_rank=512,
            qk_nope_dim=128,
            qk_rope_dim=64,
            value_dim=128,
        ),
        residual=ResidualConfig("attn_res_block", block_size=12),
        ffn=FeedForwardConfig("situ", dense_width=33_792),
        moe=MoEConfig(
            experts=896, top_k=16, expert_width=3072, shared_experts=2, latent_width=3584
        ),
        remat="everything",
    )
    # Rows grow from 8K to 64K in pre-training (K3R §3), and in a cooldown, not among these stages,
    # to 256K and 1M. Peak rate, batch and horizon of K3 are not published: placeholders, for cost
    # studies; the later batch is that of Kimi K2, 67M tokens.
    return ExperimentConfig(
        name="kimi_k3",
        model=model,
        data=DataConfig(
            sequence_length=8192,
            batch_size=1024,
            stages=("80000:65536x1024",),
            tokenizer="tokenizer.json",
        ),
        optimiser=OptimiserConfig("muon", learning_rate=2e-4, schedule="cosine"),
        train=TrainConfig(steps=100_000, checkpoint_every=500),
    )


def kimi_linear() -> ExperimentConfig:
    """Kimi Linear: 27 layers, 49.1B parameters, 3.1B active; the 1.4T-token recipe (KLR §5)."""
    model = ModelConfig(
        vocab_size=163_840,
        d_model=2304,
        layers=27,
        kda_to_full="3:1",
        kda=KDAConfig(
            heads=32,
            key_dim=128,
            value_dim=128,
            decay_rank=128,
            gate_form="softplus",
            output_gate_rank=128,
        ),
        mla=MLAConfig(
            heads=32,
            kv_lora_rank=512,
            qk_nope_dim=128,
            qk_rope_dim=64,
            value_dim=128,
            output_gate=False,
        ),
        residual=ResidualConfig("plain"),
        ffn=FeedForwardConfig("swiglu", dense_width=9216),
        moe=MoEConfig(
            experts=256,
            top_k=8,
            expert_width=1024,
            shared_experts=1,
            scaling=2.446,
            balancing="sign",
        ),
        remat="full",
    )
    return ExperimentConfig(
        name="kimi_linear",
        model=model,
        data=DataConfig(sequence_length=4096, batch_size=8192, tokenizer="tokenizer.json"),
        # MuonClip (KLR §5): whole matrices.
        optimiser=OptimiserConfig(
            "muon", learning_rate=1.1e-3, schedule="wsd", muon_per_head=False
        ),
        train=TrainConfig(steps=41_700, checkpoint_every=500),
    )
