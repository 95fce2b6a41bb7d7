"""Rows split over the context axis of eight devices equal whole ones, to 1e-12 in float64.

Run as a program, this file does the comparison: fake devices must be asked for before jax starts.
"""

import functools
import os
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from k3jax.config import GQAConfig, KDAConfig, MeshConfig, MLAConfig
from k3jax.layers.conv import short_conv
from k3jax.layers.documents import documents_of
from k3jax.layers.gqa import GroupedQueryAttention
from k3jax.layers.kda import KimiDeltaAttention
from k3jax.layers.mla import MultiHeadLatentAttention
from k3jax.parallel.context import recur
from k3jax.parallel.local import local
from k3jax.params import partition_specs
from k3jax.sharding import BATCH, activation_spec, make_mesh
from pallas_kernels.kda import kda, linear_attention
from pallas_kernels.kda.spans import linear_span_map, span_map
from tests.conftest import QUICK
from tests.layers.rows import relative_rms
from tests.multi_device.eight_devices import run_on_eight_devices

B, T, H, K, V, D, N, WIDTH = 4, 24, 2, 4, 3, 10, 5, 4
WHOLE = P(BATCH)  # rows over the batch axes, on every shard of a row
BOUNDED = {"gate_form": "bounded", "beta_form": "logit"}
LAYERS = {
    "K3": lambda: KimiDeltaAttention(KDAConfig(heads=2, key_dim=4, value_dim=6), D, rngs=None),
    "softplus, no convolution": lambda: KimiDeltaAttention(
        KDAConfig(heads=2, key_dim=4, value_dim=4, gate_form="softplus", conv_width=0), D, rngs=None
    ),
    "one decay a head": lambda: KimiDeltaAttention(
        KDAConfig(rule="gated_delta", heads=2, key_dim=4, value_dim=4, conv_width=1), D, rngs=None
    ),
    "delta": lambda: KimiDeltaAttention(
        KDAConfig(rule="delta", heads=2, key_dim=4, value_dim=4, conv_width=6), D, rngs=None
    ),
    "linear": lambda: KimiDeltaAttention(
        KDAConfig(rule="linear", heads=2, key_dim=4, value_dim=4), D, rngs=None
    ),
    "MLA": lambda: MultiHeadLatentAttention(
        MLAConfig(2, 0, kv_lora_rank=6, qk_nope_dim=4, qk_rope_dim=2, value_dim=4), D, rngs=None
    ),
    "GQA": lambda: GroupedQueryAttention(GQAConfig(4, 2, head_dim=4, rope=True), D, rngs=None),
}


def rows(rng):
    """Packed rows: random with gaps; one document; shards of padding; documents at shards' ends."""
    ids = np.sort(rng.integers(1, N + 1, (B, T)), axis=1)
    ids[rng.random(ids.shape) < 0.3] = 0
    ids[1] = 1
    ids[2, 2:22] = 0
    ids[3] = [1] * 3 + [2] * 12 + [4] * 5 + [5] * 4
    return ids.astype(np.int32)


def place(tree, spec=None):
    return jax.tree.map(
        lambda x: jax.device_put(x, activation_spec(np.ndim(x)) if spec is None else spec), tree
    )


def check(got, want, context):
    leaves = jax.tree_util.tree_leaves_with_path(got)
    for (path, g), w in zip(leaves, jax.tree.leaves(want), strict=True):
        error = relative_rms(g, w) if w.size else 0  # no tail behind a convolution of one tap
        assert error <= 1e-12, f"{jax.tree_util.keystr(path)}: {error}, {context}"


def documents(rng):
    """`documents_of`, and the short convolution with its gradients and tails."""
    packed, x, dy = rows(rng), *rng.normal(size=(2, B, T, H))
    taps, tail, dtail = rng.normal(size=(WIDTH, H)), *rng.normal(size=(2, B, WIDTH - 1, H))

    def convolve(x, taps, tail, documents, axis):
        conv = functools.partial(short_conv, axis=axis)
        specs = (activation_spec(3), WHOLE)
        return local(conv, x, taps, documents, tail, out_specs=specs)

    @functools.partial(jax.jit, static_argnums=4)
    def run(x, taps, tail, ids, axis):
        found = documents_of(ids)
        y, pull = jax.vjp(lambda *a: convolve(*a, found, axis), x, taps, tail)
        return found, y, pull((jnp.asarray(dy), jnp.asarray(dtail)))

    # A row with a tail holds one document; the others start from nothing.
    for ids, before in ((packed, 0 * tail), ((packed > 0).astype(np.int32), tail)):
        want = run(x, taps, before, ids, None)
        for mesh in (MeshConfig(data=2, context=4), MeshConfig(context=8)):
            with jax.set_mesh(make_mesh(mesh)):
                placed = place(x), place(taps, P()), place(before, WHOLE), place(ids)
                found, *got = run(*placed, "context")
            check(got, want[1:], mesh)
            assert (found.positions == want[0].positions).all()
            ends = np.maximum.accumulate(ids, axis=1)[:, T // mesh.context - 1 :: T // mesh.context]
            assert (found.before.document[:, 1:] == ends).all()


def states(rng):
    """`recur` of kda and of linear attention, with and without the states of all documents."""
    ids, do = rows(rng), rng.normal(size=(B, T, H, V))
    initial, dfinals = rng.normal(size=(2, B, N, H, K, V))
    q, k, gate = rng.normal(size=(3, B, T, H, K))
    v, beta = rng.normal(size=(B, T, H, V)), rng.normal(size=(B, T, H))
    a_log, dt_bias = rng.normal(size=H) * 0.3, rng.normal(size=(H, K))

    def calls(rule, q, k, v, gate, beta, a_log, dt_bias):
        if rule == "kda":
            options = {"a_log": a_log, "dt_bias": dt_bias, **BOUNDED}
            return (
                functools.partial(kda, q, k, v, gate, beta, **options),
                functools.partial(span_map, k, v, gate, beta, **options),
            )
        g = -jnp.exp(gate)
        return (
            functools.partial(linear_attention, q, k, v, g),
            functools.partial(linear_span_map, k, v, g),
        )

    @functools.partial(jax.jit, static_argnums=(2, 3, 4))
    def run(arguments, ids, rule, with_states, axis):
        found = documents_of(ids)

        def shard(arguments, documents):
            *streams, initial = arguments
            attention, summary = calls(rule, *streams)
            own = {"segment_ids": documents.segment_ids}
            if with_states:
                own |= {"max_documents": N, "return_final_state": True, "initial_state": initial}
            if axis is None:
                return attention(**own, implementation="recurrent")
            own |= {"documents_before": documents.before.document, "axis": axis}
            return recur(attention, summary, **own)

        def loss(arguments):
            o, finals = local(shard, arguments, found, out_specs=(activation_spec(4), WHOLE))
            total = (o * do).sum() + (0 if finals is None else (finals * dfinals).sum())
            return total, (o, finals)

        return jax.grad(loss, has_aux=True)(arguments)

    arguments = (q, k, v, gate, beta, a_log, dt_bias, initial)
    for rule in ("kda", "linear"):
        for with_states in (False, True):
            want = run(arguments, ids, rule, with_states, None)
            for mesh in (MeshConfig(fsdp=2, context=4), MeshConfig(context=8)):
                with jax.set_mesh(make_mesh(mesh)):
                    placed = (
                        *place(arguments[:5]), *place(arguments[5:7], P()), place(initial, WHOLE)
                    )  # fmt: skip
                    got = run(placed, place(ids), rule, with_states, "context")
                check(got, want, (rule, with_states, mesh))


def layers(rng):
    """Every mixer: packed rows with gradients, and a prefill whose cache then takes a token."""
    ids, (x, dy) = rows(rng), rng.normal(size=(2, B, T, D))
    one, token = (ids > 0).astype(np.int32), rng.normal(size=(B, 1, D))

    for name, make in LAYERS.items():
        graphdef, state = nnx.split(make())
        state = jax.tree.map(lambda leaf: rng.normal(0, 0.5, leaf.shape), state)

        @jax.jit
        def run(state, x, dy, ids, one, token, cache, graphdef=graphdef):
            def loss(state, x):
                y, _, stats = nnx.merge(graphdef, state)(x, documents=documents_of(ids))
                return (y * dy).sum(), (y, stats)

            packed = jax.grad(loss, (0, 1), has_aux=True)(state, x)
            layer = nnx.merge(graphdef, state)
            prefill, cache, _ = layer(x, documents=documents_of(one), cache=cache)
            last = documents_of(jnp.ones_like(token[..., 0], jnp.int32))
            step, cache, _ = layer(token, documents=last, cache=cache)
            return packed, jnp.where(one[..., None] > 0, prefill, 0), step, cache

        def cache(state, graphdef=graphdef):
            return nnx.merge(graphdef, state).empty_cache(B, T + 1, jnp.float64)

        want = run(state, x, dy, ids, one, token, cache(state))
        with jax.set_mesh(make_mesh(MeshConfig(context=4, tensor=2))):
            placed = jax.tree.map(jax.device_put, state, partition_specs(state))
            rest = *place((x, dy, ids, one)), place(token, WHOLE), cache(placed)
            check(run(placed, *rest), want, name)


def main(name: str, seed: int):
    jax.config.update("jax_enable_x64", True)
    {"documents": documents, "states": states, "layers": layers}[name](np.random.default_rng(seed))
    print(len(jax.devices()), "devices agree")


@pytest.fixture
def run(monkeypatch):
    """A comparison as a program; it compiles far more than it computes, in the full suite too."""
    monkeypatch.setenv("XLA_FLAGS", f"{os.environ.get('XLA_FLAGS', '')} {QUICK}")

    def named(name: str):
        seed = str(np.random.SeedSequence().generate_state(1)[0])
        print(f"seed {seed}")
        run_on_eight_devices("tests.multi_device.test_context", name, seed)

    return named


def test_documents_and_convolutions(run):
    run("documents")


@pytest.mark.full
@pytest.mark.parametrize("name", ["states", "layers"])
def test_split_rows(run, name):
    run(name)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
