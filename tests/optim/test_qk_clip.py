"""QK clip: a head above the limit comes back to it, on the same batch; nothing else moves."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from k3jax.config import GQAConfig, MLAConfig
from k3jax.layers.documents import documents_of
from k3jax.layers.gqa import GroupedQueryAttention
from k3jax.layers.mla import MultiHeadLatentAttention
from k3jax.layers.stats import Max
from k3jax.optim import clip_logits
from k3jax.params import spec_of_variable
from tests.layers.rows import RAGGED, randomised

WIDTH = 20
MLA = {"kv_lora_rank": 6, "qk_nope_dim": 5, "qk_rope_dim": 3, "value_dim": 4}
LAYERS = {
    "mla": (MultiHeadLatentAttention, MLAConfig(heads=3, **MLA)),
    "mla with a query rank": (MultiHeadLatentAttention, MLAConfig(3, q_lora_rank=7, **MLA)),
    "mla without a shared key": (
        MultiHeadLatentAttention,
        MLAConfig(3, **MLA | {"qk_rope_dim": 0}),
    ),
    "gqa": (GroupedQueryAttention, GQAConfig(heads=6, kv_heads=3, head_dim=4, rope=True)),
    "one key head": (GroupedQueryAttention, GQAConfig(heads=3, kv_heads=1, head_dim=4)),
}


def columns(variable, head):
    """The columns of one head."""
    heads = spec_of_variable(variable).heads
    return variable[...].reshape(-1, heads, variable.shape[-1] // heads)[:, head]


@pytest.mark.parametrize("name", LAYERS)
def test_a_head_over_the_limit_comes_back_to_it(name):
    kind, config = LAYERS[name]
    with jax.enable_x64(True):
        graphdef, params = randomised(kind(config, WIDTH, rngs=None), jnp.float64)
        x = jnp.asarray(np.random.default_rng().normal(size=(*RAGGED.shape, WIDTH)))
        x = jnp.where((RAGGED > 0)[..., None], x, 1e3)  # padding must not count

        @jax.jit
        def largest(params):
            layer = nnx.merge(graphdef, params)
            return layer(x, documents=documents_of(jnp.asarray(RAGGED)))[2]["max_logit"].value

        query = next(n for n in ("query", "query_up") if n in params)
        shared_by = config.heads // getattr(config, "kv_heads", config.heads)
        group = config.heads // shared_by - 1  # the last one
        before = largest(params)
        scale = np.ones(config.heads)
        top = int(before[-shared_by:].argmax()) + shared_by * group
        limit = 2 * float(before.max())
        scale[top] = 3 * limit / before[top]
        wide = params[query][...].reshape(-1, config.heads, params[query].shape[-1] // config.heads)
        forced = params | {}
        forced[query] = params[query].replace((wide * scale[:, None]).reshape(params[query].shape))
        stats = {"max_logit": Max(largest(forced))}
        assert float(stats["max_logit"].value[top]) == pytest.approx(3 * limit)
        clipped, figures = jax.jit(lambda p, s: clip_logits(p, s, limit))(forced, stats)
        after = largest(clipped)

        assert float(after[top]) == pytest.approx(limit, rel=1e-12)
        others = np.arange(config.heads) // shared_by != group
        np.testing.assert_array_equal(after[others], before[others])
        assert after.max() <= limit * (1 + 1e-12)
        assert figures["qk_clipped_heads"] == 1
        assert float(figures["qk_logit_max"]) == pytest.approx(3 * limit)
        moved = {n for n, v in forced.items() if not np.array_equal(v[...], clipped[n][...])}
        if isinstance(config, MLAConfig):
            assert moved == {query, "kv_up"}
            nope = config.qk_nope_dim
            q_ratio = columns(clipped[query], top) / columns(forced[query], top)
            np.testing.assert_allclose(q_ratio[:, :nope], 3**-0.5, rtol=1e-12)
            np.testing.assert_allclose(q_ratio[:, nope:], 1 / 3, rtol=1e-12)
            k_ratio = columns(clipped["kv_up"], top) / columns(forced["kv_up"], top)
            np.testing.assert_allclose(k_ratio[:, :nope], 3**-0.5, rtol=1e-12)
            assert np.all(k_ratio[:, nope:] == 1)
        else:
            assert moved == {"query", "key"}
        for n in moved:
            for head in range(spec_of_variable(forced[n]).heads):
                if head * config.heads // spec_of_variable(forced[n]).heads // shared_by != group:
                    assert np.array_equal(columns(forced[n], head), columns(clipped[n], head))


def test_stacked_layers_are_clipped_apart():
    layer = MultiHeadLatentAttention(MLAConfig(2, **MLA), WIDTH, rngs=nnx.Rngs(0))
    one = nnx.state(layer)
    stack = jax.tree.map(lambda a: jnp.stack([a, a, a]), one)
    logits = {"max_logit": Max(jnp.array([[1.0, 8.0], [-jnp.inf, -3.0], [jnp.nan, 4.0]]))}
    new, figures = clip_logits(nnx.State({"mixer": stack}), {"mixer": logits}, 4.0)
    for name in ("query", "kv_up"):
        old, now = (np.asarray(tree[name][...]) for tree in (stack, new["mixer"]))
        assert np.array_equal(old[1:], now[1:])
        halves = [half.reshape(len(old[0]), 2, -1) for half in (old[0], now[0])]
        assert np.array_equal(halves[0][:, 0], halves[1][:, 0])
        assert not np.array_equal(halves[0][:, 1], halves[1][:, 1])
    assert figures["qk_clipped_heads"] == 1


def test_without_a_limit_the_largest_logit_is_still_reported():
    params = nnx.state(MultiHeadLatentAttention(MLAConfig(2, **MLA), WIDTH, rngs=nnx.Rngs(0)))
    new, figures = clip_logits(params, {"max_logit": Max(jnp.array([1e4, 3.0]))}, 0.0)
    assert figures["qk_logit_max"] == 1e4 and figures["qk_clipped_heads"] == 0
    assert all(np.array_equal(params[n][...], new[n][...]) for n in params)
    assert clip_logits(nnx.State({}), {}, 1.0)[1] == {}
