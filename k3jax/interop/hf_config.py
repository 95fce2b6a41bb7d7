"""An official `config.json` as a `ModelConfig`.

Reads the releases of Kimi K3 (`text_config` nested) and Kimi Linear. Layer lists in
`linear_attn_config` are 1-based. A setting this project does not implement is refused by name.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from k3jax.config import (
    DType,
    FeedForwardConfig,
    KDAConfig,
    MixerKind,
    MLAConfig,
    ModelConfig,
    MoEConfig,
    ResidualConfig,
)

# Settings with one value that this project implements; absent means the same.
_FIXED = {
    "mla_use_nope": True,
    "moe_layer_freq": 1,
    "num_expert_group": 1,
    "topk_group": 1,
    "moe_router_activation_func": "sigmoid",
    "rope_scaling": None,
    "quantization_config": None,
    "num_nextn_predict_layers": 0,
}
_WHOLE_NUMBERS = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "intermediate_size",
)
_ACTIVATIONS = {"silu": "swiglu", "situ": "situ"}


def model_config(directory: str | Path, dtype: DType = "float32") -> ModelConfig:
    """The `ModelConfig` of the checkpoint in `directory`, computing in `dtype`.

    Raises `ValueError`, naming the key, where a setting is missing or has an unsupported value.
    """
    path = Path(directory) / "config.json"
    try:
        raw = json.loads(path.read_text())
        text = raw.get("text_config", raw)
    except (OSError, ValueError, AttributeError) as error:
        raise ValueError(f"{path}: not a readable config.json ({error})") from error
    if text.get("model_type") != "kimi_linear":
        kind = text.get("model_type")
        raise ValueError(f"{path}: model_type = {kind!r}, must be kimi_linear (Kimi Linear or K3)")
    for key, only in _FIXED.items():
        if text.get(key, only) != only:
            raise ValueError(f"{path}: {key} = {text[key]!r}, only {only!r} is supported")
    for key in _WHOLE_NUMBERS:
        if not isinstance(text.get(key, 1), int):
            raise ValueError(f"{path}: {key} = {text[key]!r}, must be a whole number")
    try:
        return _model(text, dtype)
    except KeyError as error:
        raise ValueError(f"{path}: {error.args[0]} is missing") from error


def _model(text: dict[str, Any], dtype: DType) -> ModelConfig:
    heads, layers = text["num_attention_heads"], text["num_hidden_layers"]
    if (kv_heads := text.get("num_key_value_heads") or heads) != heads:
        raise ValueError(
            f"num_key_value_heads = {kv_heads}, must equal num_attention_heads = {heads}"
        )
    if text["hidden_act"] not in _ACTIVATIONS:
        raise ValueError(f"hidden_act = {text['hidden_act']!r}, must be one of silu, situ")
    block, linear = text.get("attn_res_block_size"), text.get("linear_attn_config")
    return ModelConfig(
        vocab_size=text["vocab_size"],
        d_model=text["hidden_size"],
        layers=layers,
        mixers=_mixers(linear, layers) if linear else ("full",) * layers,
        full_attention="mla",
        kda=_kda(linear) if linear else KDAConfig(),
        mla=MLAConfig(
            heads=heads,
            q_lora_rank=text.get("q_lora_rank") or 0,
            kv_lora_rank=text["kv_lora_rank"],
            qk_nope_dim=text["qk_nope_head_dim"],
            qk_rope_dim=text["qk_rope_head_dim"],
            value_dim=text["v_head_dim"],
            output_gate=text.get("mla_use_output_gate", False),
        ),
        residual=ResidualConfig("attn_res_block", block) if block else ResidualConfig("plain"),
        ffn=FeedForwardConfig(
            activation=_ACTIVATIONS[text["hidden_act"]],  # type: ignore[arg-type]
            situ_beta=text.get("activation_situ_beta") or 1.0,
            situ_linear_beta=text.get("activation_situ_linear_beta") or 0.0,
            dense_width=text["intermediate_size"],
        ),
        moe=_moe(text),
        norm_eps=text.get("rms_norm_eps") or 1e-6,
        init_std=text.get("initializer_range", 0.02),
        tie_embeddings=text.get("tie_word_embeddings", False),
        dtype=dtype,
    )


def _mixers(linear: dict[str, Any], layers: int) -> tuple[MixerKind, ...]:
    """The mixer of each layer; a list may also name layers that the model does not have."""
    full, kda = set(linear["full_attn_layers"]), set(linear["kda_layers"])
    for layer in range(1, layers + 1):
        if (layer in full) == (layer in kda):
            raise ValueError(
                f"linear_attn_config: layer {layer} (of 1..{layers}) must be in one of kda_layers "
                "and full_attn_layers"
            )
    return tuple("full" if layer in full else "kda" for layer in range(1, layers + 1))


def _kda(linear: dict[str, Any]) -> KDAConfig:
    width, bound = linear["head_dim"], linear.get("gate_lower_bound")
    return KDAConfig(
        heads=linear["num_heads"],
        key_dim=width,
        value_dim=width,
        conv_width=linear["short_conv_kernel_size"],
        gate_form="softplus" if bound is None else "bounded",
        lower_bound=-5.0 if bound is None else bound,
        decay_rank=width,
        output_gate_rank=0 if linear.get("use_full_rank_gate", False) else width,
    )


def _moe(text: dict[str, Any]) -> MoEConfig:
    if not text.get("num_experts"):
        return MoEConfig(experts=0)
    experts, top_k = text["num_experts"], text["num_experts_per_token"]
    latent_width = text.get("routed_expert_hidden_size") or 0
    return MoEConfig(
        experts=experts,
        top_k=top_k,
        expert_width=text["moe_intermediate_size"],
        shared_experts=text.get("num_shared_experts") or 0,
        latent_width=latent_width,
        latent_norm=text.get("latent_moe_use_norm", False),
        first_k_dense=text.get("first_k_dense_replace", 0),
        renormalise=text.get("moe_renormalize", True),
        scaling=text.get("routed_scaling_factor", 1.0),
        # K3's rule, where there is an expert left out to measure against; else Kimi Linear's.
        balancing="histogram" if latent_width and top_k < experts else "sign",
    )
