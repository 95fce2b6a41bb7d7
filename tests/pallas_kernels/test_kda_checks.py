"""Arguments that `kda` refuses, each with one line that names the argument; and the dispatcher."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import dispatch
from pallas_kernels.kda import check, cost, kda, kda_step, linear_attention
from pallas_kernels.kda.spans import span_map

B, T, H, HV, K, V = 2, 6, 2, 4, 8, 5
DEFAULTS = {
    "a_log": None, "dt_bias": None, "gate_form": "softplus", "beta_form": "logit",
    "lower_bound": -5.0, "qk_l2norm": True, "scale": None, "initial_state": None,
    "segment_ids": None, "max_documents": 1, "return_final_state": False,
}  # fmt: skip


def arguments():
    shapes = {"q": (B, T, H, K), "k": (B, T, H, K), "v": (B, T, HV, V), "gate": (B, T, HV, K)}
    return {n: np.ones(s, np.float32) for n, s in (shapes | {"beta": (B, T, HV)}).items()}


def ones(*shape, dtype=np.float32):
    return np.ones(shape, dtype)


BAD = [
    ("q", "None is not an array", {"q": None}),
    ("beta", "'strong' is not an array", {"beta": "strong"}),
    ("k", "is not an array", {"k": [[1.0], [1.0, 2.0]]}),
    ("q", "floating", {"q": ones(B, T, H, K, dtype=np.int32)}),
    ("q", r"\[B, T, H, K\]", {"q": ones(B, T, H * K)}),
    ("k", "of q", {"k": ones(B, T, H, K + 1)}),
    ("v", "not a multiple", {"v": ones(B, T, 3, V)}),
    ("v", r"\[B, T, HV, V\]", {"v": ones(B, T + 1, HV, V)}),
    ("q", "K = 257", {"q": ones(B, T, H, 257), "k": ones(B, T, H, 257)}),
    ("v", "V = 300", {"v": ones(B, T, HV, 300)}),
    ("gate", "K or 1", {"gate": ones(B, T, HV, 3)}),
    ("gate", r"\[B, T, HV, K or 1\]", {"gate": ones(B, T, H, K)}),
    ("gate", "above 0", {"gate_form": "log_decay"}),
    ("beta", r"\[B, T, HV\]", {"beta": ones(B, T, H)}),
    ("beta", "floating", {"beta": ones(B, T, HV, dtype=bool)}),
    ("a_log", r"\[HV\]", {"a_log": ones(H)}),
    ("dt_bias", r"\[HV, gate's last axis\] = \[4, 8\]", {"dt_bias": ones(HV)}),
    ("dt_bias", r"\[4, 1\]", {"dt_bias": ones(HV, K), "gate": ones(B, T, HV, 1)}),
    ("a_log", "log_decay", {"a_log": ones(HV), "gate_form": "log_decay"}),
    ("a_log", "gate is None", {"a_log": ones(HV), "gate": None}),
    ("dt_bias", "gate is None", {"dt_bias": ones(HV, K), "gate": None}),
    ("gate_form", "none of softplus", {"gate_form": "exp"}),
    ("beta_form", "none of logit", {"beta_form": "sigmoid"}),
    ("lower_bound", "below 0", {"gate_form": "bounded", "lower_bound": 0.0}),
    ("lower_bound", "below 0", {"gate_form": "bounded", "lower_bound": None}),
    ("scale", "finite", {"scale": float("nan")}),
    ("scale", "finite", {"scale": True}),
    ("qk_l2norm", "True or False", {"qk_l2norm": 1}),
    ("max_documents", "positive", {"max_documents": 0}),
    ("max_documents", "positive", {"max_documents": True}),
    ("initial_state", r"max_documents", {"initial_state": ones(B, 2, HV, K, V)}),
    ("initial_state", "float32", {"initial_state": ones(B, 1, HV, K, V, dtype=np.float16)}),
    ("initial_state", r"HV, K, V", {"initial_state": ones(B, 1, HV, V, K)}),
    ("segment_ids", "integer", {"segment_ids": ones(B, T)}),
    ("segment_ids", r"\[B, T\]", {"segment_ids": ones(T, dtype=np.int32)}),
    ("segment_ids", r"-1 is not in 0 \(padding\)", {"segment_ids": -ones(B, T, dtype=np.int32)}),
    ("segment_ids", "1099511627776 is not in", {"segment_ids": np.full((B, T), 2**40)}),
    ("segment_ids", "row 1 decreases", {"segment_ids": np.array([[1] * 6, [2, 2, 0, 1, 1, 1]])}),
    (
        "max_documents",
        "largest id 3",
        {"segment_ids": np.full((B, T), 3), "return_final_state": True, "max_documents": 2},
    ),
]  # fmt: skip


@pytest.mark.parametrize("argument, says, change", BAD)
def test_bad_arguments(argument, says, change):
    with pytest.raises(ValueError, match=f"^{argument}: .*{says}") as error:
        kda(**(arguments() | {"gate_form": "softplus", "beta_form": "logit"} | change))
    assert "\n" not in str(error.value)


def test_good_arguments_describe_the_call():
    ids = np.array([[0, 1, 0, 1, 2, 9], [3, 3, 3, 3, 3, 0]])  # nobody asks for their states
    spec, inputs = check(**arguments(), **(DEFAULTS | {"segment_ids": ids}))
    assert (spec.gate_width, spec.packed, spec.dtype, spec.scale) == (K, True, "float32", K**-0.5)
    assert inputs.segment_ids.dtype == jnp.int32 and hash(spec) == hash(spec)
    flops = cost.forward(spec).flops
    assert flops == B * T * HV * (6 * K * V + 64 * (2 * K + V) + 64 * 64)
    assert cost.backward(spec).flops > flops


def test_values_are_not_judged_under_jit():
    def ids_of(ids):
        return check(**arguments(), **(DEFAULTS | {"segment_ids": ids}))[1].segment_ids

    assert jax.eval_shape(ids_of, -np.ones((B, T), np.int32)).shape == (B, T)


def test_step_and_linear_attention_refuse_in_the_same_words():
    x = arguments()
    token = {n: y[:, 0] for n, y in x.items()} | {"gate_form": "softplus", "beta_form": "logit"}
    state = ones(B, HV, K, V)
    for argument, change in (
        ("state", {"state": state[:, None]}),
        ("state", {"state": state.astype(np.float16)}),
        ("state", {"state": np.swapaxes(state, 2, 3)}),
        ("state", {"state": None}),
        ("q", {"q": x["q"]}),
        ("dt_bias", {"dt_bias": ones(HV)}),
        ("active", {"active": ones(B)}),
    ):
        with pytest.raises(ValueError, match=f"^{argument}: "):
            kda_step(**(token | {"state": state} | change))
    with pytest.raises(ValueError, match=r"^implementation: 'triton'"):
        linear_attention(x["q"], x["k"], x["v"], implementation="triton")
    with pytest.raises(ValueError, match=r"^gate: .*above 0"):
        linear_attention(x["q"], x["k"], x["v"], x["gate"])


def test_span_map_refuses_in_the_same_words():
    x = {n: y for n, y in arguments().items() if n != "q"}
    x |= {"gate_form": "softplus", "beta_form": "logit", "segment_ids": np.full((B, T), 2)}
    for argument, change in (
        ("k", {"k": ones(B, T, 257)}),
        ("k", {"k": ones(B, T, H, 257)}),
        ("document_before", {"document_before": np.zeros(B + 1, np.int32)}),
        ("document_before", {"document_before": ones(B)}),
        ("document_before", {"document_before": np.array([1, 3])}),
        ("document_before", {"document_before": np.ones(B, np.int32), "segment_ids": None}),
    ):
        with pytest.raises(ValueError, match=f"^{argument}: "):
            span_map(**(x | change))


def test_a_log_decay_is_judged_at_real_tokens_only():
    x = arguments()
    ids = np.array([[0, 1, 1, 0, 1, 1]] * B)
    x["gate"] = np.where(ids[..., None, None] > 0, -1, np.float32(1e9)) * x["gate"]
    check(**x, **(DEFAULTS | {"gate_form": "log_decay", "segment_ids": ids}))
    with pytest.raises(ValueError, match=r"^gate: 1000000000.0 is above 0"):
        check(**x, **(DEFAULTS | {"gate_form": "log_decay"}))


@pytest.mark.parametrize("implementation", dispatch.names("kda"))
def test_no_rows(implementation):
    x = {n: y[:0] for n, y in arguments().items()}
    options = {"gate_form": "softplus", "beta_form": "logit", "return_final_state": True}
    spec, _ = check(**x, **(DEFAULTS | options))
    if reason := dispatch.explain("kda", spec)[implementation]:
        pytest.skip(reason)
    o, state = jax.eval_shape(lambda: kda(**x, **options, implementation=implementation))
    assert o.shape == (0, T, HV, V) and state.shape == (0, 1, HV, K, V)


class _Refuses:
    """A module that takes no call of more than four tokens, and only on a GPU."""

    @staticmethod
    def refuses(spec, platform):
        if platform != "gpu":
            return f"it runs on gpu, not on {platform}"
        return f"q: T = {spec.tokens} is above 4" if spec.tokens > 4 else None


@pytest.fixture
def toy(monkeypatch):
    monkeypatch.setattr(dispatch, "_table", {})
    monkeypatch.setattr(
        dispatch.Implementation,
        "load",
        lambda row: {"small": _Refuses, "any": _Any}[row.module],
    )
    dispatch.register("toy", dispatch.Implementation("small", "small", ("gpu",)))
    dispatch.register("toy", dispatch.Implementation("any", "any", ("cpu", "gpu", "tpu")))


class _Any:
    @staticmethod
    def refuses(spec, platform):
        return None


def test_dispatch_takes_the_first_that_does_not_refuse(toy, monkeypatch):
    spec, _ = check(**arguments(), **DEFAULTS)
    assert dispatch.choose("toy", spec, None) is _Any
    assert dispatch.explain("toy", spec, "gpu") == {"small": "q: T = 6 is above 4", "any": None}
    with pytest.raises(ValueError, match="toy: implementation='small': it runs on gpu, not on cpu"):
        dispatch.choose("toy", spec, "small")
    with pytest.raises(ValueError, match="'fast' is none of small, any"):
        dispatch.choose("toy", spec, "fast")
    with pytest.raises(ValueError, match="registered twice"):
        dispatch.register("toy", dispatch.Implementation("any", "any", ()))
    monkeypatch.setattr(dispatch, "current_platform", lambda: "gpu")
    short = {n: y[:, :4] for n, y in arguments().items()}
    assert dispatch.choose("toy", check(**short, **DEFAULTS)[0], None) is _Refuses
    monkeypatch.setattr(dispatch, "current_platform", lambda: "quantum")
    with pytest.raises(ValueError, match="no implementation on quantum"):
        dispatch.choose("toy", spec, None)


def test_a_backend_whose_library_is_missing_says_so():
    row = dispatch.Implementation("absent", "pallas_kernels.kda.absent", ("gpu",))
    assert "cannot be imported" in dispatch.refusal(row, None, "gpu")


def test_the_platform_is_that_of_the_mesh():
    assert dispatch.current_platform() == jax.default_backend()
    with jax.set_mesh(jax.make_mesh((1,), ("data",))):
        assert dispatch.current_platform() == jax.default_backend()
    mesh = jax.sharding.AbstractMesh(
        (1,), ("data",), abstract_device=jax.sharding.AbstractDevice("TPU7x", 2, "tpu")
    )
    with jax.sharding.use_abstract_mesh(mesh):
        assert dispatch.current_platform() == "tpu"


def test_plain_jax_where_a_kernel_could_be_is_told_once(toy, monkeypatch, caplog):
    dispatch._warn.cache_clear()
    spec, _ = check(**arguments(), **DEFAULTS)
    dispatch.choose("toy", spec, None)
    assert not caplog.records  # there is no kernel for a CPU
    monkeypatch.setattr(dispatch, "current_platform", lambda: "gpu")
    for _ in range(2):
        assert dispatch.choose("toy", spec, None) is _Any
    (record,) = caplog.records
    assert record.getMessage() == "toy on gpu runs as any: small: q: T = 6 is above 4"
