"""Attention residuals against the formula written out: softmax over a list of sources."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from k3jax.layers.attn_res import AttentionResidual, depth_of, partial_mix, present

D, EPS = 12, 1e-5


def direct(sources, query):
    """`softmax_i(query . RMSNorm(v_i))` over a list of `[B, T, d]` sources (K3R eqs. 8-9)."""
    v = jnp.stack(sources)
    keys = v / jnp.sqrt((v**2).mean(-1, keepdims=True) + EPS)
    p = jax.nn.softmax(keys @ query, axis=0)
    return (p[..., None] * v).sum(0)


def filled(rng, pushes, slots, running):
    """A stream with `pushes` stored sources, and the list of all its sources."""
    values = [jnp.asarray(rng.normal(size=(2, 3, D))) for _ in range(pushes + 1)]
    depth = depth_of(values[0], slots)
    for value in values[1:]:
        depth = depth.push().add(value)
    return (depth, values) if running else (depth.push(), values)


@pytest.mark.parametrize("pushes", [0, 1, 4])
def test_mix_and_its_gradients_equal_the_formula(pushes):
    with jax.enable_x64(True):
        rng = np.random.default_rng()
        module = AttentionResidual(D, EPS, "mlp_res", rngs=nnx.Rngs(0))
        assert (module.query[...] == 0).all()  # a plain mean at the start
        module.gain.set_value(jnp.asarray(rng.normal(size=D)))
        module.query.set_value(jnp.asarray(rng.normal(size=D)))
        depth, sources = filled(rng, pushes, slots=5, running=True)
        probe = jnp.asarray(rng.normal(size=(2, 3, D)))
        graphdef, state = nnx.split(module)

        def mixed(state, depth):
            return nnx.merge(graphdef, state)(depth)

        def formula(state, sources):
            module = nnx.merge(graphdef, state)
            return direct(sources, module.gain[...] * module.query[...])

        np.testing.assert_allclose(
            mixed(state, depth), formula(state, sources), rtol=1e-12, atol=1e-12
        )
        found = jax.grad(lambda s, d: (mixed(s, d) * probe).sum(), argnums=(0, 1), allow_int=True)(
            state, depth
        )
        wanted = jax.grad(lambda s, v: (formula(s, v) * probe).sum(), argnums=(0, 1))(
            state, sources
        )
        for a, b in zip(jax.tree.leaves(found[0]), jax.tree.leaves(wanted[0]), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12)
        grads = [*found[1].stored[:pushes], found[1].run]
        for a, b in zip(grads, wanted[1], strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12)
        assert not np.any(found[1].stored[pushes:])


def test_two_phases_merge_to_the_same_mix():
    """AR Alg. 1: stored sources first, for many queries at once; the running sum later."""
    with jax.enable_x64(True):
        rng = np.random.default_rng()
        depth, sources = filled(rng, 3, slots=6, running=True)
        queries = jnp.asarray(rng.normal(size=(4, D)))
        first = partial_mix(depth.stored, present(depth), queries, EPS)
        second = partial_mix(depth.run[None], depth.running[None], queries, EPS)
        merged = first.merge(second).finish(jnp.float64)
        for query, mix in zip(queries, merged, strict=True):
            np.testing.assert_allclose(mix, direct(sources, query), rtol=1e-12, atol=1e-12)


def test_after_a_push_only_stored_sources_count():
    with jax.enable_x64(True):
        rng = np.random.default_rng()
        module = AttentionResidual(D, EPS, "mlp_res", rngs=nnx.Rngs(0))
        module.query.set_value(jnp.asarray(rng.normal(size=D)))
        depth, sources = filled(rng, 2, slots=4, running=False)
        np.testing.assert_allclose(
            module(depth), direct(sources, module.query[...]), rtol=1e-12, atol=1e-12
        )


@pytest.mark.parametrize(("pushes", "running"), [(0, True), (3, True), (2, False), (4, False)])
def test_the_probe_has_the_weights_of_the_mix(pushes, running):
    """Each source at its place, summed over real tokens; what is not there has nothing."""
    with jax.enable_x64(True):
        rng = np.random.default_rng()
        module = AttentionResidual(D, EPS, "mlp_res", rngs=nnx.Rngs(0))
        query = jnp.asarray(rng.normal(size=D))
        module.query.set_value(query)
        depth, sources = filled(rng, pushes, slots=5, running=running)
        real = jnp.asarray([[True, False, True], [False, True, True]])
        found = module.measure(depth, real)["mix_weights"].value
        v = jnp.stack(sources)
        p = jax.nn.softmax(v / jnp.sqrt((v**2).mean(-1, keepdims=True) + EPS) @ query, axis=0)
        expected = np.zeros(6)
        expected[: pushes + 1] = p[:, real].sum(1)
        np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-14)
        assert not found[pushes + 1 :].any()
        poisoned = dataclasses.replace(
            depth, run=jnp.where(real[..., None], depth.run, 1e200)
        )  # where padding stands
        np.testing.assert_array_equal(module.measure(poisoned, real)["mix_weights"].value, found)


def test_large_and_zero_sources_stay_finite():
    module = AttentionResidual(D, EPS, "mlp_res", rngs=nnx.Rngs(0))
    module.query.set_value(jnp.full((D,), 1e4))
    depth = depth_of(jnp.zeros((1, 2, D)), 2).push().add(jnp.full((1, 2, D), 1e4))
    grads = jax.grad(lambda d: module(d).sum(), allow_int=True)(depth)
    assert np.isfinite(module(depth)).all()
    assert np.isfinite(grads.run).all() and np.isfinite(grads.stored).all()
