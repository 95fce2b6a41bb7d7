"""FLOPs of a token, from the configuration alone.

A multiply-add counts as two. Matrix products count their parameters; attention counts the causal
half of its scores; KDA counts the chunkwise form at chunk 64 (KLR eq. 13: `6 D^2 + 3 C D + C^2` per
head and token). Norms, gates and softmaxes are left out, as is usual for model FLOP/s.
"""

from __future__ import annotations

from k3jax.config import ModelConfig
from k3jax.cost.parameters import layer_weights

_CHUNK = 64
_TRAINING = 3  # forward, and twice that for the backward pass; recomputation is not counted


def forward_flops_per_token(config: ModelConfig, length: int) -> float:
    """FLOPs of one token's forward pass in a row of `length` tokens, averaged over the row."""
    total = 2.0 * config.d_model * config.vocab_size
    for layer, kind in enumerate(config.mixer_kinds()):
        common, expert = layer_weights(config, layer)
        total += 2 * (common.matrices + config.moe.top_k * expert.matrices)
        total += _kda(config) if kind == "kda" else _full(config, length)
    return total


def flops_per_token(config: ModelConfig, length: int) -> float:
    """FLOPs of training on one token: forward and backward, without recomputation."""
    return _TRAINING * forward_flops_per_token(config, length)


def _kda(config: ModelConfig) -> float:
    kda = config.kda
    keys, values = kda.key_dim, kda.value_dim
    recurrence = 6 * keys * values + _CHUNK * (2 * keys + values) + _CHUNK**2
    convolution = 2 * kda.conv_width * (2 * keys + values)
    return kda.heads * (recurrence + convolution)


def _full(config: ModelConfig, length: int) -> float:
    if config.full_attention == "mla":
        mla = config.mla
        return mla.heads * length * (mla.qk_nope_dim + mla.qk_rope_dim + mla.value_dim)
    return config.gqa.heads * length * 2 * config.gqa.head_dim
