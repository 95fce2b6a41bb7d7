"""A mixture of experts without routes: every expert on every token, combined by a one-hot mask."""

import jax
import jax.numpy as jnp

from k3jax.layers.ffn import activation


def dense_experts(state, x, real, config, kept=1.0):
    """What `LatentMoE` of the same `state` computes of `x [B, T, d]`, of which `real [B, T]` count.

    Routes for which `kept [B, T, experts]` is zero are lost on the way: they weigh nothing.
    """
    p = lambda name: state[name][...]  # noqa: E731
    moe, act = config.moe, activation(config.ffn)
    router = state["router"]
    scores = jax.nn.sigmoid(x @ router["kernel"][...])
    order = jnp.argsort(-(scores + router["bias"][...]), axis=-1, stable=True)[..., : moe.top_k]
    mask = jax.nn.one_hot(jax.lax.stop_gradient(order), moe.experts, dtype=x.dtype).sum(-2)
    weights = scores * mask
    if moe.renormalise and moe.top_k > 1:
        weights = weights / weights.sum(-1, keepdims=True)
    weights = weights * moe.scaling * kept
    z = x @ p("down") if moe.latent_width else x
    hidden = act(
        jnp.einsum("btl,elm->btem", z, p("expert_gate")),
        jnp.einsum("btl,elm->btem", z, p("expert_up")),
    )
    y = jnp.einsum("btem,eml,bte->btl", hidden, p("expert_down"), weights)
    if moe.latent_width:
        if moe.latent_norm:
            y = y / jnp.sqrt(jnp.mean(y * y, -1, keepdims=True) + config.norm_eps) * p("norm")
        y = y @ p("up")
    if moe.shared_experts:
        shared = {name: state["shared"][name][...] for name in ("gate", "up", "down")}
        y = y + act(x @ shared["gate"], x @ shared["up"]) @ shared["down"]
    return jnp.where(real[..., None], y, 0)
