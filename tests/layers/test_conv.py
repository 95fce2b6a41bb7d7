"""The short convolution against a loop over tokens, with padding anywhere and a carried tail."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.layers.conv import short_conv
from k3jax.layers.documents import documents_of

WIDTH, CHANNELS = 4, 5


def loop(x, taps, ids, tail):
    """SiLU of the weighted last `WIDTH` real tokens of the document, token by token."""
    out, tails = np.zeros_like(x), np.zeros_like(tail)
    for row in range(x.shape[0]):
        past, document = list(tail[row]), None
        for t in np.flatnonzero(ids[row]):
            if document is not None and ids[row, t] != document:
                past = [np.zeros(CHANNELS)] * (WIDTH - 1)
            document = ids[row, t]
            past = [*past[-(WIDTH - 1) :], x[row, t]]
            y = sum(tap * token for tap, token in zip(taps, past, strict=True))
            out[row, t] = y / (1 + np.exp(-y))
        rest = [*tail[row], *x[row, np.flatnonzero(ids[row])]]
        tails[row] = np.stack(rest[-(WIDTH - 1) :])
    return out, tails


def random_ids(rng, rows, length, packed):
    ids = np.sort(rng.integers(1, 4, (rows, length)), axis=1) if packed else np.ones((rows, length))
    ids = ids.astype(np.int32)
    ids[rng.random(ids.shape) < 0.4] = 0
    ids[0] = np.where(np.arange(length) < length - 2, 1, 0)  # one row padded behind only
    return ids


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("gaps", [True, False, None], ids=["gaps", "none", "known none"])
def test_equals_the_loop_in_outputs_tails_and_gradients(packed, gaps):
    with jax.enable_x64(True):
        rng = np.random.default_rng()
        ids = random_ids(rng, 4, 11, packed)
        if not gaps:
            order = np.argsort(ids == 0, axis=1, kind="stable")
            ids = np.take_along_axis(ids, order, axis=1)
        x, taps = rng.normal(size=(4, 11, CHANNELS)), rng.normal(size=(WIDTH, CHANNELS))
        # A carried tail goes on with the row's one document.
        tail = np.zeros((4, WIDTH - 1, CHANNELS)) if packed else rng.normal(size=(4, 3, CHANNELS))
        documents = documents_of(jnp.asarray(ids), gapless=gaps is None)
        assert documents.gaps is None if gaps is None else bool(documents.gaps) == gaps
        y, after = short_conv(*map(jnp.asarray, (x, taps)), documents, jnp.asarray(tail))
        wanted, wanted_tail = loop(x, taps, ids, tail)
        np.testing.assert_allclose(y * (ids > 0)[..., None], wanted, rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(after, wanted_tail, rtol=0, atol=0)

        probe = rng.normal(size=x.shape) * (ids > 0)[..., None]
        arrays = [jnp.asarray(a) for a in (x, taps, tail)]

        def total(x, taps, tail):
            return (short_conv(x, taps, documents, tail)[0] * probe).sum()

        grads = jax.grad(total, argnums=(0, 1, 2))(*arrays)
        for array, grad in zip(arrays, grads, strict=True):
            direction = rng.normal(size=array.shape)
            step = 1e-6
            shifted = [
                total(*(a + s * step * direction if a is array else a for a in arrays))
                for s in (1, -1)
            ]
            numeric = (shifted[0] - shifted[1]) / (2 * step)
            np.testing.assert_allclose((grad * direction).sum(), numeric, rtol=1e-6, atol=1e-8)
        assert not np.any(np.asarray(grads[0])[ids == 0])


def test_no_tokens():
    documents = documents_of(jnp.zeros((2, 0), jnp.int32))
    tail = jnp.ones((2, WIDTH - 1, CHANNELS))
    y, after = short_conv(jnp.zeros((2, 0, CHANNELS)), jnp.ones((WIDTH, CHANNELS)), documents, tail)
    assert y.shape == (2, 0, CHANNELS) and (after == tail).all()
