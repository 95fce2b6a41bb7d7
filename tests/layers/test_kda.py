"""The KDA layer and its ancestors against an independent token-by-token layer, in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from k3jax.config import KDAConfig
from k3jax.layers.block import PROBES
from k3jax.layers.documents import documents_of
from k3jax.layers.kda import HALF_LIVES, KimiDeltaAttention, half_life_counts
from tests.layers.rows import PIECES, RAGGED, by_document, relative_rms

D = 10
SIZES = {"heads": 2, "key_dim": 6, "value_dim": 7, "decay_rank": 3}
VARIANTS = {
    "K3": KDAConfig(**SIZES),
    "Kimi Linear": KDAConfig(gate_form="softplus", output_gate_rank=5, **SIZES),
    "swish, no convolution": KDAConfig(output_gate="swish", conv_width=0, **SIZES),
    "Gated DeltaNet": KDAConfig(rule="gated_delta", gate_form="softplus", **SIZES),
    "DeltaNet, no gate": KDAConfig(rule="delta", output_gate="none", **SIZES),
    "linear attention": KDAConfig(rule="linear", **SIZES),
}


def layer_of(config, seed):
    """A layer with every parameter away from its start, in float64."""
    layer = KimiDeltaAttention(config, D, rngs=nnx.Rngs(seed))
    graphdef, state = nnx.split(layer)
    rng = np.random.default_rng(seed)
    state = jax.tree.map(lambda a: jnp.asarray(rng.normal(size=a.shape) * 0.5), state)
    return graphdef, state


def naive(graphdef, state, x):
    """The layer on one document `x [t, d]`, written out from the papers."""
    m = nnx.merge(graphdef, state)
    config, (o, _, _) = m.config, token_by_token(m, x)
    o = o / jnp.sqrt((o**2).mean(-1, keepdims=True) + m.norm_eps) * m.norm[...]
    if config.output_gate != "none":
        low = config.output_gate_rank
        raw = x @ m.gate_down[...] @ m.gate_up[...] if low else x @ m.gate[...]
        gate = jax.nn.sigmoid(raw) * (raw if config.output_gate == "swish" else 1)
        o = o * gate.reshape(o.shape)
    return o.reshape(len(x), -1) @ m.out[...]


def token_by_token(m, x):
    """The recurrence of layer `m`: outputs `[t, H, V]`, log decays `[t, H, K]`, the last state."""
    config, heads = m.config, m.config.heads

    def stream(name):
        y = x @ m.stream[name][...]
        if config.conv_width:
            taps = m.taps[name][...]
            behind = jnp.pad(y, ((len(taps) - 1, 0), (0, 0)))
            y = jax.nn.silu(sum(taps[j] * behind[j : j + len(x)] for j in range(len(taps))))
        return y.reshape(len(x), heads, -1)

    q, k, v = map(stream, "qkv")
    q, k = (a / jnp.sqrt((a**2).sum(-1, keepdims=True) + 1e-6) for a in (q, k))
    q = q / np.sqrt(config.key_dim)
    g = jnp.zeros_like(k)
    if config.rule in ("kda", "gated_delta"):
        z = (x @ m.decay_down[...] @ m.decay_up[...]).reshape(len(x), heads, -1) + m.dt_bias[...]
        a = jnp.exp(m.a_log[...])[:, None]
        bounded = config.gate_form == "bounded"
        g = config.lower_bound / (1 + jnp.exp(-a * z)) if bounded else -a * jnp.log1p(jnp.exp(z))
        g = jnp.broadcast_to(g, k.shape)
    beta = jnp.ones(k.shape[:2])
    if config.rule != "linear":
        beta = jax.nn.sigmoid(x @ m.beta[...])
    S, out = jnp.zeros((heads, config.key_dim, config.value_dim)), []
    for t in range(len(x)):
        S = jnp.exp(g[t])[..., None] * S
        error = v[t] - (0 if config.rule == "linear" else jnp.einsum("hkv,hk->hv", S, k[t]))
        S = S + k[t][..., None] * (beta[t][:, None] * error)[:, None, :]
        out.append(jnp.einsum("hkv,hk->hv", S, q[t]))
    return jnp.stack(out), g, S


@pytest.mark.parametrize("name", VARIANTS)
def test_forward_and_every_gradient(name):
    """Packed rows with padding anywhere equal documents on their own."""
    with jax.enable_x64(True):
        seed = int(np.random.default_rng().integers(1 << 30))
        graphdef, state = layer_of(VARIANTS[name], seed)
        rng = np.random.default_rng(seed)
        x, probe = rng.normal(size=(2, *RAGGED.shape, D))
        documents = documents_of(jnp.asarray(RAGGED))

        def layer(state, x):
            y, cache, _ = nnx.merge(graphdef, state)(x, documents=documents)
            assert cache is None
            return y

        def alone(state, x):
            return by_document(functools.partial(naive, graphdef, state), x, RAGGED)

        def run(fn):
            total = jax.jit(
                lambda s, x: (fn(s, x), jax.grad(lambda *a: (fn(*a) * probe).sum(), (0, 1))(s, x))
            )
            return total(state, jnp.asarray(x))

        (y, grads), (wanted, wanted_grads) = run(layer), run(alone)
        assert relative_rms(y, wanted) < 1e-10, seed
        for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(wanted_grads), strict=True):
            assert relative_rms(a, b) < 1e-9, seed


@pytest.mark.parametrize("name", ["K3", "swish, no convolution", "linear attention"])
def test_pieces_with_a_cache_equal_one_pass(name):
    """Prefills with padding on any side, then single tokens that some rows skip."""
    with jax.enable_x64(True):
        seed = int(np.random.default_rng().integers(1 << 30))
        graphdef, state = layer_of(VARIANTS[name], seed)
        layer = nnx.merge(graphdef, state)
        total = sum(piece.sum(axis=1) for piece in PIECES)
        x = np.random.default_rng(seed).normal(size=(2, total.max(), D))
        ids = (np.arange(total.max()) < total[:, None]).astype(np.int32)
        whole, _, _ = layer(jnp.asarray(x), documents=documents_of(jnp.asarray(ids)))
        cache, done = layer.empty_cache(2, 0, jnp.float64), np.zeros(2, int)
        for piece in PIECES:
            fed = np.zeros((*piece.shape, D))
            for row in range(2):
                at = np.flatnonzero(piece[row])
                fed[row, at] = x[row, done[row] : done[row] + at.size]
            documents = documents_of(jnp.asarray(piece))
            y, cache, _ = layer(jnp.asarray(fed), documents=documents, cache=cache)
            for row in range(2):
                at = np.flatnonzero(piece[row])
                wanted = whole[row, done[row] : done[row] + at.size]
                np.testing.assert_allclose(y[row, at], wanted, rtol=1e-9, atol=1e-11)
                done[row] += at.size


@pytest.mark.parametrize(
    "name",
    [
        "K3",
        *(pytest.param(n, marks=pytest.mark.full) for n in ("Gated DeltaNet", "linear attention")),
    ],
)
def test_probes(name):
    """Decays of all real tokens, states after the longest document of each row; no padding."""
    with jax.enable_x64(True):
        seed = int(np.random.default_rng().integers(1 << 30))
        layer = nnx.merge(*layer_of(VARIANTS[name], seed))
        x = np.random.default_rng(seed).normal(size=(*RAGGED.shape, D))
        x[RAGGED == 0] = 1e6
        run = jax.jit(lambda x, ids: layer(x, documents=documents_of(ids), probes=PROBES)[2])
        stats = {key: stat.value for key, stat in run(x, RAGGED).items()}
        square, decays = 0.0, []
        for row, longest in ((0, 3), (1, 1), (2, None)):
            for document in np.unique(RAGGED[row][RAGGED[row] > 0]):
                _, g, S = token_by_token(layer, jnp.asarray(x[row, RAGGED[row] == document]))
                decays.append(np.asarray(g))
                if document == longest:
                    square += np.square(S).sum((1, 2))
        assert relative_rms(stats["state_square"], square) < 1e-10, seed
        if name == "linear attention":
            assert stats.keys() == {"state_square"}
            return
        channels = stats["log_decay"].shape[-1]  # one per head, where the rule has one
        g = np.concatenate(decays)[..., :channels]
        assert channels == (1 if name == "Gated DeltaNet" else SIZES["key_dim"])
        assert relative_rms(stats["log_decay"], g.sum(0)) < 1e-10, seed
        edges = [0, *HALF_LIVES, np.inf]
        counts = np.apply_along_axis(lambda g: np.histogram(np.log(2) / -g, edges)[0], 0, g)
        assert np.array_equal(stats["half_life"], np.moveaxis(counts, 0, -1)), seed


def test_half_lives_fall_into_their_bins():
    lives = jnp.asarray([0.01, 0.125, 0.3, 2.0, 3.9, 4.0, 65535.0, 65536.0, 1e9, 7.0, jnp.inf])
    g = (-np.log(2) / np.asarray(lives)).astype(np.float32).reshape(1, -1, 1, 1)
    real = jnp.asarray([[True] * 9 + [False, True]])
    counts = half_life_counts(jnp.asarray(g), real)[0, 0]
    assert counts.sum() == 10 and len(counts) == len(HALF_LIVES) + 1
    found = {int(place): int(counts[place]) for place in np.flatnonzero(counts)}
    assert found == {0: 1, 1: 1, 2: 1, 5: 2, 6: 1, 19: 1, 20: 3}


def test_start_values():
    """K3R §2.1.1: A = 1, and steps dt in [1e-3, 1e-1]; Kimi Linear draws A from U(1, 16)."""
    k3 = KimiDeltaAttention(VARIANTS["K3"], D, rngs=nnx.Rngs(0))
    assert (k3.a_log[...] == 0).all()
    dt = jax.nn.softplus(k3.dt_bias[...])
    assert 0.999e-3 < dt.min() < dt.max() < 1.001e-1
    linear = KimiDeltaAttention(VARIANTS["Kimi Linear"], D, rngs=nnx.Rngs(0))
    assert (jnp.exp(linear.a_log[...]) >= 1).all() and (jnp.exp(linear.a_log[...]) <= 16).all()
