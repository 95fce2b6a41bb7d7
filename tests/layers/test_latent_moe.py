"""The mixture of experts against a dense sum over all experts, in float64."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from k3jax.config import FeedForwardConfig, ModelConfig, MoEConfig
from k3jax.layers.documents import documents_of
from k3jax.layers.latent_moe import LatentMoE
from k3jax.params import specs
from k3jax.sharding import activation_spec, make_mesh
from tests.layers.dense_experts import dense_experts
from tests.layers.rows import RAGGED, relative_rms

BASE = MoEConfig(experts=6, top_k=2, expert_width=10, latent_width=8, balancing="none")
D = 12


def model_config(moe, activation="situ", **settings):
    ffn = FeedForwardConfig(activation=activation, situ_beta=2.0, situ_linear_beta=3.0)
    return ModelConfig(d_model=D, moe=moe, ffn=ffn, **settings)


def built(config, bias=None, dtype=jnp.float64, seed=0):
    """The layer's graph and a state with every array drawn anew, gains and bias too."""
    graphdef, state = nnx.split(LatentMoE(config, rngs=None))
    rng = np.random.default_rng(seed)
    state = jax.tree.map(lambda s: jnp.asarray(rng.normal(0.3, 0.5, s.shape), dtype), state)
    if bias is not None:
        state["router"]["bias"] = state["router"]["bias"].replace(jnp.asarray(bias, jnp.float32))
    return graphdef, state


@pytest.mark.parametrize(
    "changes, kind, bias",
    [
        # Kimi K3: latent, normed, shared; the bias decides between experts.
        (dict(shared_experts=2), "situ", None),
        # Kimi Linear: full width. All tokens go to experts 3 and 1, the others are empty.
        (dict(latent_width=0, scaling=2.446), "swiglu", [0, 8, 0, 9, 0, 0]),
        # One route per token, which keeps its own score; no shared expert.
        (dict(top_k=1, shared_experts=0), "situ", [0, 0, 0, 0, 0, 9]),
        # Every token to every expert; no norm after the combination.
        (dict(top_k=6, latent_norm=False, renormalise=False), "swiglu", None),
    ],
)
def test_equals_dense_oracle(changes, kind, bias):
    config = model_config(dataclasses.replace(BASE, **changes), kind)
    with jax.enable_x64(True):
        graphdef, state = built(config, bias)
        rng = np.random.default_rng(1)
        x, ct = (jnp.asarray(rng.normal(size=(*RAGGED.shape, D))) for _ in range(2))
        docs = documents_of(jnp.asarray(RAGGED))

        def layer(state, x):
            return nnx.merge(graphdef, state)(x, documents=docs)[0]

        @jax.jit
        def both(state, x):
            out, pull = jax.vjp(layer, state, x)
            want, pull_want = jax.vjp(
                lambda s, x: dense_experts(s, x, RAGGED > 0, config), state, x
            )
            return (out, pull(ct)), (want, pull_want(ct))

        (out, (d_state, d_x)), (want, (d_state_want, d_x_want)) = both(state, x)
        assert out.dtype == jnp.float64
        assert relative_rms(out, want) < 1e-10
        assert relative_rms(d_x, d_x_want) < 1e-10
        assert not np.any(out[RAGGED == 0]) and not np.any(d_x[RAGGED == 0])
        flat = dict(nnx.to_flat_state(d_state))
        for path, wanted in nnx.to_flat_state(d_state_want):
            assert relative_rms(flat[path][...], wanted[...]) < 1e-10, path
        assert not np.any(d_state["router"]["bias"][...])


def test_ties_take_the_lower_experts():
    config = model_config(BASE)
    with jax.enable_x64(True):
        graphdef, state = built(config, bias=np.zeros(6))
        state["router"]["kernel"] = state["router"]["kernel"].replace(jnp.zeros((D, 6)))
        x = jnp.asarray(np.random.default_rng(2).normal(size=(*RAGGED.shape, D)))
        docs = documents_of(jnp.asarray(RAGGED))
        call = jax.jit(lambda state, x: nnx.merge(graphdef, state)(x, documents=docs))
        out, _, stats = call(state, x)
        real = (RAGGED > 0).sum()
        assert stats["router"]["load"].value.tolist() == [real, real, 0, 0, 0, 0]
        assert relative_rms(out, dense_experts(state, x, RAGGED > 0, config)) < 1e-10


def test_post_combine_norm_cancels_the_scale_of_the_weights():
    out = []
    with jax.enable_x64(True):
        x = jnp.asarray(np.random.default_rng(3).normal(size=(*RAGGED.shape, D)))
        for scaling in (1.0, 7.0):
            moe = dataclasses.replace(BASE, scaling=scaling)
            graphdef, state = built(model_config(moe, norm_eps=1e-20))
            layer = nnx.merge(graphdef, state)
            y, _, _ = jax.jit(layer.__call__)(x, documents=documents_of(jnp.asarray(RAGGED)))
            out.append(np.asarray(y))
    assert relative_rms(*out) < 1e-12
    assert np.any(out[0] != 0)


def test_one_device_mesh_equals_no_mesh():
    config = model_config(dataclasses.replace(BASE, balancing="histogram", bins=20))
    graphdef, state = built(config, dtype=jnp.float32)
    params, rest = nnx.split_state(state, nnx.Param, ...)
    x = jnp.asarray(np.random.default_rng(4).normal(size=(*RAGGED.shape, D)), jnp.bfloat16)

    def run(x, ids):
        def loss(params, x):
            layer = nnx.merge(graphdef, params, rest)
            y, cache, stats = layer(x, documents=documents_of(ids))
            assert cache is None
            return jnp.sum(jnp.square(y.astype(jnp.float32))), (y, stats)

        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))(params, x)

    off = run(x, jnp.asarray(RAGGED))
    with jax.set_mesh(make_mesh()):
        on = run(
            jax.sharding.reshard(x, activation_spec(3)),
            jax.sharding.reshard(jnp.asarray(RAGGED), activation_spec(2)),
        )
    assert off[0][1][0].dtype == jnp.bfloat16
    for a, b in zip(jax.tree.leaves(off), jax.tree.leaves(on), strict=True):
        assert relative_rms(a, b) < 1e-5
    assert float(off[0][0]) > 0


def test_parameters_follow_the_official_checkpoint():
    """Shapes of one Kimi K3 layer, of one of Kimi Linear, and no other parameters."""
    k3 = MoEConfig(experts=896, top_k=16, expert_width=3072, shared_experts=2, latent_width=3584)
    linear = MoEConfig(experts=256, top_k=8, expert_width=1024, shared_experts=1, balancing="sign")
    prefix = "block_sparse_moe"

    def names(d, moe):
        layer = LatentMoE(ModelConfig(d_model=d, moe=moe), rngs=None)
        return {s.hf_name: s.shape for _, s in specs(nnx.state(layer)) if s.hf_name}

    assert names(7168, k3) == {
        f"{prefix}.gate.weight": (7168, 896),
        f"{prefix}.gate.e_score_correction_bias": (896,),
        f"{prefix}.routed_expert_down_proj.weight": (7168, 3584),
        f"{prefix}.routed_expert_norm.weight": (3584,),
        f"{prefix}.routed_expert_up_proj.weight": (3584, 7168),
        f"{prefix}.shared_experts.gate_proj.weight": (7168, 6144),
        f"{prefix}.shared_experts.up_proj.weight": (7168, 6144),
        f"{prefix}.shared_experts.down_proj.weight": (6144, 7168),
        f"{prefix}.experts.{{expert}}.w1.weight": (896, 3584, 3072),
        f"{prefix}.experts.{{expert}}.w3.weight": (896, 3584, 3072),
        f"{prefix}.experts.{{expert}}.w2.weight": (896, 3072, 3584),
    }
    assert names(2304, linear) == {
        f"{prefix}.gate.weight": (2304, 256),
        f"{prefix}.gate.e_score_correction_bias": (256,),
        f"{prefix}.shared_experts.gate_proj.weight": (2304, 1024),
        f"{prefix}.shared_experts.up_proj.weight": (2304, 1024),
        f"{prefix}.shared_experts.down_proj.weight": (1024, 2304),
        f"{prefix}.experts.{{expert}}.w1.weight": (256, 2304, 1024),
        f"{prefix}.experts.{{expert}}.w3.weight": (256, 2304, 1024),
        f"{prefix}.experts.{{expert}}.w2.weight": (256, 1024, 2304),
    }
