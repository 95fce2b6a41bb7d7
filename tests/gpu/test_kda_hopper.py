"""The Hopper kernels against the oracle, on a Hopper GPU (skipped elsewhere)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.kda import kda
from pallas_kernels.kda.mosaic_gpu import pieces
from pallas_kernels.kda.tolerances import relative_rms
from tests.pallas_kernels.kda_suite import (
    FLOATS,
    TOKENS,
    Case,
    KdaSuite,
    compare,
    draw,
    evaluate,
    oracle,
    rounded,
    size_of_sums,
    skip_if_refused,
)


@pytest.fixture(autouse=True)
def hopper():
    # Not asked at import: that would start a backend in every process that collects tests.
    device = jax.devices()[0]
    if getattr(device, "compute_capability", None) != "9.0":
        pytest.skip("no Hopper GPU")


LONG = (
    Case("in pieces", T=6400, HV=2, H=1, K=128, V=128, dtypes=("bfloat16",)),
    Case(
        "in pieces, packed", T=6390, H=1, HV=1, K=64, V=64, gate_form="softplus", states=False,
        lengths=((0, 20), (1, 2300), (2, 1), (0, 70), (3, 2900), (7, 1000)), documents=9,
    ),
)  # fmt: skip


class TestMosaicGpu(KdaSuite):
    implementation = "mosaic_gpu"
    # One key for all tokens: errors of bfloat16 operands add up where nothing decays. NOTES.md has
    # the measured ones.
    slack_of_half = 5.0

    def held_to_oracle(self, case: Case, dtype: str, data: str) -> None:
        x, options = draw(case, data), case.arguments()
        skip_if_refused(x, self.implementation, dtype, **options)
        actual = evaluate(x, self.implementation, dtype, **options)
        expected = oracle(x, dtype, **options)
        slack = self.slack_of_half if data == "collinear" else 1.0
        sums = size_of_sums(x, expected, dtype, **options)
        compare(actual, expected, dtype, slack=slack, at_least=sums)
        if "segment_ids" in x:
            padding = x["segment_ids"] == 0
            for name in ("o", *("d" + n for n in TOKENS if n in x)):
                assert not actual[name][padding].any(), f"{name} is not zero at padding"

    @pytest.mark.parametrize("case", LONG, ids=lambda case: case.name)
    def test_long_rows_of_few_heads(self, case: Case) -> None:
        assert pieces.count(case.B * case.HV, -(-case.T // 64), case.V) > 2
        self.held_to_oracle(case, "bfloat16", "normal")


def test_is_what_a_call_gets():
    x = {n: jnp.asarray(y) for n, y in rounded(draw(WIDE), "bfloat16").items() if n in FLOATS}

    def o(implementation):
        return kda(**x, gate_form="bounded", beta_form="logit", implementation=implementation)[0]

    np.testing.assert_array_equal(o(None), o("mosaic_gpu"))


WIDE = Case("wide", T=300, B=2, H=2, HV=4, K=128, V=128, dtypes=("bfloat16",))


def test_a_call_repeats_bit_for_bit():
    x = draw(WIDE)
    first = evaluate(x, "mosaic_gpu", "bfloat16", **WIDE.arguments())
    for _ in range(10):
        again = evaluate(x, "mosaic_gpu", "bfloat16", **WIDE.arguments())
        for name, value in first.items():
            np.testing.assert_array_equal(again[name], value, err_msg=name)


@pytest.mark.parametrize("gate_form", ["bounded", "softplus"])
def test_later_tokens_change_no_earlier_bit(gate_form):
    x = rounded(draw(WIDE), "bfloat16")
    names = ("q", "k", "v", "gate", "beta")
    other = {n: np.concatenate([x[n][:, :150], x[n][:, 150:][:, ::-1]], axis=1) for n in names}

    def o(tokens):
        tokens = {n: jnp.asarray(tokens[n]) for n in names}
        out, _ = kda(**tokens, gate_form=gate_form, beta_form="logit", implementation="mosaic_gpu")
        return np.asarray(out[:, :150])

    np.testing.assert_array_equal(o(x), o(other))


def test_maps_over_rows_and_parameters():
    x = rounded(draw(WIDE), "bfloat16")
    names = ("q", "k", "v", "gate", "beta", "a_log", "dt_bias")
    floats = {n: jnp.asarray(x[n]) for n in names}

    def loss(floats):
        o, _ = kda(**floats, gate_form="bounded", beta_form="logit", implementation="mosaic_gpu")
        return jnp.sum(o.astype(jnp.float32) ** 2)

    pair = jax.tree.map(lambda y: jnp.stack([y, y[::-1]]), floats)
    together = jax.vmap(jax.grad(loss))(pair)
    for i in range(2):
        alone = jax.grad(loss)(jax.tree.map(lambda y, i=i: y[i], pair))
        for name in names:
            # The sums over a row's chunks are XLA's, in an order that depends on the shape.
            close = 1e-6 if name in ("a_log", "dt_bias") else 0.0
            assert relative_rms(together[name][i], alone[name]) <= close, name
