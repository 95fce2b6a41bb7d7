"""Maps of spans against whole rows, and linear attention against its own oracle."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.kda import kda, linear_attention, spans
from pallas_kernels.kda.tolerances import TOLERANCES, relative_rms
from tests.pallas_kernels.kda_suite import QUICK, rng

OPTIONS = {"gate_form": "bounded", "beta_form": "logit"}
TOKENS = ("q", "k", "v", "gate", "beta")


def inputs(B=2, T=96, H=1, HV=2, K=8, V=6, documents=1):
    r = rng("spans")
    x = {"q": r.normal(size=(B, T, H, K)), "k": r.normal(size=(B, T, H, K))}
    x |= {"v": r.normal(size=(B, T, HV, V)), "gate": r.normal(size=(B, T, HV, K)) - 2}
    x |= {"beta": r.normal(size=(B, T, HV))}
    x |= {"initial_state": r.normal(size=(B, documents, HV, K, V))}
    return {n: jnp.float32(y) for n, y in x.items()}


def close(actual, expected, bound="dq"):
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert relative_rms(a, e) < TOLERANCES["float32"][bound]


def test_a_row_in_four_spans_has_the_output_and_gradients_of_the_row():
    def whole(x):
        o, final = kda(**x, **OPTIONS, return_final_state=True, implementation="recurrent")
        return (o**2).sum() + (o * final.sum()).sum(), o

    def split(x):
        parts = {n: jnp.moveaxis(x[n].reshape(2, 4, 24, *x[n].shape[2:]), 1, 0) for n in TOKENS}
        rest = [parts[n] for n in TOKENS[1:]]
        maps = jax.vmap(functools.partial(spans.span_map, **OPTIONS))(*rest)
        before = spans.states_before(maps, x["initial_state"][:, 0])

        def span(part, state):
            return kda(**part, **OPTIONS, initial_state=state[:, None], return_final_state=True)

        o, finals = jax.vmap(span)(parts, before)
        o = jnp.moveaxis(o, 0, 1).reshape(x["v"].shape)
        return (o**2).sum() + (o * finals[-1].sum()).sum(), o

    results = [
        jax.jit(jax.grad(f, has_aux=True), compiler_options=QUICK)(inputs()) for f in (split, whole)
    ]
    close(*results)


def test_spans_follow_the_live_document():
    # Row 0: a document over three spans, an absent one, a short one, padding. Row 1: only padding
    # in its second span, and a document that starts with a span.
    ids = np.zeros((2, 96), np.int32)
    ids[0, 2:60], ids[0, 60:66], ids[0, 70:75] = 1, 3, 4
    ids[1, :20], ids[1, 48:] = 2, 4
    x = inputs(documents=4)
    final = kda(
        **x,
        **OPTIONS,
        segment_ids=ids,
        max_documents=4,
        return_final_state=True,
        implementation="recurrent",
    )[1]
    summary = jax.jit(
        functools.partial(spans.span_map, **OPTIONS, max_documents=4), compiler_options=QUICK
    )
    before, state = jnp.zeros(2, jnp.int32), jnp.zeros((2, 2, 8, 6))
    for rows in (slice(0, 24), slice(24, 48), slice(48, 72), slice(72, 96)):
        span = summary(
            *(x[n][:, rows] for n in TOKENS[1:]),
            initial_state=x["initial_state"],
            segment_ids=ids[:, rows],
            document_before=before,
        )
        state = spans.apply(span, state)
        if rows.start == 24:  # row 1 passes through padding
            np.testing.assert_allclose(span.M[1], np.broadcast_to(np.eye(8), (2, 8, 8)))
            close(state[1], final[1, 1], "o")
        if rows.start == 48:  # both rows start a document here: nothing of before is left
            assert not np.asarray(span.M).any()
        before = jnp.maximum(before, ids[:, rows].max(axis=1))
    close(state, final[:, 3], "o")


def test_composition_is_associative_and_has_an_identity():
    r = rng("compose")
    a, b, c = (
        spans.SpanMap(jnp.float32(r.normal(size=(4, 4))), jnp.float32(r.normal(size=(4, 3))))
        for _ in range(3)
    )
    left = spans.compose(spans.compose(a, b), c)
    close(left, spans.compose(a, spans.compose(b, c)), "o")
    empty = spans.span_map(
        *(jnp.zeros((1, 0, 1, 4)) for _ in range(3)), jnp.zeros((1, 0, 1)), **OPTIONS
    )
    close(spans.compose(spans.SpanMap(empty.M[0, 0], empty.N[0, 0]), empty), empty, "o")
    np.testing.assert_array_equal(empty.M[0, 0], np.eye(4))


def test_linear_attention_and_its_gradients():
    x = inputs(T=150, documents=3)
    ids = np.zeros((2, 150), np.int32)
    ids[0, 3:70], ids[0, 80:81], ids[0, 81:150] = 1, 2, 3
    ids[1, :149] = 2

    def loss(q, k, v, gate, state, implementation):
        o, final = linear_attention(
            q,
            k,
            v,
            gate,
            initial_state=state,
            segment_ids=ids,
            max_documents=3,
            return_final_state=True,
            implementation=implementation,
        )
        return (o * jnp.cos(o)).sum() + (final**2).sum(), (o, final)

    call = jax.value_and_grad(loss, argnums=range(5), has_aux=True)
    call = jax.jit(call, static_argnames="implementation", compiler_options=QUICK)
    arguments = (x["q"], x["k"], x["v"], -jnp.exp(x["gate"]), x["initial_state"])
    results = [call(*arguments, implementation=n) for n in (None, "recurrent")]
    close(*results)
    o, final = results[0][0][1]
    assert not np.asarray(o)[ids == 0].any()
    np.testing.assert_array_equal(final[1, 0], x["initial_state"][1, 0])


def test_linear_attention_without_decay_is_a_cumulative_sum():
    r = rng("cumulative")
    q, k, v = (jnp.float32(r.normal(size=(1, 70, 1, 8))) for _ in range(3))
    o, final = jax.jit(functools.partial(linear_attention, return_final_state=True))(q, k, v)
    state = np.cumsum(np.einsum("btk,btv->btkv", k[:, :, 0], v[:, :, 0]), axis=1)
    assert relative_rms(o[:, :, 0], np.einsum("btk,btkv->btv", q[:, :, 0], state) / 8**0.5) < 1e-5
    assert relative_rms(final[:, 0, 0], state[:, -1]) < 1e-5
