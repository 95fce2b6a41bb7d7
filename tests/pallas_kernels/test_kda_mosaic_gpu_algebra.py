"""The bodies of the Hopper kernels against the oracle, interpreted on the CPU in bfloat16."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.kda import check, mosaic_gpu
from pallas_kernels.kda.mosaic_gpu import pieces, prepare
from tests.pallas_kernels.kda_suite import (
    FLOATS,
    Case,
    compare,
    draw,
    oracle,
    rounded,
    size_of_sums,
)
from tests.pallas_kernels.mosaic_gpu_interpreter import interpreted


def evaluate(x, **options):
    """As the suite's, without jit: the interpreter computes with values."""
    x = rounded(x, "bfloat16")
    static = {"lower_bound": -5.0, "qk_l2norm": True, "scale": None} | options
    ids = x.get("segment_ids")
    absent = dict.fromkeys(n for n in FLOATS if n not in x)

    def outputs(floats):
        spec, inputs = check(**(absent | floats), segment_ids=ids, **static)
        o, state = mosaic_gpu.run(spec, inputs)
        return {"o": o} if state is None else {"o": o, "final_state": state}

    with interpreted():
        out, pull = jax.vjp(outputs, {n: jnp.asarray(x[n]) for n in FLOATS if n in x})
        (grads,) = pull({n: jnp.asarray(x["d" + n]).astype(y.dtype) for n, y in out.items()})
    return out | {"d" + n: y for n, y in grads.items()}


def held_to_oracle(case: Case, data: str) -> None:
    x, options = draw(case, data), case.arguments()
    expected = oracle(x, "bfloat16", **options)
    poisoned = dict(x)
    if "segment_ids" in x:
        for name in ("q", "k", "v", "gate", "beta", "do"):
            poisoned[name] = np.where(
                np.expand_dims(x["segment_ids"] == 0, tuple(range(2, x[name].ndim))),
                np.nan,
                x[name],
            )
    actual = evaluate(poisoned, **options)
    sums = size_of_sums(x, expected, "bfloat16", **options)
    compare(actual, expected, "bfloat16", at_least=sums)
    if "segment_ids" in x:
        padding = x["segment_ids"] == 0
        for name in ("o", "dq", "dk", "dv", "dgate", "dbeta"):
            assert not jnp.any(actual[name][padding]), name


QUICK = (
    Case(
        "bounded, packed states, grouped", T=75, H=1, HV=2, K=40, V=24, documents=3,
        lengths=((0, 2), (1, 33), (0, 3), (3, 36)),
    ),
    Case("exact, ragged", T=70, H=1, HV=2, gate_form="softplus", data=("saturated",)),
)  # fmt: skip
WIDE = (
    Case("bounded", T=130, B=2, H=1, HV=2, K=128, V=128, data=("normal", "saturated", "mixed")),
    Case("exact", T=130, H=2, K=128, V=60, gate_form="softplus", data=("normal", "saturated")),
    Case("far bound", T=70, options=(("lower_bound", -40.0),), data=("normal",)),
    Case(
        "packed, no states", T=150, gate_form="log_decay", parameters=False, states=False,
        lengths=((0, 2), (1, 1), (2, 30), (0, 3), (2, 40), (7, 1), (9, 50)), documents=9,
    ),
    Case(
        "gdn, packed states", T=150, gate="head", gate_form="softplus", documents=7,
        lengths=((1, 64), (2, 20), (4, 30), (6, 10), (7, 5)),
    ),
    Case("no norm", T=100, beta_form="value", options=(("qk_l2norm", False), ("scale", 0.7))),
)  # fmt: skip


def _rows(cases):
    return pytest.mark.parametrize("case, data", [(c, d) for c in cases for d in c.data])


@_rows(QUICK)
def test_oracle(case, data):
    held_to_oracle(case, data)


CUT = (
    Case("cut", T=330, H=1, HV=2),
    Case(
        "cut, packed", T=330, H=1, gate_form="softplus", states=False, documents=9,
        lengths=((0, 2), (1, 1), (2, 100), (0, 70), (2, 40), (7, 1), (9, 100)),
    ),
)  # fmt: skip


@pytest.mark.parametrize("case, most", [(CUT[0], 3), (CUT[1], 4)])
def test_rows_in_pieces(case, most, monkeypatch):
    monkeypatch.setattr(pieces, "SPARED", -100)
    monkeypatch.setattr(pieces, "MOST", most)
    assert pieces.count(case.HV, 6, 64) == 3
    held_to_oracle(case, "normal")


def test_slow_channels_forget_at_their_rate():
    """A state that nothing is written to loses a chunk's decay, of a half-life of a million tokens:
    no constant may be added to the sum of log decays and taken off again."""
    decay = np.log(2) / 1e6  # nats a token
    raw = jnp.asarray(np.log(decay / (5 - decay)), jnp.bfloat16)  # bounded: 5 sigmoid(raw)
    tokens = np.random.default_rng(0).normal(size=(2, 1, 64, 1, 16))
    q, k = jnp.asarray(tokens, jnp.bfloat16)
    spec, inputs = check(
        q=q, k=k, v=jnp.zeros_like(q), gate=jnp.full(q.shape, raw),
        beta=jnp.full((1, 64, 1), -100.0), a_log=jnp.zeros(1), dt_bias=None,
        initial_state=jnp.ones((1, 1, 1, 16, 16)), segment_ids=None, gate_form="bounded",
        beta_form="logit", lower_bound=-5.0, qk_l2norm=True, scale=None, return_final_state=True,
        max_documents=1,
    )  # fmt: skip
    with interpreted():
        _, state = mosaic_gpu.run(spec, inputs)
    exact = 64 * 5 / (1 + np.exp(-float(raw)))
    np.testing.assert_allclose(-np.log(np.float64(state)), exact, rtol=1e-2)


@pytest.mark.full
@_rows(WIDE)
def test_oracle_full(case, data):
    held_to_oracle(case, data)


@pytest.mark.parametrize("case", [QUICK[0], WIDE[0]])
def test_programs_take_several_chunks(case, monkeypatch):
    monkeypatch.setattr(prepare, "PROGRAMS", 3)
    held_to_oracle(case, "normal")
