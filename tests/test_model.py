"""The decoder as a whole: packing, stacking, counts. tests/interop has parity with the official."""

import dataclasses
import functools
import resource
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import k3jax.model
from configs import CONFIGS
from k3jax.config import (
    FeedForwardConfig,
    GQAConfig,
    KDAConfig,
    MLAConfig,
    ModelConfig,
    MoEConfig,
    ResidualConfig,
)
from k3jax.cost import parameter_counts
from k3jax.layers.documents import documents_of
from k3jax.model import Decoder, next_token_loss, token_scores
from k3jax.params import BalancingState, count, specs
from k3jax.sharding import activation_spec, make_mesh
from tests.layers.rows import relative_rms

VOCAB, ROWS, LENGTH = 31, 3, 24
KDA = KDAConfig(heads=2, key_dim=8, value_dim=8, decay_rank=4)
MOE = MoEConfig(experts=6, top_k=2, expert_width=12, latent_width=8, first_k_dense=0)
K3 = ModelConfig(
    vocab_size=VOCAB,
    d_model=16,
    layers=4,
    kda_to_full="1:1",
    kda=KDA,
    mla=MLAConfig(
        heads=2, q_lora_rank=8, kv_lora_rank=6, qk_nope_dim=8, qk_rope_dim=4, value_dim=6
    ),
    residual=ResidualConfig("attn_res_block", block_size=2),
    ffn=FeedForwardConfig(dense_width=24),
    moe=MOE,
    dtype="float64",
)
OTHER = dataclasses.replace(
    K3,
    layers=3,
    kda_to_full="2:1",
    full_attention="gqa",
    gqa=GQAConfig(heads=2, kv_heads=1, head_dim=8, rope=True),
    kda=dataclasses.replace(KDA, rule="gated_delta", gate_form="softplus", output_gate_rank=4),
    residual=ResidualConfig("plain"),
    ffn=FeedForwardConfig("swiglu", dense_width=24),
    moe=MoEConfig(experts=5, top_k=1, expert_width=12, balancing="sign"),
    tie_embeddings=True,
)
TWO_PHASE = dataclasses.replace(K3.residual, two_phase=True)
FULL = dataclasses.replace(
    K3, layers=2, kda_to_full="1:0", residual=ResidualConfig("attn_res_full")
)


@pytest.fixture(autouse=True)
def _mesh():
    with jax.set_mesh(make_mesh()):
        yield


def randomised(config, seed):
    """A float64 decoder with every parameter away from its start: graphdef, params, balancing."""
    graphdef, params, balancing = nnx.split(Decoder(config, rngs=None), nnx.Param, BalancingState)
    rng = np.random.default_rng(seed)
    params = jax.tree.map(lambda a: jnp.asarray(rng.normal(size=a.shape) * 0.4), params)

    def state(a):
        return jnp.asarray(rng.normal(size=a.shape) * 0.05, a.dtype)

    return graphdef, params, jax.tree.map(state, balancing)


@functools.cache
def loss_of(graphdef):
    """Mean loss, and its gradient by every parameter, jitted once per model."""

    def loss(params, balancing, batch):
        model = nnx.merge(graphdef, params, balancing)
        documents = documents_of(batch["segment_ids"])
        hidden, _, _ = model.hidden(batch["inputs"], documents=documents)
        total, _ = next_token_loss(model, hidden, batch["targets"], batch["weights"])
        return total / jnp.sum(batch["weights"])

    return jax.jit(jax.value_and_grad(loss))


def batch_of(rng, ids):
    """A batch whose documents depend on nothing but their number: packed or apart, they agree."""
    inputs, targets = np.zeros((2, *ids.shape), np.int32)
    for row in range(len(ids)):
        for document in np.unique(ids[row][ids[row] > 0]):
            at = np.flatnonzero(ids[row] == document)
            inputs[row, at], targets[row, at] = rng[document][:, : at.size]
    weights = (ids > 0).astype(np.float32)
    batch = {"inputs": inputs, "targets": targets, "weights": weights, "segment_ids": ids}
    spec = activation_spec(2)
    return {name: jax.device_put(jnp.asarray(a), spec) for name, a in batch.items()}


@pytest.mark.parametrize("config", [K3, OTHER, FULL], ids=["k3", "other", "attn_res_full"])
def test_packed_equals_separate(config):
    """Loss and all gradients: documents in one row with gaps, or one per row."""
    with jax.enable_x64(True):
        seed = int(np.random.default_rng().integers(1 << 30))
        rng = np.random.default_rng(seed)
        graphdef, params, balancing = randomised(config, seed)
        sizes = {1: 9, 2: 1, 3: 7}
        documents = {n: rng.integers(0, VOCAB, (2, size)) for n, size in sizes.items()}
        packed, apart = np.zeros((2, ROWS, LENGTH), np.int32)
        packed[0, np.sort(rng.choice(LENGTH, 17, replace=False))] = np.repeat(
            list(sizes), list(sizes.values())
        )
        for row, (n, size) in enumerate(sizes.items()):
            apart[row, :size] = n
        run = loss_of(graphdef)
        loss, grads = run(params, balancing, batch_of(documents, packed))
        wanted, wanted_grads = run(params, balancing, batch_of(documents, apart))
        assert abs(loss - wanted) < 1e-12 * wanted, seed
        for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(wanted_grads), strict=True):
            assert relative_rms(a, b) < 1e-9, seed


@pytest.mark.parametrize(
    "changes",
    [
        {"unroll": True, "remat": "full", "residual": TWO_PHASE},
        pytest.param({"unroll": True, "remat": "everything"}, marks=pytest.mark.full),
        pytest.param({"remat": "dots", "residual": TWO_PHASE}, marks=pytest.mark.full),
    ],
)
def test_evaluation_order_changes_nothing(changes):
    """A scan or unrolled, recomputed or stored, one phase or two: the same loss and gradients."""
    with jax.enable_x64(True):
        seed = int(np.random.default_rng().integers(1 << 30))
        rng = np.random.default_rng(seed)
        ids = np.sort(rng.integers(0, 4, (ROWS, LENGTH)), axis=1).astype(np.int32)
        batch = batch_of({n: rng.integers(0, VOCAB, (2, LENGTH)) for n in range(1, 4)}, ids)
        results = []
        for config in (K3, dataclasses.replace(K3, **changes)):
            graphdef, params, balancing = randomised(config, seed)
            results.append(loss_of(graphdef)(params, balancing, batch))
        (loss, grads), (wanted, wanted_grads) = results
        assert abs(loss - wanted) < 1e-12 * wanted, seed
        for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(wanted_grads), strict=True):
            assert relative_rms(a, b) < 1e-9, seed


def test_bfloat16_stays_near_float32_and_off_a_mesh():
    rng = np.random.default_rng(0)
    tokens = jnp.asarray(rng.integers(0, VOCAB, (2, 20)), jnp.int32)
    logits = {}
    for dtype in ("float32", "bfloat16"):
        config = dataclasses.replace(K3, layers=2, dtype=dtype)
        graphdef, state = nnx.split(Decoder(config, rngs=nnx.Rngs(0)))
        logits[dtype] = jax.jit(lambda s, t, g=graphdef: nnx.merge(g, s)(t)[0])(state, tokens)
        assert logits[dtype].dtype == jnp.float32
    assert relative_rms(logits["bfloat16"], logits["float32"]) < 0.05


def test_a_lookup_by_a_product_is_one_by_indices(monkeypatch):
    with jax.enable_x64(True):
        seed = np.random.SeedSequence().entropy
        rng = np.random.default_rng(seed)
        graphdef, params, balancing = randomised(OTHER, seed)
        ids = np.sort(rng.integers(0, 3, (ROWS, LENGTH)), axis=1).astype(np.int32)
        batch = batch_of(rng.integers(0, VOCAB, (4, 2, LENGTH)), ids)
        products = loss_of(graphdef)(params, balancing, batch)
        monkeypatch.setattr(k3jax.model, "_ONE_HOT", 0)
        indices = loss_of.__wrapped__(graphdef)(params, balancing, batch)
        for a, b in zip(*map(jax.tree.leaves, (products, indices)), strict=True):
            assert relative_rms(a, b) < 1e-13, seed


@pytest.mark.parametrize("logits", [1, 1 << 24], ids=["blocks", "whole"])
def test_loss_is_the_cross_entropy_of_the_logits(monkeypatch, logits):
    """Blocks of tokens, a ragged last one, weights, and NaN where no weight is."""
    monkeypatch.setattr(k3jax.model, "_LOSS_LOGITS", logits)
    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        model = Decoder(dataclasses.replace(FULL, layers=1), rngs=nnx.Rngs(0))
        hidden = jnp.asarray(rng.normal(size=(3, 700, 16)))
        targets = jnp.asarray(rng.integers(0, VOCAB, (3, 700)), jnp.int32)
        logits = hidden @ model.head[...]
        wanted = -jax.nn.log_softmax(logits)[np.arange(3)[:, None], np.arange(700), targets]
        hits = logits.argmax(-1) == targets
        nll, correct = jax.jit(token_scores)(model, hidden, targets)
        assert relative_rms(nll, wanted) < 1e-12
        assert (correct == hits).all() and correct.any()
        weights = jnp.asarray(rng.integers(0, 3, (3, 700)), jnp.float32)
        spoiled = jnp.where(weights[..., None] > 0, hidden, jnp.nan)
        total, right = next_token_loss(model, spoiled, targets, weights)
        assert abs(total - (weights * wanted).sum()) < 1e-9
        assert right == (weights * hits).sum()


def test_no_tokens():
    model = Decoder(dataclasses.replace(K3, layers=2, dtype="float32"), rngs=nnx.Rngs(0))
    tokens = jnp.zeros((2, 0), jnp.int32)
    cache = model.empty_cache(2, 3)
    logits, after, _ = jax.eval_shape(lambda t: model(t, cache=cache), tokens)
    assert logits.shape == (2, 0, VOCAB) and jax.tree.structure(after) == jax.tree.structure(cache)
    for scores in token_scores(model, jnp.zeros((2, 0, 16)), tokens):
        assert scores.shape == (2, 0)


def test_wrong_calls_are_refused_in_one_line():
    model = Decoder(dataclasses.replace(K3, layers=2, dtype="float32"), rngs=nnx.Rngs(0))
    tokens, cache = jnp.zeros((2, 5), jnp.int32), model.empty_cache(2, 4)
    with pytest.raises(
        ValueError, match=r"probes = \('nonsense',\): must be among log_decay, stat"
    ):
        model(tokens, probes=("nonsense",))
    with pytest.raises(ValueError, match="cache: row 0 would hold 5 tokens, its capacity is 4"):
        model(tokens, cache=cache)
    packed = documents_of(jnp.asarray([[1, 1, 2, 2, 2], [1, 1, 1, 0, 0]], jnp.int32))
    with pytest.raises(ValueError, match="segment_ids: 2 found, a row with a cache holds one"):
        model(tokens, documents=packed, cache=cache)


def test_published_parameter_counts():
    """Exactly, by shapes alone (k3 2.78T / 104.2B, Kimi Linear 49.1B / 3.1B)."""
    k3, linear = (parameter_counts(CONFIGS[n]().model) for n in ("kimi_k3", "kimi_linear"))
    assert (k3.total, k3.active) == (2_779_484_476_000, 104_189_612_640)
    assert (linear.total, linear.active) == (49_122_681_728, 3_106_972_544)


@pytest.mark.parametrize("name", [*CONFIGS, "other", "attn_res_full"])
def test_counts_are_those_of_the_declared_parameters(name):
    others = {"other": OTHER, "attn_res_full": FULL}
    config = others[name] if name in others else CONFIGS[name]().model
    _, params, balancing = nnx.split(Decoder(config, rngs=None), nnx.Param, BalancingState)
    biases = sum(np.prod(spec.shape) for _, spec in specs(balancing) if spec.hf_name)
    assert count(params) + biases == parameter_counts(config).total
    routed = sum(
        np.prod(s.shape) for _, s in specs(params) if s.hf_name and "{expert}" in s.hf_name
    )
    idle = routed * (config.moe.experts - config.moe.top_k) // config.moe.experts
    looked_up = 0 if config.tie_embeddings else config.vocab_size * config.d_model
    assert count(params) + biases - idle - looked_up == parameter_counts(config).active


def test_the_one_billion_pair_is_matched():
    k3, linear = (parameter_counts(CONFIGS[n]().model) for n in ("k3_1b", "kimi_linear_1b"))
    assert abs(k3.total / linear.total - 1) < 0.03
    assert abs(k3.active / linear.active - 1) < 0.03


@pytest.mark.full
def test_tracing_the_step_of_kimi_k3_is_quick():
    """93 layers, forward and backward, abstract: under 3 minutes and 8 GiB."""
    config = CONFIGS["kimi_k3"]().model
    start = time.monotonic()
    graphdef, params, balancing = nnx.split(Decoder(config, rngs=None), nnx.Param, BalancingState)
    kinds = {"inputs": np.int32, "targets": np.int32, "weights": np.float32}
    batch = {
        name: jax.ShapeDtypeStruct((8, 1024), dtype)
        for name, dtype in (kinds | {"segment_ids": np.int32}).items()
    }
    loss_of(graphdef).trace(params, balancing, batch)
    assert time.monotonic() - start < 180
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 8 * 2**20
