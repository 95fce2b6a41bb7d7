"""The suite that every implementation of `kda` joins, and what its tests share.

An implementation joins with one file:

    class TestChunked(KdaSuite):
        implementation = "chunked"

Everything is compared with `recurrent` in float64: outputs, final states and every gradient, in
relative RMS, at the figures of `tolerances.py`. A call that the implementation refuses is skipped
with its reason. Inputs are fresh in every run; KDA_SEED repeats one, and a failure prints it.
"""

import dataclasses
import functools
import os
import time
import zlib
from collections.abc import Mapping
from types import MappingProxyType

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels import dispatch
from pallas_kernels.kda import check, kda
from pallas_kernels.kda.tolerances import TOLERANCES, relative_rms

SEED = int(os.environ.get("KDA_SEED", time.time_ns() % 2**31))
FLOATS = ("q", "k", "v", "gate", "beta", "a_log", "dt_bias", "initial_state")
# LLVM's optimiser takes three quarters of the time that such small shapes need.
QUICK = {"xla_backend_optimization_level": 0}
TOKENS = ("q", "k", "v", "gate", "beta")


def rng(*key: object) -> np.random.Generator:
    """Reproducible numbers of this run (of KDA_SEED) for a test or case."""
    return np.random.default_rng([SEED, zlib.crc32(repr(key).encode())])


@dataclasses.dataclass(frozen=True)
class Case:
    """A shape class: everything static about a call. `lengths` are (id, tokens) of a packed row."""

    name: str
    T: int = 127
    B: int = 1
    H: int = 2
    HV: int = 2
    K: int = 16
    V: int = 16
    gate: str = "channel"
    gate_form: str = "bounded"
    beta_form: str = "logit"
    parameters: bool = True
    lengths: tuple[tuple[int, int], ...] = ()
    documents: int = 1
    states: bool = True
    options: tuple[tuple[str, object], ...] = ()
    data: tuple[str, ...] = ("normal",)
    dtypes: tuple[str, ...] = ("float32",)

    def arguments(self) -> dict:
        """The static options of the call."""
        return {
            "gate_form": self.gate_form,
            "beta_form": self.beta_form,
            "max_documents": self.documents,
            "return_final_state": self.states,
        } | dict(self.options)


def segment_ids(T: int, lengths: tuple[tuple[int, int], ...]) -> np.ndarray:
    """`[T]` ids from (id, length) pairs, padded with zeros to T."""
    ids = np.concatenate([np.full(n, i, np.int32) for i, n in lengths] or [np.zeros(0, np.int32)])
    assert len(ids) <= T
    return np.pad(ids, (0, T - len(ids)))


def draw(case: Case, data: str = "normal") -> dict[str, np.ndarray]:
    """float64 inputs of a case and cotangents `do`, `dfinal_state`."""
    r = rng(case.name, data)
    B, T, H, HV, K, V = case.B, case.T, case.H, case.HV, case.K, case.V
    x = {
        "q": r.normal(size=(B, T, H, K)),
        "k": r.normal(size=(B, T, H, K)),
        "v": r.normal(size=(B, T, HV, V)),
        "beta": r.normal(size=(B, T, HV)),
        "do": r.normal(size=(B, T, HV, V)),
    }
    if case.beta_form == "value":
        x["beta"] = r.uniform(0.1, 1.9, size=(B, T, HV))
    if not dict(case.options).get("qk_l2norm", True):
        x["q"], x["k"] = (y / np.linalg.norm(y, axis=-1, keepdims=True) for y in (x["q"], x["k"]))
    if case.gate != "none":
        width = {"channel": K, "head": 1}[case.gate]
        gate = r.normal(size=(B, T, HV, width))
        if data == "saturated":  # bounded: -5 per token; unbounded: -30 and less
            gate = 10 + gate if case.gate_form == "bounded" else 30 + 3 * np.abs(gate)
        elif data == "collinear":  # slow decay, one key
            gate = gate - 8
        elif data == "mixed":  # channels that never decay beside channels that forget at once
            gate = np.where(r.random(gate.shape) < 0.3, 30, -8) + gate
        if case.gate_form == "log_decay":
            gate = -np.abs(gate) if data != "collinear" else -np.exp(gate)
        x["gate"] = gate
        if case.parameters and case.gate_form != "log_decay":
            x["a_log"] = 0.3 * r.normal(size=HV) if data != "collinear" else np.zeros(HV)
            x["dt_bias"] = r.normal(size=(HV, width))
    if data == "collinear":
        x["k"] = x["k"][:, :1] + 0.05 * x["k"]
        x["beta"] = np.full_like(x["beta"], 8.0 if case.beta_form == "logit" else 0.9997)
    if case.states:
        shape = (B, case.documents, HV, K, V)
        x["initial_state"], x["dfinal_state"] = r.normal(size=shape), r.normal(size=shape)
    if case.lengths:
        # Rows differ: row b starts b tokens later.
        rows = [np.roll(segment_ids(T, case.lengths), b) for b in range(B)]
        x["segment_ids"] = np.stack(rows)
    return x


@functools.cache
def _compiled(implementation: str | None, options: tuple):
    def outputs(floats, segment_ids):
        o, state = kda(
            **floats, segment_ids=segment_ids, implementation=implementation, **dict(options)
        )
        return {"o": o} if state is None else {"o": o, "final_state": state}

    def call(floats, cotangents, segment_ids):
        out, pull = jax.vjp(lambda f: outputs({"gate": None} | f, segment_ids), floats)
        cotangents = {name: cotangents["d" + name].astype(y.dtype) for name, y in out.items()}
        (grads,) = pull(cotangents)
        return out | {"d" + name: y for name, y in grads.items()}

    return jax.jit(call, compiler_options=QUICK)


def rounded(x: dict[str, np.ndarray], dtype: str) -> dict[str, np.ndarray]:
    """Inputs as a call in `dtype` sees them; parameters and states are float32 at least."""
    narrow = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.dtype(dtype)
    wide = np.float64 if dtype == "float64" else np.float32
    names = {n: narrow if n in (*TOKENS, "do") else wide for n in x if n != "segment_ids"}
    return x | {n: x[n].astype(t) for n, t in names.items()}


def evaluate(
    x: dict[str, np.ndarray],
    implementation: str | None,
    dtype: str = "float32",
    **options: object,
) -> dict[str, np.ndarray]:
    """o, final_state and the gradient of every input, as a jitted call in `dtype` gives them."""
    x = rounded(x, dtype)
    if options.get("return_final_state") and "dfinal_state" not in x:
        B, _, HV, V = x["v"].shape
        shape = (B, options.get("max_documents", 1), HV, x["k"].shape[-1], V)
        x["dfinal_state"] = np.zeros(shape, np.float64 if dtype == "float64" else np.float32)
    with jax.enable_x64(dtype == "float64"):
        floats = {n: jnp.asarray(x[n]) for n in FLOATS if n in x}
        cotangents = {n: jnp.asarray(x[n]) for n in ("do", "dfinal_state") if n in x}
        ids = None if "segment_ids" not in x else jnp.asarray(x["segment_ids"], jnp.int32)
        call = _compiled(implementation, tuple(sorted(options.items())))
        return jax.tree.map(np.asarray, call(floats, cotangents, ids))


def oracle(x: dict[str, np.ndarray], dtype: str = "float32", **options: object):
    """What `recurrent` gives in float64 for the inputs as a call in `dtype` sees them."""
    x = rounded(x, dtype)
    seen = x | {n: y.astype(np.float64) for n, y in x.items() if n != "segment_ids"}
    return evaluate(seen, "recurrent", "float64", **options)


def size_of_sums(x, expected, dtype: str, gate_form: str, **_: object) -> dict[str, float]:
    """Sizes that the gradients of the gate's parameters, sums over tokens, count as at least.

    Their terms are entries of dgate, up to a factor, so errors of the size of dgate's tolerance add
    up as the root sum square of the terms does, RMS over the entries, also where a sum cancels.
    """
    if "da_log" not in expected:
        return {}
    z, dgate = x["gate"] + x["dt_bias"], expected["dgate"]
    # The log decay's derivative by a_log over that by the gate.
    ratio = z if gate_form == "bounded" else np.logaddexp(0, z) * (1 + np.exp(-z))
    terms = {"da_log": (dgate * ratio, (0, 1, 3)), "ddt_bias": (dgate, (0, 1))}
    bound = TOLERANCES[dtype]
    return {
        n: float(np.sqrt(np.mean(np.sum(y**2, axes)))) * bound["dgate"] / bound[n]
        for n, (y, axes) in terms.items()
    }


def compare(
    actual,
    expected,
    dtype: str = "float32",
    only: tuple[str, ...] = (),
    slack: float | Mapping[str, float] = 1.0,
    at_least: Mapping[str, float] = MappingProxyType({}),
) -> None:
    """Every output within its tolerance, times `slack` (of all, or by name), and all outputs of the
    oracle there. `at_least`: sizes that outputs smaller than them count as."""
    assert set(actual) == set(expected)
    names = only or expected
    errors = {n: relative_rms(actual[n], expected[n], at_least.get(n, 0.0)) for n in names}
    times = slack if isinstance(slack, Mapping) else dict.fromkeys(names, slack)
    wrong = {n: e for n, e in errors.items() if not e <= times.get(n, 1.0) * TOLERANCES[dtype][n]}
    assert not wrong, f"KDA_SEED={SEED}: relative RMS of {dtype}: {wrong}"


def skip_if_refused(x, implementation: str, dtype: str, **options: object) -> None:
    x = rounded(x, dtype)
    with jax.enable_x64(dtype == "float64"):
        arrays = {n: x.get(n) for n in (*FLOATS, "segment_ids")}
        defaults = {"lower_bound": -5.0, "qk_l2norm": True, "scale": None}
        spec, _ = check(**arrays, **(defaults | options))
        reason = dispatch.explain("kda", spec)[implementation]
    if reason is not None:
        pytest.skip(f"{implementation}: {reason}")


_DOCUMENTS = ((0, 3), (1, 1), (2, 40), (0, 2), (2, 25), (4, 1), (5, 17))
FAST = (
    Case("bounded", B=2, data=("normal", "saturated", "collinear", "mixed")),
    Case(
        "softplus, packed states, grouped",
        T=100, B=2, HV=4, K=20, V=12, gate_form="softplus", lengths=_DOCUMENTS, documents=6,
        data=("normal", "saturated"),
    ),
    Case(
        "gdn, packed, no states",
        T=130, gate="head", gate_form="log_decay", beta_form="value", states=False,
        lengths=((0, 2), (1, 1), (2, 30), (0, 3), (2, 40), (7, 1), (9, 50)),
        options=(("qk_l2norm", False), ("scale", 0.7)), data=("normal", "collinear"),
    ),
    Case("deltanet, one key head", T=15, H=1, gate="none", V=24, dtypes=("float32", "float64")),
    Case("one token", T=1, K=5, V=3, gate_form="softplus", parameters=False),
    Case("no tokens", T=0),
    Case("half, whole chunks", T=256, H=1, HV=4, dtypes=("bfloat16",)),
    Case(
        "half, packed states",
        T=100, B=2, H=2, HV=6, lengths=_DOCUMENTS, documents=6, dtypes=("bfloat16",),
    ),
)  # fmt: skip

_LENGTHS = tuple(
    Case(f"{form} T={T}", T=T, H=1, HV=1, gate_form=form, data=("normal", "saturated"))
    for form, lengths in (("bounded", (2, 63, 64, 65, 1000)), ("softplus", (15, 127, 129)))
    for T in lengths
)
_WIDTHS = tuple(
    Case(f"K={K} V={V}", T=70, H=1, HV=2, K=K, V=V, gate_form="softplus", data=("normal", "mixed"))
    for K, V in ((60, 100), (100, 60), (128, 16), (256, 256))
)
_PACKED = tuple(
    Case(
        f"packed {gate} {form} states={states}",
        T=300, B=3, HV=4, gate=gate, gate_form=form, states=states, documents=9,
        parameters=form != "log_decay",
        lengths=((0, 3), (1, 50), (2, 100), (4, 7), (5, 64), (0, 9), (5, 1), (6, 1), (8, 30)),
        data=("normal", "saturated"), dtypes=("float32", "bfloat16")[: 1 + states],
    )
    for gate, form, states in (
        ("channel", "bounded", True), ("head", "softplus", True), ("channel", "log_decay", False)
    )
)  # fmt: skip
_OPTIONS = (
    Case("negative eigenvalues", T=200, beta_form="value", data=("normal", "collinear", "mixed")),
    Case("log decay", T=200, gate_form="log_decay", data=("normal", "saturated", "collinear")),
    Case("far bound", T=200, options=(("lower_bound", -40.0),), data=("normal", "saturated")),
    Case("near bound", T=200, options=(("lower_bound", -0.1),), data=("normal", "saturated")),
    Case("deltanet", T=200, gate="none", beta_form="value", dtypes=("float32", "bfloat16")),
    Case("gdn", T=200, gate="head", gate_form="softplus", dtypes=("float32", "bfloat16")),
    Case("no norm", T=200, options=(("qk_l2norm", False), ("scale", 2.0))),
    # Without the norm: the gradient of x / |x| is all cancellation where K = 1.
    Case("one channel", T=70, K=1, V=1, options=(("qk_l2norm", False),)),
    Case("groups of four", T=200, HV=8, dtypes=("float32", "bfloat16")),
    Case("double", T=200, dtypes=("float64",), data=("normal", "mixed", "collinear")),
    Case("double packed", T=100, lengths=_DOCUMENTS, documents=6, dtypes=("float64",)),
    Case("half", T=200, dtypes=("bfloat16",), data=("normal", "saturated", "collinear")),
    # Not saturated: a gradient of 1e-7 is below what float16 holds.
    Case("half float16", T=200, dtypes=("float16",), data=("normal", "collinear")),
)
FULL = (*_LENGTHS, *_WIDTHS, *_PACKED, *_OPTIONS)


def _rows(cases: tuple[Case, ...]):
    rows = [(c, t, d) for c in cases for t in c.dtypes for d in c.data]
    return pytest.mark.parametrize(
        "case, dtype, data", rows, ids=[f"{c.name}-{t}-{d}".replace(" ", "_") for c, t, d in rows]
    )


class KdaSuite:
    """Subclass with the name of an implementation; narrow `full` tables by refusing calls.

    slack_of_sums: how far beyond the table the gradients of the gate's parameters may be in half
    precision, where the rounding of all tokens is alike.
    """

    implementation: str
    slack_of_sums = 1.0

    def held_to_oracle(self, case: Case, dtype: str, data: str) -> None:
        x, options = draw(case, data), case.arguments()
        skip_if_refused(x, self.implementation, dtype, **options)
        actual = evaluate(x, self.implementation, dtype, **options)
        assert actual["o"].dtype == rounded(x, dtype)["v"].dtype
        expected = oracle(x, dtype, **options)
        sums = size_of_sums(x, expected, dtype, **options)
        # One decay or nearly one key for all tokens: they are rounded alike, and errors add up.
        alike = dtype in ("bfloat16", "float16") and (data == "collinear" or case.gate == "head")
        slack = dict.fromkeys(("da_log", "ddt_bias"), self.slack_of_sums if alike else 1.0)
        compare(actual, expected, dtype, slack=slack, at_least=sums)
        if "segment_ids" in x:
            padding = x["segment_ids"] == 0
            for name in ("o", *("d" + n for n in TOKENS if n in x)):
                assert not actual[name][padding].any(), f"{name} is not zero at padding"

    @_rows(FAST)
    def test_oracle(self, case: Case, dtype: str, data: str) -> None:
        self.held_to_oracle(case, dtype, data)

    @pytest.mark.full
    @_rows(FULL)
    def test_oracle_full(self, case: Case, dtype: str, data: str) -> None:
        self.held_to_oracle(case, dtype, data)
