"""Faults that KDA kernels had in public, each as the test that would have caught it: documents,
states, serving and sizes (documents of section B, D to H; `kda_recipes`)."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.kda import kda_step
from pallas_kernels.kda.gates import log_decay
from pallas_kernels.kda.tolerances import relative_rms
from tests.pallas_kernels.kda_recipes import (
    BOUNDED,
    PACKED,
    READY,
    SLOTS,
    bits,
    inputs,
    packed,
)
from tests.pallas_kernels.kda_suite import rng

# B. Documents that meet in a chunk


def test_18_19_39_documents_do_not_see_each_other(way):
    x = packed(inputs(18, **PACKED), 65, 125)
    loud = {n: np.array(x[n]) for n in ("q", "k", "v")}
    for y in loud.values():
        y[:, 65:] *= 1000
    a, b = (way(y, **SLOTS) for y in (x, x | loud))
    bits(a["o"], b["o"], slice(65))
    bits(a["final_state"], b["final_state"], slice(1))


def test_39_a_document_in_a_row_is_the_document_alone(way):
    x = packed(inputs(39, **PACKED), 63, 127)
    row = way(x, **SLOTS)
    tokens = ("q", "k", "v", "gate", "beta", "do")
    states = ("initial_state", "dfinal_state")
    single = {n: x[n][:1, 63:] for n in tokens} | {n: x[n][:1, 1:2] for n in states}
    alone = way(single, **BOUNDED)
    for name in ("o", "dq", "dk", "dv", "dgate", "dbeta"):
        assert relative_rms(row[name][:1, 63:], alone[name]) < way.bound(name, 1e-5)
    for name in ("final_state", "dinitial_state"):
        assert relative_rms(row[name][:1, 1:2], alone[name]) < way.bound(name, 1e-5)


def test_43_padding_is_as_if_it_were_not_there(way):
    x = packed(inputs(43, **PACKED), 60, 100)
    apart = np.sort(rng(43).permutation(190)[:160])  # the same tokens, with padding in between
    spread = {n: np.full_like(x[n], np.nan) for n in ("q", "k", "v", "gate", "beta", "do")}
    for n, y in spread.items():
        y[:, apart] = x[n][:, :160]
    ids = np.zeros_like(x["segment_ids"])
    ids[:, apart] = x["segment_ids"][:, :160]
    together = way(x, **SLOTS)
    out = way(x | spread | {"segment_ids": ids}, **SLOTS)
    for name in ("o", "dq", "dk", "dv", "dgate", "dbeta"):
        error = relative_rms(out[name][:, apart], together[name][:, :160])
        assert error < way.bound(name, 1e-5)
    for name in ("final_state", "dinitial_state"):
        assert relative_rms(out[name], together[name]) < way.bound(name, 1e-5)


# D. Documents and empty sequences


def test_32_33_36_37_40_43_packed_rows(way):
    # Two empty documents, restarts that are no multiple of a chunk, and a tail that is padding.
    x = packed(inputs(37, **PACKED), 50, 100, 0, 7, 0, 5)
    real = 162
    actual = way.held(x, **SLOTS)
    for slot in (2, 4):
        for result, given in (("final_state", "initial_state"), ("dinitial_state", "dfinal_state")):
            bits(actual[result], x[given].astype(np.float32), slot)
    # Garbage at padding, NaN included, reaches nothing; and a run repeats bit for bit.
    poisoned = {n: np.array(x[n]) for n in ("q", "k", "v", "gate", "beta", "do")}
    for y in poisoned.values():
        y[:, real:] = np.nan
    again = way(x | poisoned, **SLOTS)
    for name, y in actual.items():
        np.testing.assert_array_equal(again[name], y, err_msg=name)
    for name in ("dq", "dk", "dv", "dgate", "dbeta"):
        assert not again[name][:, real:].any()


def test_34_only_empty_documents(way):
    x = inputs(34, T=0, documents=2) | {"segment_ids": np.zeros((1, 0), np.int32)}
    out = way(x, **BOUNDED | {"max_documents": 2})
    np.testing.assert_array_equal(out["final_state"], x["initial_state"].astype(np.float32))


def test_34_a_row_of_padding(way):
    x = packed(inputs(34, **PACKED))
    out = way(x, **SLOTS)
    bits(out["final_state"], x["initial_state"].astype(np.float32))
    assert not out["o"].any() and not out["dq"].any()


def test_45_46_every_row_has_its_own_documents(way):
    x = inputs(45, **PACKED)
    rows = [np.repeat([1, 2, 6], [30, 50, 110]), np.repeat([0, 2, 0], [7, 100, 83])]
    way.held(x | {"segment_ids": np.stack(rows).astype(np.int32)}, **SLOTS)


# E. State


@functools.cache
def decoder(dtype):
    def decode(tokens, state):
        def step(state, token):
            o, state = kda_step(*token, state, gate_form="log_decay", beta_form="logit")
            return state, o

        return jax.lax.scan(step, state, jax.tree.map(lambda y: jnp.moveaxis(y, 1, 0), tokens))

    return jax.jit(decode)


def test_50_51_decoding_does_not_drift():
    # beta of a logit that bfloat16 would move by 1e-3, and decays that it would round to 1.
    x = inputs(51, T=4096)
    x |= {"gate": np.full_like(x["gate"], -8e-5), "beta": np.full_like(x["beta"], 0.5)}
    x["initial_state"] *= 0
    states = {}
    for dtype in ("float32", "float64"):
        with jax.enable_x64(dtype == "float64"):
            tokens = tuple(jnp.asarray(x[n], dtype) for n in ("q", "k", "v", "gate", "beta"))
            states[dtype] = decoder(dtype)(tokens, jnp.asarray(x["initial_state"][:, 0], dtype))[0]
            states[dtype] = np.asarray(states[dtype])
    assert relative_rms(states["float32"], states["float64"]) < 1e-5


def test_51_52_54_slow_decay_over_a_long_row(way):
    x = inputs(52, T=4096)
    x |= {"gate": np.full_like(x["gate"], -8e-5), "beta": 0.2 * rng(52).random(x["beta"].shape)}
    way.held_forward(x, **READY)


def test_56_inputs_are_left_alone_and_a_second_call_is_the_same(way):
    x = inputs(56)
    before = {n: y.copy() for n, y in x.items()}
    a, b = (way(x, **BOUNDED) for _ in range(2))
    jax.tree.map(np.testing.assert_array_equal, a, b)
    jax.tree.map(np.testing.assert_array_equal, x, before)


def test_58_the_bounded_gate_is_a_scaled_sigmoid():
    zero = jnp.zeros((1, 1))
    np.testing.assert_allclose(log_decay(zero, zero[0], zero, "bounded", -5.0), -2.5, rtol=1e-6)


# F. Serving


def test_36_60_61_63_rows_that_are_not_active_are_no_ops():
    r = rng(60)
    q, k, v, gate = (jnp.asarray(r.normal(size=(4, 2, 8)), jnp.float32) for _ in range(4))
    beta, state = jnp.ones((4, 2)), jnp.asarray(r.normal(size=(4, 2, 8, 8)), jnp.float32)
    active = jnp.array([True, False, True, False])
    step = functools.partial(kda_step, gate_form="bounded", beta_form="logit")
    o, new = step(q.at[1].set(jnp.nan), k, v.at[3].set(jnp.inf), gate, beta, state, active=active)
    full, all_new = step(q, k, v, gate, beta, state)
    bits(new[1::2], state[1::2])
    assert not np.asarray(o)[1::2].any()
    bits(new[::2], all_new[::2])
    bits(o[::2], full[::2])

    def total(gate):
        return step(q, k, v, gate, beta, state, active=active)[1].sum()

    assert np.isfinite(jax.grad(total)(gate.at[1].set(jnp.nan))).all()


# G, H. Sizes and widths


def test_67_more_rows_than_a_grid_axis_holds():
    one = jnp.ones((65600, 1, 1))
    o, state = kda_step(
        one, one, one, -one, one[..., 0], one[..., None], gate_form="log_decay", beta_form="value"
    )
    assert o.shape == (65600, 1, 1) and np.ptp(np.asarray(state)) == 0


@pytest.mark.full
def test_69_70_wide_heads_after_narrow_ones(way):
    for D in (64, 256):
        way.held(inputs(70, T=100, D=D), **BOUNDED)
