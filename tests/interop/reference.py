"""The official models in NumPy float64, token by token, and random checkpoints for them.

`forward` reads the same `config.json` and tensors as the official code, and is written from the
papers' formulas alone: it shares nothing with the code under test. Equations: KLR §3, K3R §2.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

Tensors = dict[str, np.ndarray]  # by official name, linear weights [out, in]
GATED = ("gate_proj", "up_proj", "down_proj")
EXPERT = ("w1", "w3", "w2")


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def rms(x, gain, eps):
    return x / np.sqrt(np.mean(x * x, -1, keepdims=True) + eps) * gain


def forward(text: dict, tensors: Tensors, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Logits `[T, vocab]` and the running sum after each layer `[L, T, d]` of one document."""
    eps, block = text["rms_norm_eps"], text.get("attn_res_block_size")
    kda_layers = (text["linear_attn_config"] or {"kda_layers": []})["kda_layers"]
    run, blocks, hidden = tensors["model.embed_tokens.weight"][tokens], [], []

    def mix(name):
        sources = np.stack([*blocks, run])
        query = tensors[f"{name}_norm.weight"] * tensors[f"{name}_proj.weight"][0]
        weights = np.exp((rms(sources, 1, eps) * query).sum(-1))
        return (weights[..., None] * sources).sum(0) / weights.sum(0)[..., None]

    for layer in range(text["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        own = {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
        h = mix(f"{prefix}self_attention_res") if blocks else run
        if block and layer % block == 0:
            blocks.append(run)
            run = 0
        mixer = kda if layer + 1 in kda_layers else mla
        run = run + mixer(text, own, rms(h, own["input_layernorm.weight"], eps))
        h = mix(f"{prefix}mlp_res") if block else run
        h = rms(h, own["post_attention_layernorm.weight"], eps)
        moe = "block_sparse_moe.gate.weight" in own
        run = run + (experts(text, own, h) if moe else mlp(text, own, h, "mlp", GATED))
        hidden.append(run)
    h = rms(mix("model.output_attn_res") if block else run, tensors["model.norm.weight"], eps)
    head = "model.embed_tokens" if text["tie_word_embeddings"] else "lm_head"
    return h @ tensors[f"{head}.weight"].T, np.stack(hidden)


def kda(text, w, x):
    """Kimi Delta Attention, one token at a time."""
    c = text["linear_attn_config"]
    heads, dim, width = c["num_heads"], c["head_dim"], c["short_conv_kernel_size"]

    def linear(*names):
        y = x
        for name in names:
            y = y @ w[f"self_attn.{name}_proj.weight"].T
        return y.reshape(len(x), heads, -1)

    def stream(name):
        y = np.pad(linear(name).reshape(len(x), -1), ((width - 1, 0), (0, 0)))
        taps = w[f"self_attn.{name}_conv1d.weight"][:, 0]
        y = sum(taps[:, j] * y[j : j + len(x)] for j in range(width))
        return (y * sigmoid(y)).reshape(len(x), heads, dim)

    q, k, v = map(stream, "qkv")
    q, k = (a / np.sqrt((a * a).sum(-1, keepdims=True) + 1e-6) for a in (q, k))
    z = linear("f_a", "f_b") + w["self_attn.dt_bias"].reshape(heads, dim)
    a = np.exp(w["self_attn.A_log"].reshape(-1)[:heads, None])
    bound = c.get("gate_lower_bound")
    g = -a * np.logaddexp(z, 0) if bound is None else bound * sigmoid(a * z)
    beta = sigmoid(linear("b"))
    state, out = np.zeros((heads, dim, dim)), []
    for t in range(len(x)):
        state = np.exp(g[t])[..., None] * state
        u = beta[t] * (v[t] - np.einsum("hkv,hk->hv", state, k[t]))
        state = state + k[t][..., None] * u[:, None]
        out.append(np.einsum("hkv,hk->hv", state, q[t] * dim**-0.5))
    gate = linear("g") if c.get("use_full_rank_gate") else linear("g_a", "g_b")
    o = rms(np.stack(out), w["self_attn.o_norm.weight"], text["rms_norm_eps"]) * sigmoid(gate)
    return o.reshape(len(x), -1) @ w["self_attn.o_proj.weight"].T


def mla(text, w, x):
    """Multi-head latent attention, expanded."""
    w = {name.removeprefix("self_attn."): tensor for name, tensor in w.items()}
    heads, nope, rank = (
        text[k] for k in ("num_attention_heads", "qk_nope_head_dim", "kv_lora_rank")
    )
    if text["q_lora_rank"]:
        low = rms(x @ w["q_a_proj.weight"].T, w["q_a_layernorm.weight"], 1e-6)
        q = low @ w["q_b_proj.weight"].T
    else:
        q = x @ w["q_proj.weight"].T
    q = q.reshape(len(x), heads, -1)
    latent, shared = np.split(x @ w["kv_a_proj_with_mqa.weight"].T, [rank], -1)
    kv = rms(latent, w["kv_a_layernorm.weight"], 1e-6) @ w["kv_b_proj.weight"].T
    k, v = np.split(kv.reshape(len(x), heads, -1), [nope], -1)
    k = np.concatenate([k, np.repeat(shared[:, None], heads, 1)], -1)
    logits = np.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5
    p = np.exp(logits) * np.tril(np.ones((len(x), len(x))))
    o = np.einsum("hqk,khv->qhv", p / p.sum(-1, keepdims=True), v).reshape(len(x), -1)
    if text.get("mla_use_output_gate"):
        o = o * sigmoid(x @ w["g_proj.weight"].T)
    return o @ w["o_proj.weight"].T


def mlp(text, w, x, prefix, names):
    a, b = (x @ w[f"{prefix}.{name}.weight"].T for name in names[:2])
    if text["hidden_act"] == "silu":
        hidden = a * sigmoid(a) * b
    else:
        beta, linear_beta = text["activation_situ_beta"], text["activation_situ_linear_beta"]
        up = linear_beta * np.tanh(b / linear_beta) if linear_beta else b
        hidden = beta * np.tanh(a / beta) * sigmoid(a) * up
    return hidden @ w[f"{prefix}.{names[2]}.weight"].T


def experts(text, w, x):
    """Routed experts, at latent width where there is one, and the shared one."""
    w = {name.removeprefix("block_sparse_moe."): tensor for name, tensor in w.items()}
    scores, k = sigmoid(x @ w["gate.weight"].T), text["num_experts_per_token"]
    chosen = np.argsort(-(scores + w["gate.e_score_correction_bias"]), -1, kind="stable")[:, :k]
    weights = np.zeros_like(scores)
    np.put_along_axis(weights, chosen, np.take_along_axis(scores, chosen, -1), -1)
    if k > 1 and text["moe_renormalize"]:
        weights = weights / weights.sum(-1, keepdims=True)
    weights = weights * text["routed_scaling_factor"]
    latent = text.get("routed_expert_hidden_size")
    z = x @ w["routed_expert_down_proj.weight"].T if latent else x
    y = sum(
        weights[:, e, None] * mlp(text, w, z, f"experts.{e}", EXPERT) for e in range(len(weights.T))
    )
    if latent and text["latent_moe_use_norm"]:
        y = rms(y, w["routed_expert_norm.weight"], text["rms_norm_eps"])
    if latent:
        y = y @ w["routed_expert_up_proj.weight"].T
    if text["num_shared_experts"]:
        y = y + mlp(text, w, x, "shared_experts", GATED)
    return y


def random_config(rng: np.random.Generator) -> dict:
    """A small text config of either model, every switch drawn."""

    def pick(*values):
        return values[rng.integers(len(values))]

    layers = int(rng.integers(1, 5))
    is_kda = rng.random(layers) < 0.6
    numbers = np.arange(1, layers + 1)
    k3, num_experts = bool(rng.integers(2)), int(rng.integers(1, 6))
    linear = {
        "num_heads": pick(1, 2, 3),
        "head_dim": pick(4, 6),
        "short_conv_kernel_size": pick(1, 2, 3, 4),
        "kda_layers": numbers[is_kda].tolist(),
        "full_attn_layers": numbers[~is_kda].tolist(),
        "gate_lower_bound": pick(None, -5.0, -2.0),
        "use_full_rank_gate": pick(False, True),
    }
    latent = {"routed_expert_hidden_size": pick(6, 8), "latent_moe_use_norm": pick(False, True)}
    return {
        "model_type": "kimi_linear",
        "vocab_size": 23,
        "hidden_size": pick(8, 12),
        "num_hidden_layers": layers,
        "intermediate_size": pick(7, 10),
        "num_attention_heads": pick(1, 2),
        "q_lora_rank": pick(None, 5),
        "kv_lora_rank": pick(3, 6),
        "qk_nope_head_dim": pick(2, 4),
        "qk_rope_head_dim": pick(2, 3),
        "v_head_dim": pick(2, 5),
        "mla_use_output_gate": pick(False, True),
        "hidden_act": pick("silu", "situ"),
        "activation_situ_beta": pick(1.0, 4.0),
        "activation_situ_linear_beta": pick(None, 25.0),
        "attn_res_block_size": pick(1, 2, 3, 7) if k3 else None,
        "first_k_dense_replace": pick(0, 1, 2),
        "num_experts": pick(None, num_experts, num_experts),
        "num_experts_per_token": int(rng.integers(1, num_experts + 1)),
        "num_shared_experts": pick(None, 0, 1, 2),
        "moe_intermediate_size": pick(3, 5),
        "moe_renormalize": pick(False, True),
        "routed_scaling_factor": pick(1.0, 2.446),
        "rms_norm_eps": pick(1e-5, 1e-3),
        "tie_word_embeddings": pick(False, True),
        "linear_attn_config": linear if is_kda.any() else pick(linear, None),
        **(latent if k3 else {}),
    }


def random_tensors(text: dict, rng: np.random.Generator) -> Tensors:
    """Random weights of `text`, in float32, with the official names and shapes."""
    tensors: Tensors = {}

    def gain(name, width):
        tensors[f"{name}.weight"] = rng.normal(1, 0.3, width)

    def matrix(name, outer, inner):
        tensors[f"{name}.weight"] = rng.normal(0, 1.3, (outer, inner)) / np.sqrt(inner)

    def gated(prefix, width, hidden, names):
        for name in names[:2]:
            matrix(f"{prefix}.{name}", hidden, width)
        matrix(f"{prefix}.{names[2]}", width, max(hidden, 1))
        tensors[f"{prefix}.{names[2]}.weight"] = tensors[f"{prefix}.{names[2]}.weight"][:, :hidden]

    d, block = text["hidden_size"], text["attn_res_block_size"]
    linear = text["linear_attn_config"] or {"kda_layers": []}
    matrix("model.embed_tokens", text["vocab_size"], d)
    if not text["tie_word_embeddings"]:
        matrix("lm_head", text["vocab_size"], d)
    gain("model.norm", d)
    if block:
        gain("model.output_attn_res_norm", d)
        matrix("model.output_attn_res_proj", 1, d)
    for layer in range(text["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        gain(f"{prefix}.input_layernorm", d)
        gain(f"{prefix}.post_attention_layernorm", d)
        for name in ("self_attention_res", "mlp_res") if block else ():
            gain(f"{prefix}.{name}_norm", d)
            matrix(f"{prefix}.{name}_proj", 1, d)
        mixer = _kda_tensors if layer + 1 in linear["kda_layers"] else _mla_tensors
        mixer(text, f"{prefix}.self_attn", tensors, gain, matrix, rng)
        if text["num_experts"] is None or layer < text["first_k_dense_replace"]:
            gated(f"{prefix}.mlp", d, text["intermediate_size"], GATED)
            continue
        moe, hidden = f"{prefix}.block_sparse_moe", text["moe_intermediate_size"]
        matrix(f"{moe}.gate", text["num_experts"], d)
        bias = rng.normal(0, 0.3, text["num_experts"])
        tensors[f"{moe}.gate.e_score_correction_bias"] = bias
        latent = text.get("routed_expert_hidden_size")
        for expert in range(text["num_experts"]):
            gated(f"{moe}.experts.{expert}", latent or d, hidden, EXPERT)
        if text["num_shared_experts"] is not None:  # the official code saves empty ones for 0
            gated(f"{moe}.shared_experts", d, hidden * text["num_shared_experts"], GATED)
        if latent:
            matrix(f"{moe}.routed_expert_down_proj", latent, d)
            matrix(f"{moe}.routed_expert_up_proj", d, latent)
            if text["latent_moe_use_norm"]:
                gain(f"{moe}.routed_expert_norm", latent)
    return {name: np.ascontiguousarray(t, np.float32) for name, t in tensors.items()}


def _kda_tensors(text, prefix, tensors: Tensors, gain: Callable, matrix: Callable, rng):
    c, d = text["linear_attn_config"], text["hidden_size"]
    heads, dim, width = c["num_heads"], c["head_dim"], c["short_conv_kernel_size"]
    for stream in "qkv":
        matrix(f"{prefix}.{stream}_proj", heads * dim, d)
        tensors[f"{prefix}.{stream}_conv1d.weight"] = rng.normal(0, 0.6, (heads * dim, 1, width))
    low_rank = ("f",) if c["use_full_rank_gate"] else ("f", "g")
    for name in low_rank:
        matrix(f"{prefix}.{name}_a_proj", dim, d)
        matrix(f"{prefix}.{name}_b_proj", heads * dim, dim)
    if c["use_full_rank_gate"]:
        matrix(f"{prefix}.g_proj", heads * dim, d)
    padding = rng.normal(0, 1e6, 2 * rng.integers(2))  # garbage behind the live heads
    a_log = np.concatenate([rng.normal(0, 0.5, heads), padding])
    tensors[f"{prefix}.A_log"] = a_log.reshape((1, 1, -1, 1) if rng.integers(2) else -1)
    tensors[f"{prefix}.dt_bias"] = rng.normal(-1, 1, heads * dim)
    matrix(f"{prefix}.b_proj", heads, d)
    gain(f"{prefix}.o_norm", dim)
    matrix(f"{prefix}.o_proj", d, heads * dim)


def _mla_tensors(text, prefix, tensors: Tensors, gain: Callable, matrix: Callable, rng):
    heads, d, rank, low = (
        text[k] for k in ("num_attention_heads", "hidden_size", "kv_lora_rank", "q_lora_rank")
    )
    nope, rope, value = (text[k] for k in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    if low:
        matrix(f"{prefix}.q_a_proj", low, d)
        gain(f"{prefix}.q_a_layernorm", low)
    matrix(f"{prefix}.{'q_b_proj' if low else 'q_proj'}", heads * (nope + rope), low or d)
    matrix(f"{prefix}.kv_a_proj_with_mqa", rank + rope, d)
    gain(f"{prefix}.kv_a_layernorm", rank)
    matrix(f"{prefix}.kv_b_proj", heads * (nope + value), rank)
    if text["mla_use_output_gate"]:
        matrix(f"{prefix}.g_proj", heads * value, d)
    matrix(f"{prefix}.o_proj", d, heads * value)


def write(directory: Path, text: dict, tensors: Tensors, *, nested: bool, shards: int) -> None:
    """A checkpoint as the releases are: K3's nested config and prefix, or Kimi Linear's."""
    raw = {"model_type": "kimi_k3", "text_config": text} if nested else text
    (directory / "config.json").write_text(json.dumps(raw))
    prefix, names, where = "language_model." if nested else "", sorted(tensors), {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = {prefix + name: tensors[name] for name in names[shard::shards]}
        save_file(part, directory / file)
        where |= dict.fromkeys(part, file)
    if shards > 1:
        index = {"metadata": {}, "weight_map": where}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index))
