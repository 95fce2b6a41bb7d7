"""The official code's outputs, reproduced from its checkpoints (tests/data, each with a README).

Shorter rows are padded to the length of the longest, so that each path compiles once; padding must
change nothing. Tolerances are those of the fixtures' READMEs, absolute on logits of rms 1.5.
"""

import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from k3jax.interop import load
from k3jax.layers.attn_res import Depth, depth_of
from k3jax.layers.documents import documents_of
from k3jax.layers.linear import rms_norm
from k3jax.sharding import make_mesh
from k3jax.stacking import segments, stored_sources
from tests.interop.reference import forward

DATA = Path(__file__).parent.parent / "data"
FP32_TOLERANCE = {"kimi_linear_tiny": 3e-4, "kimi_k3_tiny": 2e-3}
LENGTHS, LONGEST = (37, 130), 130
DECODES = (("decode_37", 37), ("decode_130", 130), ("decode2_37", 37))


@pytest.fixture(autouse=True)
def _mesh():
    with jax.set_mesh(make_mesh()):
        yield


@functools.cache
def expected(name: str) -> dict[str, np.ndarray]:
    with np.load(DATA / name / "expected.npz") as file:
        return dict(file)


def padded(tokens: np.ndarray, length: int) -> tuple[jax.Array, jax.Array]:
    """Tokens and segment ids of rows padded on the right."""
    spare = length - tokens.shape[1]
    ids = np.pad(np.ones(tokens.shape, np.int32), ((0, 0), (0, spare)))
    return jnp.asarray(np.pad(tokens, ((0, 0), (0, spare))), jnp.int32), jnp.asarray(ids)


def apply(model):
    """`model` as one jitted function of tokens, segment ids and cache."""
    graphdef, state = nnx.split(model)

    @jax.jit
    def run(state, tokens, segment_ids, cache):
        module = nnx.merge(graphdef, state)
        documents = documents_of(segment_ids)
        return module(tokens, documents=documents, cache=cache)[:2]

    return functools.partial(run, state)


@pytest.mark.parametrize("name", FP32_TOLERANCE)
def test_the_reference_is_the_official_code(name):
    """That in NumPy, which random checkpoints are held to (test_checkpoints)."""
    raw = json.loads((DATA / name / "config.json").read_text())
    stored = load_file(DATA / name / "model.safetensors").items()
    tensors = {n.removeprefix("language_model."): t.astype(np.float64) for n, t in stored}
    logits, _ = forward(raw.get("text_config", raw), tensors, expected(name)["input_ids_37"][1])
    assert np.abs(logits - expected(name)["logits_f64_37"][1]).max() < 1e-10


@pytest.mark.parametrize("name", FP32_TOLERANCE)
def test_float32_logits_are_the_official_ones(name):
    run = apply(load(DATA / name, "float32"))
    for length in LENGTHS:
        tokens = expected(name)[f"input_ids_{length}"]
        logits, _ = run(*padded(tokens, LONGEST), None)
        difference = np.asarray(logits)[:, :length] - expected(name)[f"logits_{length}"]
        assert np.abs(difference).max() < FP32_TOLERANCE[name]


@pytest.mark.parametrize("name", FP32_TOLERANCE)
def test_float64_agrees_layer_after_layer_and_in_the_logits(name):
    """Each layer from its slice of the stack; hidden states were written down in float32."""
    with jax.enable_x64(True):
        model = load(DATA / name, "float64")
        for length in LENGTHS:
            found = _layer_by_layer(model, *padded(expected(name)[f"input_ids_{length}"], LONGEST))
            layers, mix, logits = (np.asarray(a)[..., :length, :] for a in found)
            wanted = {"hidden": layers, "attnres_mix": mix}
            for key, value in wanted.items():
                if f"{key}_{length}" in expected(name):
                    difference = value - expected(name)[f"{key}_{length}"]
                    assert np.abs(difference).max() < FP32_TOLERANCE[name], key
            assert np.abs(logits - expected(name)[f"logits_f64_{length}"]).max() < 1e-9


@functools.partial(jax.jit, static_argnums=0)
def _layer(graphdef, state, stream, documents):
    return nnx.merge(graphdef, state)(stream, documents=documents)[0]


def _layer_by_layer(model, tokens, segment_ids):
    """The running sum after every layer, what the final norm reads, and the logits."""
    documents, config = documents_of(segment_ids), model.config
    stream, layers = model.embedding[...][tokens], []
    if config.residual.kind != "plain":
        stream = depth_of(stream, stored_sources(config))
    for segment, blocks in zip(segments(config), model.blocks, strict=True):
        graphdef, state = nnx.split(blocks)
        for repeat in range(segment.repeats):
            block = nnx.merge(graphdef, jax.tree.map(lambda a, r=repeat: a[r], state))
            for layer in block.layers:
                stream = _layer(*nnx.split(layer), stream, documents)
                layers.append(stream.run if isinstance(stream, Depth) else stream)
    mix = model.residual(stream) if isinstance(stream, Depth) else stream
    logits = rms_norm(mix, model.norm[...], config.norm_eps) @ model.head_matrix()
    return jnp.stack(layers), mix, logits


@pytest.mark.parametrize("name", FP32_TOLERANCE)
def test_one_token_at_a_time_from_the_cache(name):
    """KDA states, convolution tails and MLA latents carry a sequence on, exactly."""
    with jax.enable_x64(True):
        model = load(DATA / name, "float64")
        run = apply(model)
        for key, length in DECODES:
            tokens = expected(name)[f"input_ids_{length}"]
            exact = expected(name)[f"logits_f64_{length}"]
            prefill = int(expected(name)[f"{key}_prefill_len"])
            cache = model.empty_cache(tokens.shape[0], LONGEST)
            logits, cache = run(*padded(tokens[:, :prefill], LONGEST - 10), cache)
            columns = [logits[:, prefill - 1]]
            for step in range(prefill, length):
                logits, cache = run(*padded(tokens[:, step : step + 1], 1), cache)
                columns.append(logits[:, 0])
            decoded = np.stack(columns, axis=1)
            assert np.abs(decoded - exact[:, prefill - 1 :]).max() < 1e-9
            official = expected(name)[f"{key}_logits"]
            steps = official.shape[1]
            assert np.abs(decoded[:, :steps] - official).max() < FP32_TOLERANCE[name]
