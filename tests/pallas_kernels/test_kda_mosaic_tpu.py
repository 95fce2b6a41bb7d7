"""The TPU kernels, in interpret mode, against the oracle; and their pieces in plain JAX."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.kda import check
from pallas_kernels.kda.mosaic_tpu import activate, inverse, marks, prepare
from pallas_kernels.kda.mosaic_tpu.plan import Plan, plan_of
from pallas_kernels.kda.mosaic_tpu.visits import ACTIVE, BEGINS, ENDS, FIRST, LAST, plan_visits
from pallas_kernels.kda.tolerances import relative_rms
from tests.pallas_kernels.kda_recipes import forward
from tests.pallas_kernels.kda_suite import (
    QUICK,
    Case,
    KdaSuite,
    compare,
    draw,
    evaluate,
    oracle,
    rng,
)

CHUNK = 64
# What products of one pass in bfloat16 leave, and what float32 does.
BOUNDS = {"bfloat16": 5e-3, "float32": 1e-5}


class TestMosaicTpu(KdaSuite):
    implementation = "mosaic_tpu"
    slack_of_sums = 5.0  # 3.2 is the largest of 84 seeds; NOTES.md


def planned(T, B=1, HV=2, D=16, dtype="float32", ids=None, **options) -> Plan:
    defaults = {
        "a_log": None, "dt_bias": None, "gate_form": "bounded", "beta_form": "logit",
        "lower_bound": -5.0, "qk_l2norm": True, "scale": None, "initial_state": None,
        "segment_ids": ids, "max_documents": 1, "return_final_state": False,
    }  # fmt: skip
    x = jnp.zeros((B, T, HV, D), dtype)
    return plan_of(check(x, x, x, x, x[..., 0], **(defaults | options))[0])


# The triangular inverse


def halves(x):
    """Pairs `[n, ., 2W]` as heads `[2n, ., W]`."""
    return np.concatenate(np.split(np.asarray(x), 2, axis=-1))


def keys(name, noise=None):
    """Unit vectors `[8, C, 32]`, all of them near one of them if `noise` says how near."""
    k = rng(name).normal(size=(8, CHUNK, 32))
    if noise is not None:
        k = k[:, :1] + noise * k
    return k / np.linalg.norm(k, axis=-1, keepdims=True)


@pytest.mark.parametrize("operand", BOUNDS)
@pytest.mark.parametrize(
    "beta, noise", [(1.0, None), (1.0, 0.3), (0.9997, 0.05), (1.9, None), (1.9, 0.05), (1.0, 0.0)]
)
def test_inverse(beta, noise, operand):
    k = keys((beta, noise), noise)
    L = np.tril(beta * k @ k.swapaxes(1, 2), -1).astype(np.float32)
    identity = np.eye(CHUNK)
    expected = np.linalg.inv(identity + L.astype(np.float64))
    actual = halves(_inverse(np.concatenate(np.split(L, 2), axis=-1), jnp.dtype(operand)))
    # L itself is an operand of a product: what its own rounding does is what may be lost.
    rounded = np.linalg.inv(identity + np.asarray(jnp.asarray(L, operand), np.float64))
    bound = 3e-6 if operand == "float32" else 1e-3 + 1.5 * relative_rms(rounded, expected)
    assert relative_rms(actual, expected) < bound
    assert not np.triu(actual, 1).any()
    np.testing.assert_array_equal(np.diagonal(actual, axis1=1, axis2=2), 1)


_inverse = jax.jit(inverse.inverse, static_argnums=1, compiler_options=QUICK)


# Visits and masks


def packed_row(r, T, documents):
    """Ids of a row: documents of any length, absent ones, and padding before, in and after them."""
    ids = np.sort(r.choice(np.arange(1, documents + 1), size=T, p=r.dirichlet([0.5] * documents)))
    if r.random() < 0.5:
        ids = np.where(r.random(T) < 0.2, 0, ids)
    start, end = np.sort(r.integers(0, T + 1, size=2))
    return (
        np.where(np.arange(T) < start, 0, ids) if r.random() < 0.5 else ids * (np.arange(T) < end)
    )


def seen_by_the_rule(ids, slots):
    """What tokens may see `[T, slots + T]`, initial states first, and the same of final states."""
    T = len(ids)
    tokens = (ids[:, None] == ids) & (ids > 0) & np.tri(T, k=-1, dtype=bool)
    starts = np.arange(1, slots + 1)
    final = np.concatenate([np.eye(slots, dtype=bool), starts[:, None] == ids], axis=1)
    return np.concatenate([ids[:, None] == starts, tokens], axis=1), final


def seen_by_the_kernel(plan, ids):
    """The same from a walk over the visits, and how often they write each token in either order."""
    table = _plan_visits(plan, ids)
    masks = jax.tree.map(np.asarray, _read(plan, table.marks))
    B, T = ids.shape
    per_pair = plan.heads // 2
    for b in range(B):
        S = np.zeros(plan.slots + plan.length, bool)
        seen = np.zeros((plan.length, len(S)), bool)
        final = np.zeros((plan.slots, len(S)), bool)
        worked = []
        last_step = 0
        for n in range(plan.visits):
            step, slot, flags = n, 0, ACTIVE | FIRST | LAST
            if table.step is not None:
                step, slot, flags = (int(x[b, n]) for x in table[1:])
            assert last_step <= step <= last_step + 1
            last_step = step
            if flags & BEGINS:
                S = np.arange(len(S)) == slot
            if flags & ACTIVE:
                worked.append((step, flags, masks.alive_column[b, n, :, 0]))
                for c in range(plan.chunks):
                    m = marks.Marks(*(y[b, n] for y in masks))
                    alive, carried, kept = (
                        y[c * per_pair][:, 0] for y in (m.alive, m.carried, m.kept)
                    )
                    same = m.same[c * per_pair][:, :CHUNK] & np.outer(alive, alive)
                    first = step * plan.block + c * CHUNK
                    rows = slice(first, first + CHUNK)
                    own = slice(plan.slots + first, plan.slots + first + CHUNK)
                    seen[rows] |= np.outer(alive & carried, S)
                    seen[rows, own] |= same & np.tri(CHUNK, k=-1, dtype=bool)
                    S = S & m.survives[c * per_pair, 0, 0]
                    S[own] |= alive & kept
            if flags & ENDS:
                assert not final[slot].any()
                final[slot] = S
        counts = written(plan, worked, FIRST), written(plan, worked[::-1], LAST)
        yield seen[:T, : plan.slots + T], final[:, : plan.slots + T], [n[:T] for n in counts]


def written(plan, worked, flag):
    """How often each token is written: the flagged visit of a step is the one that overwrites."""
    count = np.full(plan.length, -1)
    for step, flags, alive in worked:
        block = slice(step * plan.block, (step + 1) * plan.block)
        count[block] = alive + (0 if flags & flag else count[block])
    return count


_plan_visits = jax.jit(plan_visits, static_argnums=0)


@functools.partial(jax.jit, static_argnums=0)
def _read(plan, marks_of_visits):
    return jax.vmap(jax.vmap(functools.partial(marks.read, plan)))(marks_of_visits)


@pytest.mark.parametrize("states", [False, True])
@pytest.mark.parametrize("T, HV", [(330, 16), (127, 2), (64, 32)])
def test_visits_show_every_token_what_it_may_see(T, HV, states):
    r = rng("visits", T, HV, states)
    ids = np.stack([packed_row(r, T, documents) for documents in (1, 2, 5, 5, 9, 9, 9, 30)])
    ids[0] = 0
    # Documents 6 to 30 have no slot, which is seen only where ids are not checked: under jit.
    options = {"max_documents": 5, "return_final_state": True} if states else {}
    plan = planned(T, len(ids), HV, dtype="bfloat16", ids=np.zeros_like(ids), **options)
    assert plan.block == {330: 128, 127: 128, 64: 64}[T]
    for row, (seen, final, counts) in zip(
        ids, seen_by_the_kernel(plan, jnp.int32(ids)), strict=True
    ):
        expected, expected_final = seen_by_the_rule(row, plan.slots)
        np.testing.assert_array_equal(seen, expected)
        np.testing.assert_array_equal(final, expected_final)
        for count in counts:
            np.testing.assert_array_equal(count, row > 0)


# Decays, activations and pairs of a grid step


def decays(gate_form, gate, a, dt_bias):
    if gate_form == "log_decay":
        return gate
    if gate_form == "softplus":
        return -a * np.logaddexp(0, gate + dt_bias)
    return -5 / (1 + np.exp(-a * (gate + dt_bias)))


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("gate_form", ["bounded", "softplus", "log_decay"])
@pytest.mark.parametrize("documents", [False, True])
def test_prepare(gate_form, dtype, documents):
    T, HV, D = 2 * CHUNK, 2, 16
    r = rng("prepare", gate_form)
    ids = np.repeat([1, 2, 0, 3], [3, 70, 5, 50])[None].astype(np.int32) if documents else None
    plan = planned(T, HV=HV, D=D, dtype=dtype, gate_form=gate_form, ids=ids)
    W = plan.key_width
    q, k, gate = (np.pad(r.normal(size=(T, HV, D)), ((0, 0), (0, 0), (0, W - D))) for _ in "qkg")
    if gate_form == "log_decay":
        gate = -np.abs(gate)
    q, k = (np.asarray(jnp.asarray(x, dtype), np.float64) for x in (q, k))
    # A whole chunk forgets 20 nats or so: e^-80 has lost digits before any rounding of a product.
    a, dt_bias = np.exp(0.3 * r.normal(size=HV))[:, None], r.normal(size=(HV, W)) - 3
    marked = None if ids is None else _read(plan, _plan_visits(plan, jnp.int32(ids)).marks)
    if marked is not None:
        marked = jax.tree.map(lambda x: x[0, 0], marked)

    def flat(x, dtype="float32"):
        return jnp.asarray(np.broadcast_to(x, (*x.shape[:-1], W)).reshape(-1, HV * W), dtype)

    gated = gate_form != "log_decay"
    raw = activate.Raw(
        flat(q, dtype), flat(k, dtype), flat(gate), jnp.zeros((T, HV)),
        flat(a) if gated else None, flat(dt_bias) if gated else None,
    )  # fmt: skip
    call = jax.jit(prepare.prepare, static_argnums=0, compiler_options=QUICK)
    p = call(plan, raw, marked)
    p = p._replace(levels=[], q_norm=None, k_norm=None)

    ids = np.ones(T, int) if ids is None else ids[0]
    real = ids > 0
    q, k = (x / np.sqrt((x**2).sum(-1, keepdims=True) + 1e-6) for x in (q, k))
    g = decays(gate_form, gate, a, dt_bias) * real[:, None, None]
    for c in range(2):
        rows = slice(CHUNK * c, CHUNK * (c + 1))
        same = (ids[rows, None] == ids[rows]) & (ids[rows, None] > 0)
        G = np.cumsum(g[rows], axis=0)
        # Documents of the tokens before the chunk and at its end: padding belongs to the last one.
        live = np.maximum.accumulate(ids)
        before, after = live[CHUNK * c - 1] if c else -1, live[CHUNK * (c + 1) - 1]
        for h in range(HV):
            weights = np.exp(np.minimum(G[:, None, h] - G[None, :, h], 0)) * same[..., None]
            pairs = [np.einsum("id,ijd,jd->ij", x[rows, h], weights, k[rows, h]) for x in (k, q)]
            expected = {
                "delta": np.tril(pairs[0], -1),
                "read": np.tril(pairs[1]),
                "decay": np.exp(G[-1:, h]) * (not documents or before == after),
            }
            enter, leave = np.exp(G[:, h]), np.exp(G[-1, h] - G[:, h])
            if documents:
                enter = enter * (ids[rows] == before)[:, None]
                leave = leave * (ids[rows] == after)[:, None]
            alive = real[rows, None]
            expected |= {"enter": enter * alive, "leave": leave * alive}
            for name, e in expected.items():
                y = np.asarray(getattr(p, name))[c]
                y = y[:, y.shape[1] // 2 * h : y.shape[1] // 2 * (h + 1)]
                if name in ("enter", "leave"):
                    y = y * alive
                assert relative_rms(y, e) < BOUNDS[dtype], name


@pytest.mark.parametrize("dtype", BOUNDS)
def test_a_state_that_nothing_decays_keeps_its_bits(dtype):
    """A long row has a thousand chunks: a decay of each that is off by 1e-5 is a drift."""
    x = draw(Case("idle", T=3 * CHUNK, H=1, HV=1, K=8, V=8, parameters=False))
    x["gate"][:], x["beta"][:] = -1e4, -1e4  # bounded and logit: no decay, nothing written
    options = {"gate_form": "bounded", "beta_form": "logit", "return_final_state": True}
    _, state = forward(x, "mosaic_tpu", dtype, **options)
    np.testing.assert_array_equal(state, np.float32(x["initial_state"]))


# Cotangents


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("gate_form", ["bounded", "softplus"])
def test_gradients_of_cotangents_of_any_size(gate_form, dtype):
    """A mean over a batch hands back 1e-9, and a slow decay puts the factors at their far ends."""
    case = Case(f"scaled {gate_form}", T=64, gate_form=gate_form, parameters=False, states=False)
    x, options = draw(case), case.arguments()
    x["gate"] = x["gate"] - 4
    expected = oracle(x, dtype, **options)
    for size in (1e-12, 1.0, 1e12):
        actual = evaluate(x | {"do": size * x["do"]}, "mosaic_tpu", dtype, **options)
        grads = {n: np.float64(y) / (1 if n == "o" else size) for n, y in actual.items()}
        compare(grads, expected, dtype, only=("dq", "dk", "dv", "dgate", "dbeta"))
