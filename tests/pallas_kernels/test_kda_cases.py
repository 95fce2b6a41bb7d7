"""Faults that KDA kernels had in public, each as the test that would have caught it.

The numbers are those of the collection of reports that this project keeps. Shapes are cut to what
shows the fault on a CPU, and few, so that most tests share a compilation; those that need their
length or width are marked `full`. Not repeated is what the shared suite covers already (12, 47, 48,
77, 78: every T, odd widths, grouped heads, narrow V) and what arrays of jax cannot have (strides:
62, 75, 76).
"""

import functools
import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.kda import kda, kda_step, spans
from pallas_kernels.kda.gates import log_decay
from pallas_kernels.kda.tolerances import TOLERANCES, relative_rms
from tests.pallas_kernels.kda_suite import (
    FLOATS,
    QUICK,
    TOKENS,
    compare,
    evaluate,
    oracle,
    rng,
    rounded,
)

BOUNDED = {"gate_form": "bounded", "beta_form": "logit", "return_final_state": True}
SLOTS = BOUNDED | {"max_documents": 6}
PACKED = {"T": 190, "B": 2, "documents": 6}
READY = {"gate_form": "log_decay", "beta_form": "value", "return_final_state": True}


def inputs(name: object, T: int = 127, H: int = 1, D: int = 16, B: int = 1, documents: int = 1):
    """Normal inputs and cotangents; tests overwrite what their recipe says."""
    r = rng("cases", name)
    x = {n: r.normal(size=(B, T, H, D)) for n in ("q", "k", "v", "gate", "do")}
    x["beta"] = r.normal(size=(B, T, H))
    for n in ("initial_state", "dfinal_state"):
        x[n] = r.normal(size=(B, documents, H, D, D))
    return x


def ready(x, log_decay):
    """The same inputs with a ready log decay and write strengths in (0, 1)."""
    gate = np.broadcast_to(np.asarray(log_decay, np.float64), x["gate"].shape)
    return x | {"gate": np.array(gate), "beta": rng("beta").uniform(0.1, 1, x["beta"].shape)}


def packed(x, *lengths: int):
    ids = np.repeat(np.arange(1, len(lengths) + 1), lengths)
    ids = np.pad(ids, (0, x["q"].shape[1] - len(ids)))
    return x | {"segment_ids": np.broadcast_to(ids.astype(np.int32), x["q"].shape[:2])}


class Way(NamedTuple):
    """How a recipe is run: an implementation and the dtype of its tokens."""

    implementation: str
    dtype: str = "float32"

    def __call__(self, x, **options):
        return evaluate(x, self.implementation, self.dtype, **options)

    def oracle(self, x, **options):
        return oracle(x, self.dtype, **options)

    def held(self, x, cancels=False, **options):
        """`cancels`: pseudo-values do, which is what `KdaSuite.slack_of_half` is for."""
        actual = self(x, **options)
        slack = 3.0 if cancels and self == Way("mosaic_tpu", "bfloat16") else 1.0
        compare(actual, self.oracle(x, **options), self.dtype, slack=slack)
        return actual

    def held_forward(self, x, **options):
        """For rows that are too long for the oracle's gradient."""
        actual = forward(x, self.implementation, self.dtype, **options)
        x = {n: y.astype(np.float64) for n, y in rounded(x, self.dtype).items()}
        expected = forward(x, "recurrent", "float64", **options)
        for a, e, name in zip(actual, expected, ("o", "final_state"), strict=True):
            assert relative_rms(a, e) < self.bound(name, 1e-5)

    def bound(self, name, figure):
        """A recipe's own figure for an output in float32; the table's in narrower dtypes."""
        return figure if self.dtype == "float32" else TOLERANCES[self.dtype][name]


WAYS = (
    Way("chunked"),
    Way("mosaic_tpu"),
    pytest.param(Way("mosaic_tpu", "bfloat16"), marks=pytest.mark.full),
)


@pytest.fixture(params=WAYS, ids=lambda way: "-".join(way))
def way(request):
    return request.param


def bits(a, b, rows=slice(None)):
    np.testing.assert_array_equal(np.asarray(a)[:, rows], np.asarray(b)[:, rows])


# A. Overflow from gates


@pytest.mark.parametrize("g", [-1.0, -3.0, -5.0, -5.6, -6.0, -20.0, -30.0, -176.0])
def test_01_03_04_05_07_09_constant_decays_of_any_size(way, g):
    way.held(ready(inputs(g), g), **READY)


@pytest.mark.parametrize("bound", [-5.0, pytest.param(-11.1, marks=pytest.mark.full)])
def test_01_23_saturated_bounded_gates(way, bound):
    x = inputs(bound)
    options = BOUNDED if bound == -5 else BOUNDED | {"lower_bound": bound}
    way.held(x | {"gate": np.full_like(x["gate"], 12.0)}, **options)


def test_06_softplus_gate_of_kimi_linear(way):
    x = inputs(6) | {"a_log": np.full(1, np.log(16.0)), "dt_bias": np.zeros((1, 16))}
    way.held(x, **BOUNDED | {"gate_form": "softplus"})


def test_10_masked_gates_of_minus_1000_on_a_ragged_row(way):
    x = inputs(10)
    gate = np.where(rng("mask").random(x["gate"].shape) < 0.3, -1000.0, -0.01)
    way.held(ready(x, gate), **READY)


@pytest.mark.parametrize("form", ["bounded", "softplus"])
@pytest.mark.parametrize("a_log", [50.0, 90.0, 100.0])
def test_11_saturated_gate_with_a_huge_a_log(way, form, a_log):
    x = inputs(11) | {"a_log": np.full(1, a_log), "dt_bias": np.zeros((1, 16))}
    x["gate"] = np.where(x["gate"] > 0, 10.0, -10.0)
    grads = way(x, **BOUNDED | {"gate_form": form})
    assert all(np.isfinite(y).all() for y in grads.values())
    if form == "bounded":
        assert not grads["dgate"].any() and not grads["da_log"].any()


# B. Triangular inverse


def one_key(T, D):
    x = inputs(("one key", T), T=T, D=D)
    x["k"] = np.broadcast_to(x["k"][:, :1], x["k"].shape)
    return x | {"gate": np.full_like(x["gate"], -12.0), "beta": np.full_like(x["beta"], 8.0)}


def test_14_15_one_key_repeated_with_slow_decay(way):
    way.held(one_key(127, 16), cancels=True, **BOUNDED)


@pytest.mark.full
def test_14_one_key_repeated_16384_times(way):
    way.held_forward(one_key(16384, 128), **BOUNDED)


@pytest.mark.parametrize("noise", [0.0, 0.3])
def test_17_correlated_keys_with_slow_decay_and_full_writes(way, noise):
    x = inputs(17)
    x["k"] = x["k"][:, :1] + noise * x["k"]
    way.held(ready(x, -1e-3) | {"beta": np.ones_like(x["beta"])}, cancels=True, **READY)


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


def test_21_59_decay_comes_before_the_delta_rule_and_is_in_nats(way):
    # Two tokens of K = V = 1, and nothing after them.
    x = inputs(21)
    for n in ("q", "k", "v", "gate", "beta", "initial_state"):
        x[n] = np.zeros_like(x[n])
    for n in ("q", "k", "v"):
        x[n][:, :2, :, 0] = 1
    x["gate"][:, :2], x["beta"][:, :2] = -1, 1
    one_write = x | {"beta": np.where(np.arange(127) == 0, x["beta"][..., 0], 0)[..., None]}
    rtol = way.bound("final_state", 1e-5)
    for result in (way.oracle, way):
        final = result(x, **READY)["final_state"]
        np.testing.assert_allclose(final[0, 0, 0, 0, 0], 1.0, rtol=rtol)
        assert np.abs(final).sum() == final[0, 0, 0, 0, 0]
        decayed = result(one_write, **READY)["final_state"][0, 0, 0, 0, 0]
        np.testing.assert_allclose(decayed, np.exp(-1.0), rtol=rtol)


# C. Causality and cancellation


@pytest.mark.parametrize("bounded", [True, False])
def test_22_later_tokens_change_no_bit_of_earlier_rows(way, bounded):
    options = BOUNDED if bounded else READY
    x = inputs(22) if bounded else ready(inputs(22), -20 * rng(22).random((1, 127, 1, 16)))
    x["do"][:, 40:] = 0
    x["dfinal_state"] *= 0
    edit = {n: np.array(x[n]) for n in ("q", "k", "v", "gate", "beta")}
    for y in edit.values():
        y[:, 40:] *= 1.5
    a, b = way(x, **options), way(x | edit, **options)
    for name in ("o", "dq", "dk", "dv", "dgate", "dbeta"):
        bits(a[name], b[name], slice(40))


# Without optimisations LLVM contracts a product and a sum in one loop and not in the next.
ORDINARY = {"xla_backend_optimization_level": 3, "xla_llvm_disable_expensive_passes": False}


def test_22_49_83_truncated_and_resumed_rows_have_the_same_bits(way):
    # 64 and 256 tokens are one span, and 320 are two: a loop of one step is compiled as no loop.
    x = inputs(83, T=320)
    x["v"], x["initial_state"] = x["v"][..., :8], x["initial_state"][..., :8]
    x = {n: jnp.asarray(y) for n, y in rounded(x, way.dtype).items()}
    call = functools.partial(kda, implementation=way.implementation, **BOUNDED)
    call = jax.jit(call, compiler_options=ORDINARY)

    def part(state, rows):
        return call(**{n: x[n][:, rows] for n in TOKENS}, initial_state=state)

    whole, end = part(x["initial_state"], slice(None))
    first, state = part(x["initial_state"], slice(256))
    rest, last = part(state, slice(256, None))
    bits(np.concatenate([first, rest], axis=1), whole)
    bits(last, end)
    bits(part(x["initial_state"], slice(64))[0], whole[:, :64])


@pytest.mark.full
@pytest.mark.parametrize("T", [40, 64, 127, 500])
def test_22_gradients_of_a_prefix_have_the_same_bits_in_a_longer_row(way, T):
    x = inputs(22, T=600)
    x = {n: jnp.asarray(rounded(x, way.dtype)[n]) for n in (*TOKENS, "do")}

    def gradients(x, do):
        def o(x):
            options = {"gate_form": "bounded", "beta_form": "logit"}
            return kda(**x, implementation=way.implementation, **options)[0]

        out, pull = jax.vjp(o, x)
        return {"o": out} | pull(do)[0]

    call = jax.jit(gradients, compiler_options=ORDINARY)
    do = x.pop("do")
    long = call(x, do.at[:, T:].set(0))
    short = call({n: y[:, :T] for n, y in x.items()}, do[:, :T])
    for name, y in short.items():
        bits(long[name], y, slice(T))


def test_24_pairs_with_themselves_have_no_gate_gradient(way):
    # One-hot keys, no key twice: no pair of different tokens shares a channel.
    x = ready(inputs(24), -5.0)
    x["q"] = x["k"] = np.eye(127, 16)[None, :, None, :]
    x["initial_state"], x["dfinal_state"] = (0 * x["initial_state"] for _ in range(2))
    grads = way(x, **READY)
    assert not grads["dgate"].any()
    assert grads["dv"].any() and grads["dbeta"].any()


def test_24_gate_gradient_at_minus_5(way):
    x = ready(inputs("24 constant"), -5.0)
    error = relative_rms(way(x, **READY)["dgate"], way.oracle(x, **READY)["dgate"])
    assert error < way.bound("dgate", 1e-5)


def gate_gradient_errors(way, T):
    x = inputs(25, T=T)
    x |= {"gate": 12 + x["gate"], "initial_state": 0 * x["initial_state"]}
    a, e = way(x, **BOUNDED), way.oracle(x, **BOUNDED)
    return {n: relative_rms(a[n], e[n]) for n in ("dgate", "dq", "dk")}


@pytest.mark.full
def test_25_gradient_error_is_flat_in_the_length(way):
    errors = [gate_gradient_errors(way, T) for T in (512, 2048, 8192)]
    for n in errors[0]:
        assert max(e[n] for e in errors) < way.bound(n, 3e-6)
        assert errors[-1][n] < 2 * errors[0][n] + 1e-7


# A kernel rounds the factors of its products to bfloat16; the sum over tokens must add nothing.
@pytest.mark.parametrize("implementation, bound", [("chunked", 1e-4), ("mosaic_tpu", 8e-3)])
@pytest.mark.parametrize("T", [127, pytest.param(16384, marks=pytest.mark.full)])
def test_27_bias_gradient_sums_what_was_not_rounded(implementation, bound, T):
    x = inputs(27, T=T) | {"a_log": np.zeros(1), "dt_bias": np.zeros((1, 16))}
    x["do"] = 1e-3 * x["do"]
    a = evaluate(x, implementation, "bfloat16", **BOUNDED)["ddt_bias"]
    assert relative_rms(a, oracle(x, "bfloat16", **BOUNDED)["ddt_bias"]) < bound


def test_28_29_30_31_spans_of_any_length_compose_in_float32():
    # Slow decay, eight ragged spans: a chain of M in less than float32 drifts.
    x = ready(inputs(29, T=127), -1e-3)
    cuts = [0, 18, 36, 37, 55, 73, 91, 109, 127]
    options = {"gate_form": "log_decay", "beta_form": "value"}
    summary = jax.jit(functools.partial(spans.span_map, **options))
    maps = [
        summary(*(jnp.float32(x[n][:, a:b]) for n in ("k", "v", "gate", "beta")))
        for a, b in itertools.pairwise(cuts)
    ]
    S = spans.apply(functools.reduce(spans.compose, maps), jnp.float32(x["initial_state"][:, 0]))
    assert relative_rms(S, oracle(x, **READY)["final_state"][:, 0]) < 1e-5


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


# G, H, I. Sizes, widths, layouts


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


def test_73_a_gradient_for_every_input(way):
    x = inputs(73) | {"a_log": np.zeros(1), "dt_bias": np.zeros((1, 16))}
    grads = way(x, **BOUNDED)
    for n in ("q", "k", "v", "gate", "beta", "a_log", "dt_bias", "initial_state"):
        assert grads["d" + n].shape == x[n].shape and grads["d" + n].any()


@functools.cache
def _forward(implementation, options):
    return jax.jit(
        lambda x: kda(**x, implementation=implementation, **dict(options)),
        compiler_options=QUICK,
    )


def forward(x, implementation, dtype, **options):
    """o and the final state alone, for rows that are too long for the oracle's gradient."""
    with jax.enable_x64(dtype == "float64"):
        floats = {n: jnp.asarray(y) for n, y in rounded(x, dtype).items() if n in FLOATS}
        call = _forward(implementation, tuple(sorted(options.items())))
        return jax.tree.map(np.asarray, call(floats))
