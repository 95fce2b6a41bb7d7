"""Blockwise attention against a dense softmax in float64, in every layout and transformation."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.layers.attention import Visibility, attend, attention, causal
from k3jax.layers.documents import documents_of
from k3jax.sharding import make_mesh
from tests.layers.rows import dense_attention, relative_rms

SCALE = 0.3
B, T, H, HK, D, V, BLOCK = 2, 37, 4, 2, 12, 8, 8


def draw(seed, Tq=T, Tk=T, dtype=np.float64, B=B, H=H, HK=HK, D=D, V=V):
    rng = np.random.default_rng(seed)
    shapes = (B, Tq, H, D), (B, Tk, HK, D), (B, Tk, HK, V), (B, Tq, H, V)
    return [rng.normal(0, 1.5, shape).astype(jnp.dtype(dtype)) for shape in shapes]


def along(segments, kv_segments=None, q_index=None):
    """Visibility along rows, from numpy."""
    segments = np.asarray(segments, np.int32)
    kv_segments = segments if kv_segments is None else np.asarray(kv_segments, np.int32)
    q_index = np.indices(segments.shape)[1] if q_index is None else q_index
    kv_index = np.indices(kv_segments.shape)[1]
    arrays = segments, kv_segments, q_index, kv_index
    return Visibility(*(np.asarray(x, np.int32) for x in arrays))


def pairs(seen):
    same = seen.q_segments[:, :, None] == seen.kv_segments[:, None]
    return (
        same
        & (seen.q_segments > 0)[:, :, None]
        & (seen.kv_index[:, None] <= seen.q_index[:, :, None])
    )


@partial(jax.jit, static_argnames="block")
def blockwise(q, k, v, do, seen, block=BLOCK):
    """`[o, max_logit, dq, dk, dv]`; the cotangent of max_logit is NaN, which must not matter."""
    fn = partial(attention, seen=seen, scale=SCALE, block=block)
    (o, max_logit), vjp = jax.vjp(fn, q, k, v)
    return o, max_logit, *vjp((do.astype(o.dtype), jnp.full_like(max_logit, jnp.nan)))


@jax.jit
def dense(q, k, v, do, seen):
    fn = partial(dense_attention, visible=pairs(seen), scale=SCALE)
    (o, max_logit), vjp = jax.vjp(fn, q, k, v)
    return o, max_logit, *vjp((do, jnp.zeros_like(max_logit)))


def check(got, want, forward, backward=None):
    """Relative RMS of `got` within `forward`, and of its gradients within `backward`."""
    for name, a, b in zip(("o", "max_logit", "dq", "dk", "dv"), got, want, strict=True):
        blind = np.isneginf(b)
        assert np.array_equal(np.isneginf(np.asarray(a, np.float64)), blind), name
        error = relative_rms(np.where(blind, 0, a), np.where(blind, 0, b))
        limit = backward if backward and name.startswith("d") else forward
        assert error <= limit, f"{name}: {error:.2e}"  # a NaN fails


def layouts():
    rng = np.random.default_rng(7)
    one = np.ones((B, T), int)
    packed = np.stack([np.repeat([1, 2, 3, 5], [1, 17, 16, 3]), np.repeat([1, 2], [8, 29])])
    left, right, inside = one.copy(), packed.copy(), packed.copy()
    left[0, :19], right[:, 30:], inside[:, 5:11], inside[1, 20:23] = 0, 0, 0, 0
    yield "one", along(one)
    yield "packed", along(packed)
    yield "left", along(left)
    yield "right", along(right)
    yield "inside", along(inside)
    yield "blank", along(0 * one)
    # No order at all: nothing in the contract asks for one.
    segments = rng.integers(0, 4, (2, B, T))
    index = rng.integers(-50, 50, (2, B, T))
    yield "shuffled", Visibility(*(x.astype(np.int32) for x in (*segments, *index)))


LAYOUTS = dict(layouts())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_equals_dense_softmax_in_float64(layout):
    seen = LAYOUTS[layout]
    with jax.enable_x64(True):
        args = draw(3)
        got, want = blockwise(*args, seen), dense(*args, seen)
        assert got[0].dtype == got[1].dtype == jnp.float64
        check(got, want, 1e-13)
        # What sees nothing, or is seen by nothing, is zero to the bit.
        visible = pairs(seen)
        for x in (got[0], got[2]):
            assert not np.any(np.asarray(x)[~visible.any(2)])
        for x in got[3:]:
            assert not np.any(np.asarray(x)[~visible.any(1)])


@pytest.mark.parametrize("dtype, limits", [("float32", (1e-6, 2e-6)), ("bfloat16", (4e-3, 8e-3))])
def test_float32_and_bfloat16(dtype, limits):
    for layout in ("inside", "shuffled"):
        seen, args = LAYOUTS[layout], draw(4, dtype=dtype)
        got = blockwise(*args, seen)
        assert got[0].dtype == got[1].dtype == jnp.float32
        assert all(x.dtype == dtype for x in got[2:])
        with jax.enable_x64(True):
            want = dense(*(x.astype(np.float64) for x in args), seen)
        check(got, want, *limits)


def test_queries_behind_a_cache():
    """Other lengths on both sides, and each row its own offset."""
    with jax.enable_x64(True):
        Tq, Tk = 5, 33
        before = np.array([[24], [0]])  # the last query of a row opens a block of seven keys
        filled = np.arange(Tk) < before + Tq
        seen = along(np.ones((B, Tq)), filled, before + np.arange(Tq))
        args = draw(5, Tq, Tk)
        check(blockwise(*args, seen), dense(*args, seen), 1e-13)


def test_widths_of_kimi_k3():
    """Keys of 192, values of 128, two blocks of the default size, large logits."""
    sizes = dict(B=1, H=2, HK=2, D=192, V=128)
    seen = along(np.repeat([[1, 2]], [100, 200], axis=1))
    args = draw(6, 300, 300, jnp.float32, **sizes)
    got = blockwise(*args, seen, block=256)
    with jax.enable_x64(True):
        want = dense(*(x.astype(np.float64) for x in args), seen)
    assert np.asarray(want[1]).max() > 30
    check(got, want, 1e-5)


def test_packed_equals_separate():
    lengths = (1, 9, 27)
    ends = np.cumsum(lengths)
    with jax.enable_x64(True):
        q, k, v, do = draw(8, B=1)
        packed = blockwise(q, k, v, do, along(np.repeat([[1, 2, 3]], lengths, axis=1)))

        def rows(x):  # each document at the start of its own row
            parts = [x[0, end - n : end] for n, end in zip(lengths, ends, strict=True)]
            return np.stack([np.pad(p, ((0, T - len(p)), (0, 0), (0, 0))) for p in parts])

        alone = along(np.arange(T) < np.array(lengths)[:, None])
        separate = blockwise(*(rows(x) for x in (q, k, v, do)), alone)
        packed, separate = ([np.asarray(x) for x in xs] for xs in (packed, separate))
        for i in (0, 2, 3, 4):
            joined = np.concatenate([x[:n] for x, n in zip(separate[i], lengths, strict=True)])
            assert relative_rms(packed[i][0], joined) <= 1e-14
        assert np.allclose(packed[1][0], separate[1].max(0), rtol=1e-14)


@pytest.mark.parametrize("Tq, Tk, rows", [(0, 5, 2), (5, 0, 2), (0, 0, 2), (3, 3, 0)])
def test_empty(Tq, Tk, rows):
    seen = along(np.ones((rows, Tq)), np.ones((rows, Tk)))
    args = draw(0, Tq, Tk, jnp.float32, B=rows)
    o, max_logit, *grads = blockwise(*args, seen)
    assert o.shape == (rows, Tq, H, V) and not np.any(o)
    assert max_logit.shape == (rows, H) and np.all(np.isneginf(max_logit))
    assert not any(np.any(grad) for grad in grads)


def test_invisible_blocks_are_never_read():
    """NaN in blocks that a query cannot see leaves it alone, in both passes."""
    q, k, v, do = draw(9, 32, 32, jnp.float32)
    seen = along(np.repeat([[1, 2]] * B, [16, 16], axis=1))
    clean = [np.asarray(x) for x in blockwise(q, k, v, do, seen)]
    for start, end, reached in ((0, 16, slice(16, 32)), (24, 32, slice(0, 24))):
        spoiled = k.copy()
        spoiled[:, start:end] = np.nan
        o, _, dq, *_ = (np.asarray(x) for x in blockwise(q, spoiled, v, do, seen))
        assert np.array_equal(o[:, reached], clean[0][:, reached])
        assert np.array_equal(dq[:, reached], clean[2][:, reached])
        assert np.all(np.isnan(o[:, start:end]))  # what does see them shows it


def test_memory_grows_linearly():
    def temporary(T):
        x = jax.ShapeDtypeStruct((1, T, 1, 16), jnp.float32)
        ids = jax.ShapeDtypeStruct((1, T), jnp.int32)
        compiled = blockwise.lower(x, x, x, x, Visibility(ids, ids, ids, ids), block=256).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    short, long = temporary(8192), temporary(65536)
    assert long <= 8 * short
    assert long <= 65536 * 16 * 4 * 12  # a dozen arrays like q; scores would take 16 GiB


def test_under_transformations():
    """scan over layers, each rematerialised, under vmap: as a plain loop over dense attention."""
    seen = LAYOUTS["inside"]

    def stack(attend, q, k, v):
        layer = jax.checkpoint(lambda v, k: (attend(q, k, v), None))
        return jnp.sin(jax.lax.scan(layer, v, k)[0]).sum()

    def mapped(fn, q, k, v):
        return jax.vmap(lambda q: stack(fn, q, k, v))(q).sum()

    with jax.enable_x64(True):
        q, k, v, _ = draw(10, H=2, HK=2)
        q, k = np.stack([q, -q]), np.stack([k, 0.5 * k])
        grads = [
            jax.jit(jax.grad(partial(mapped, fn), (0, 1, 2)))(q, k, v)
            for fn in (
                lambda q, k, v: attention(q, k, v, seen, scale=SCALE, block=BLOCK)[0],
                lambda q, k, v: dense_attention(q, k, v, pairs(seen), SCALE)[0],
            )
        ]
        for got, want in zip(*grads, strict=True):
            assert relative_rms(got, want) <= 1e-13


def test_mapped_over_rows_of_other_layouts():
    """Under vmap, the blocks that are read differ from one row to the next."""
    with jax.enable_x64(True):
        layouts = [LAYOUTS[name] for name in ("packed", "left", "shuffled")]
        seen = jax.tree.map(lambda *x: np.stack(x), *layouts)
        args = draw(11)
        got = jax.vmap(lambda seen: blockwise(*args, seen))(seen)
        for i, layout in enumerate(layouts):
            check([x[i] for x in got], dense(*args, layout), 1e-13)


def test_on_the_mesh():
    """`attend` under Explicit axes: the same, with the largest logits of all rows."""
    seen = LAYOUTS["inside"]
    q, k, v, do = draw(12, dtype=jnp.float32)
    want = blockwise(q, k, v, do, seen)

    @jax.jit
    def run(q, k, v, do, ids):
        seen = causal(documents_of(ids))
        (o, max_logit), vjp = jax.vjp(lambda q, k, v: attend(q, (k, v), seen, SCALE), q, k, v)
        return o, max_logit, *vjp((do, jnp.zeros_like(max_logit)))

    with jax.set_mesh(make_mesh()):
        rows = jax.P(("data", "fsdp", "expert"), "context")
        args = [jax.sharding.reshard(x, jax.P(*rows, "tensor", None)) for x in (q, k, v, do)]
        got = run(*args, jax.sharding.reshard(seen.q_segments, rows))
        assert jax.typeof(got[1]).sharding.spec == jax.P("tensor")
    for a, b in zip(got, (want[0], want[1].max(0), *want[2:]), strict=True):
        assert relative_rms(a, b) <= 1e-6


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(q=jnp.ones((2, 3, 4))), r"q: float32\[2, 3, 4\], must be floating \[B, T, H, D\]"),
        (dict(v=jnp.ones((2, 5, 2, 8), int)), r"v: int32\[2, 5, 2, 8\], must be floating"),
        (dict(k=jnp.ones((2, 5, 2, 6), jnp.bfloat16)), "k: bfloat16, must be that of q, float32"),
        (
            dict(k=jnp.ones((2, 5, 3, 6))),
            r"k: \[2, 5, 3, 6\], must be \[2, Tk, a divisor of 4, 6\]",
        ),
        (dict(v=jnp.ones((2, 4, 2, 8))), r"v: \[2, 4, 2, 8\], must be \[2, 5, 2, V\]"),
        (
            dict(q_index=jnp.ones((2, 5), jnp.int32)),
            r"q_index: int32\[2, 5\], must be int32\[2, 3\]",
        ),
        (dict(kv_segments=jnp.ones((2, 5))), r"kv_segments: float32\[2, 5\], must be int32"),
    ],
)
def test_bad_arguments(change, message):
    arrays = dict(q=jnp.ones((2, 3, 4, 6)), k=jnp.ones((2, 5, 2, 6)), v=jnp.ones((2, 5, 2, 8)))
    seen = vars(along(np.ones((2, 3)), np.ones((2, 5))))
    arrays |= {name: x for name, x in change.items() if name in arrays}
    seen = seen | {name: x for name, x in change.items() if name in seen}
    with pytest.raises(ValueError, match=message):
        attention(**arrays, seen=Visibility(**seen), scale=1.0)
