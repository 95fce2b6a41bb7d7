"""The Triton kernels against the oracle, on a CPU in Triton's interpreter: what a kernel computes,
not how fast, nor what a compiler makes of it. Skipped where Triton is not installed.

Results that a kernel leaves unwritten are NaN there.
"""

import functools
import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from pallas_kernels.kda import kda
from pallas_kernels.kda.tolerances import TOLERANCES, relative_rms
from tests.pallas_kernels.kda_suite import (
    QUICK,
    Case,
    KdaSuite,
    draw,
    evaluate,
    oracle,
    rng,
)

# Not imported to find out: Triton reads the variable below when it is first imported.
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="needs triton (pip install 'triton==3.6.*')"
)


@pytest.fixture(autouse=True, scope="module")
def interpreted():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        yield


# Half precision at the widths that a model has, where the suite's quick cases are narrow.
HALF = (
    Case(
        "half, usual", T=130, H=1, HV=1, K=128, V=64, gate_form="softplus", dtypes=("bfloat16",)
    ),
    Case("half, wide", T=70, H=1, HV=1, K=256, V=32, dtypes=("float16",)),
    Case(
        "half, no norm", T=70, H=1, HV=1, parameters=False, options=(("qk_l2norm", False),),
        dtypes=("bfloat16",),
    ),
    Case(
        "half, deltanet", T=130, H=1, HV=1, gate="none", beta_form="value", dtypes=("bfloat16",),
        data=("normal", "collinear"),
    ),
)  # fmt: skip


class TestTriton(KdaSuite):
    implementation = "triton"

    @pytest.mark.parametrize(
        "case, data", [(c, d) for c in HALF for d in c.data], ids=lambda x: getattr(x, "name", x)
    )
    def test_half(self, case: Case, data: str) -> None:
        self.held_to_oracle(case, case.dtypes[0], data)


OPTIONS = {"gate_form": "bounded", "beta_form": "logit"}
FLOATS = ("q", "k", "v", "gate", "beta", "a_log", "dt_bias", "initial_state")


def inputs():
    # Three heads: their three sums, the gradient of a_log, do not cancel all at once.
    x = draw(Case("transforms", T=66, B=2, H=1, HV=3, K=8, V=8))
    return {n: jnp.float32(x[n]) for n in FLOATS}


def loss(x, implementation="triton"):
    o, state = kda(**x, **OPTIONS, return_final_state=True, implementation=implementation)
    return (o * jnp.cos(o)).sum() + (state**2).sum()


@functools.cache
def expected():
    reference = functools.partial(loss, implementation="recurrent")
    return quick(jax.value_and_grad(reference))(inputs())


def quick(f):
    return jax.jit(f, compiler_options=QUICK)


def agree(actual, expected):
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert relative_rms(a, e) < TOLERANCES["float32"]["dq"]


def test_vmap_is_a_call_on_more_rows():
    x = inputs()
    parameters = {n: x.pop(n) for n in ("a_log", "dt_bias")}

    def total(x, parameters):
        rows = jax.tree.map(lambda y: y[:, None], x)
        return jax.vmap(lambda row: loss(row | parameters))(rows).sum()

    value, (dx, dparameters) = quick(jax.value_and_grad(total, argnums=(0, 1)))(x, parameters)
    agree((value, dx | dparameters), expected())


def test_vmap_over_the_gates_parameters():
    x = inputs()
    a_log = jnp.stack([x.pop("a_log"), jnp.float32([0.5, -0.2, 0.1])])

    def one(implementation):
        return lambda a_log: loss(x | {"a_log": a_log}, implementation)

    actual = quick(jax.vmap(jax.value_and_grad(one("triton"))))(a_log)
    agree(actual, quick(jax.vmap(jax.value_and_grad(one("recurrent"))))(a_log))


def test_vmap_over_cotangents_alone():
    x = inputs()
    kernels = functools.partial(kda, **OPTIONS, implementation="triton")
    o, pull = jax.vjp(lambda q, v: kernels(**x | {"q": q, "v": v})[0], x["q"], x["v"])
    do = jnp.float32(rng("cotangents").normal(size=(3, *o.shape)))
    for rows, one in zip(jax.vmap(pull)(do), pull(do[1]), strict=True):
        agree(rows[1], one)


@pytest.mark.parametrize("check_vma", [True, False])
def test_shard_map_and_remat(check_vma):
    x = inputs()
    mesh = jax.make_mesh((1,), ("data",))
    specs = {n: P() if n in ("a_log", "dt_bias") else P("data") for n in x}
    with jax.set_mesh(mesh):
        x = {n: jax.reshard(y, specs[n]) for n, y in x.items()}

        def total(x):
            local = jax.shard_map(
                lambda x: jax.lax.psum(jax.checkpoint(loss)(x), "data"),
                in_specs=(specs,),
                out_specs=P(),
                check_vma=check_vma,
            )
            return local(x)

        agree(quick(jax.value_and_grad(total))(x), expected())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_later_tokens_change_no_bit_and_garbage_at_padding_reaches_nothing(dtype):
    x = draw(Case("prefix", T=130, H=1, HV=1, lengths=((1, 30), (0, 3), (2, 90)), documents=3))
    options = OPTIONS | {"max_documents": 3, "return_final_state": True}
    x["do"][:, 70:], x["dfinal_state"][:, 1] = 0, 0
    edit = {n: np.array(x[n]) for n in ("q", "k", "v", "gate", "beta")}
    padding = x["segment_ids"][0] == 0
    for y in edit.values():
        y[:, 70:] *= 1.5
        y[:, padding] = np.nan
    a = evaluate(x, "triton", dtype, **options)
    b = evaluate(x | edit, "triton", dtype, **options)
    for name in ("o", "dq", "dk", "dv", "dgate", "dbeta"):
        np.testing.assert_array_equal(a[name][:, :70], b[name][:, :70], err_msg=name)
        assert not b[name][:, padding].any()
    # The third document is empty.
    bits = x["initial_state"].astype(np.float32)[:, 2]
    np.testing.assert_array_equal(a["final_state"][:, 2], bits)


@pytest.mark.parametrize("size", [2.0**-60, 2.0**60])
def test_units_follow_values_of_any_size(size):
    x = draw(Case("sizes", T=130, H=1, HV=1))
    options = OPTIONS | {"return_final_state": True}
    scaled = x | {n: size * x[n] for n in ("v", "initial_state")}
    a = evaluate(x, "triton", "bfloat16", **options)
    b = evaluate(scaled, "triton", "bfloat16", **options)
    for name in ("o", "final_state"):
        assert relative_rms(b[name].astype(np.float64) / size, a[name]) < 2e-3
    for name in ("dv", "dinitial_state"):
        assert relative_rms(b[name], a[name]) < 2e-3


@pytest.mark.parametrize("loud", [3, 70, 129])
def test_one_token_far_louder_than_all_others(loud):
    """Its chunk, the next one and those before it, forwards and backwards, hold it and the others:
    nothing overflows, and what comes before it is as right as it is alone."""
    case = Case("loud", T=200, H=1, HV=1, gate="none", beta_form="value", states=False)
    x = draw(case)
    x["v"][:, loud] *= 1e8
    x["do"][:, 199 - loud] *= 1e8
    x["beta"] = np.minimum(x["beta"], 1.0)
    options = case.arguments()
    a, e = evaluate(x, "triton", "bfloat16", **options), oracle(x, "bfloat16", **options)
    # One token is all there is in these means: the gradient of its norm may cancel.
    for name in e:
        assert relative_rms(a[name], e[name]) < 3e-2, name
    if loud >= 64:
        early = slice(0, loud // 64 * 64)
        assert relative_rms(a["o"][:, early], e["o"][:, early]) < TOLERANCES["bfloat16"]["o"]


def test_a_beta_of_zero_has_its_gradient():
    x = draw(Case("zero", T=40, H=1, HV=1, beta_form="value"))
    x["beta"] = np.where(rng("zero").random(x["beta"].shape) < 0.5, 0.0, x["beta"])
    options = OPTIONS | {"beta_form": "value", "return_final_state": True}
    a = evaluate(x, "triton", "bfloat16", **options)["dbeta"]
    e = evaluate(x, "recurrent", "bfloat16", **options)["dbeta"]
    zero = x["beta"] == 0
    assert relative_rms(a[zero], e[zero]) < TOLERANCES["bfloat16"]["dbeta"]
