"""The Hopper kernels against the oracle, on a Hopper GPU (skipped elsewhere)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.kda import kda, mosaic_gpu
from tests.pallas_kernels.kda_suite import (
    TOKENS,
    Case,
    KdaSuite,
    compare,
    draw,
    evaluate,
    oracle,
    rounded,
    skip_if_refused,
)
from tests.pallas_kernels.test_kda_mosaic_gpu_algebra import luck

GPU = jax.default_backend() == "gpu"
HOPPER = GPU and any(name in jax.devices()[0].device_kind for name in mosaic_gpu.HOPPER)
pytestmark = pytest.mark.skipif(not HOPPER, reason="no Hopper GPU")

# bfloat16 operands are not enough where errors add up without decay: one key for all tokens, or
# negative eigenvalues. NOTES.md has the measured errors, up to three times the table.
BEYOND = {("half", "collinear"), ("deltanet", "normal")}


class TestMosaicGpu(KdaSuite):
    implementation = "mosaic_gpu"

    def held_to_oracle(self, case: Case, dtype: str, data: str) -> None:
        x, options = draw(case, data), case.arguments()
        skip_if_refused(x, self.implementation, dtype, **options)
        if (case.name, data) in BEYOND:
            pytest.xfail("errors of bfloat16 operands add up without decay")
        actual = evaluate(x, self.implementation, dtype, **options)
        expected = oracle(x, dtype, **options)
        compare(actual, expected, dtype, tuple(set(expected) - luck(case)))
        if "segment_ids" in x:
            padding = x["segment_ids"] == 0
            for name in ("o", *("d" + n for n in TOKENS if n in x)):
                assert not actual[name][padding].any(), f"{name} is not zero at padding"


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
            np.testing.assert_array_equal(together[name][i], alone[name], err_msg=name)
