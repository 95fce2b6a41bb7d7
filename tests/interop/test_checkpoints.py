"""Random official checkpoints of every shape against the NumPy reference; bad ones are refused."""

import contextlib

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

from k3jax.interop import load
from k3jax.layers.documents import documents_of
from k3jax.params import BalancingState
from k3jax.sharding import make_mesh
from tests.interop.reference import forward, random_config, random_tensors, write

# A row padded in front and inside, and a row of two documents.
IDS = np.array([[0, 0, 1, 1, 0, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 2, 2, 2, 2, 2, 2, 0]], np.int32)


@pytest.mark.parametrize(
    "draw", [*range(3), *(pytest.param(n, marks=pytest.mark.full) for n in range(3, 40))]
)
def test_random_checkpoints(tmp_path, draw):
    """Layouts, dtypes and switches drawn anew each time; packed and padded rows, in float64."""
    seed = int(np.random.default_rng().integers(1 << 30))
    rng = np.random.default_rng(seed)
    text = random_config(rng)
    tensors = random_tensors(text, rng)
    if rng.random() < 0.3:
        tensors = {name: t.astype(ml_dtypes.bfloat16) for name, t in tensors.items()}
    write(tmp_path, text, tensors, nested=bool(rng.integers(2)), shards=int(rng.integers(1, 4)))
    tokens = rng.integers(0, text["vocab_size"], IDS.shape)
    mesh = jax.set_mesh(make_mesh()) if rng.integers(2) else contextlib.nullcontext()
    with jax.enable_x64(True), mesh:
        graphdef, state = nnx.split(load(tmp_path, "float64"))
        floats = [leaf.dtype for leaf in jax.tree.leaves(state) if leaf.dtype != jnp.int32]
        assert set(floats) == {jnp.dtype("float64")}, (seed, text)
        logits = jax.jit(
            lambda s: nnx.merge(graphdef, s)(
                jnp.asarray(tokens, jnp.int32), documents=documents_of(jnp.asarray(IDS))
            )[0]
        )(state)
    logits = np.asarray(logits)
    tensors = {name: t.astype(np.float64) for name, t in tensors.items()}
    for row, ids in enumerate(IDS):
        for document in range(1, ids.max() + 1):
            at = ids == document
            wanted, _ = forward(text, tensors, tokens[row][at])
            assert np.abs(logits[row][at] - wanted).max() < 1e-9, (seed, text)


@pytest.fixture(scope="module")
def k3(tmp_path_factory):
    """A K3 with a dense layer and one of experts."""
    rng = np.random.default_rng(0)
    text = random_config(rng) | {
        "num_hidden_layers": 2,
        "first_k_dense_replace": 1,
        "num_experts": 3,
        "num_experts_per_token": 2,
        "routed_expert_hidden_size": 6,
        "latent_moe_use_norm": True,
        "attn_res_block_size": 1,
        "linear_attn_config": None,
        "tie_word_embeddings": False,
    }
    return text, random_tensors(text, rng)


def test_state_that_no_checkpoint_has(tmp_path, k3):
    """A histogram counts in integers, whatever the parameters are."""
    write(tmp_path, *k3, nested=True, shards=1)
    balancing = nnx.state(load(tmp_path), BalancingState)
    kinds = {path[-1]: leaf[...].dtype for path, leaf in nnx.to_flat_state(balancing)}
    assert kinds == {"bias": jnp.float32, "histogram": jnp.int32, "bounds": jnp.float32}


BAD = {
    "a missing key": ({"hidden_size": ...}, {}, "hidden_size is missing"),
    "a key of the wrong type": ({"kv_lora_rank": None}, {}, "kv_lora_rank = None, must be a whole"),
    "an activation": ({"hidden_act": "gelu"}, {}, "hidden_act = 'gelu', must be one of silu, situ"),
    "more predictions": (
        {"num_nextn_predict_layers": 1},
        {},
        "num_nextn_predict_layers = 1, only 0 is supported",
    ),
    "a layer in no list": (
        {"linear_attn_config": {"kda_layers": [2], "full_attn_layers": []}},
        {},
        r"layer 1 \(of 1..2\) must be in one of kda_layers and full_attn_layers",
    ),
    "another width": (
        {"vocab_size": 24},
        {},
        r"embed_tokens.weight: shape \[23, \d+\] does not give \[24, \d+\]",
    ),
    "a missing tensor": ({}, {"model.norm.weight": ...}, "model.norm.weight: no such tensor"),
    "one too many": ({}, {"extra": np.ones(1)}, "1 tensors have no place in the model, e.g. extra"),
    "packed experts": (
        {},
        {
            "model.layers.1.block_sparse_moe.experts.0.w1.weight": ...,
            "model.layers.1.block_sparse_moe.experts.0.w1.weight_packed": np.ones(1, np.uint8),
        },
        "experts.0.w1.weight: no such tensor in the checkpoint; MXFP4 weights are not supported",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_checkpoint_is_refused_in_one_line(tmp_path, k3, case):
    text, tensors = k3
    settings, changed, message = BAD[case]

    def changing(old, new):
        return {name: value for name, value in (old | new).items() if value is not ...}

    write(tmp_path, changing(text, settings), changing(tensors, changed), nested=True, shards=1)
    with pytest.raises(ValueError, match=message) as caught:
        load(tmp_path)
    assert "\n" not in str(caught.value)


def test_bad_files_are_refused_in_one_line(tmp_path, k3):
    with pytest.raises(ValueError, match=r"not a readable config\.json"):
        load(tmp_path)
    write(tmp_path, *k3, nested=True, shards=2)
    stray = tmp_path / "consolidated.safetensors"
    stray.write_bytes((tmp_path / "model-00001-of-00002.safetensors").read_bytes())
    load(tmp_path)  # the index does not name it
    with pytest.raises(ValueError, match="dtype = 'float64': needs jax_enable_x64"):
        load(tmp_path, "float64")
    index = tmp_path / "model.safetensors.index.json"
    kept = index.read_text()
    index.write_text("[]")
    with pytest.raises(ValueError, match=r"index\.json: not a readable index"):
        load(tmp_path)
    index.unlink()
    with pytest.raises(ValueError, match=r"is in another file of .* too"):
        load(tmp_path)
    stray.unlink()
    index.write_text(kept)
    (tmp_path / "model-00002-of-00002.safetensors").write_bytes(b"x" * 100)
    with pytest.raises(ValueError, match=r"00002\.safetensors: not a readable safetensors file"):
        load(tmp_path)
