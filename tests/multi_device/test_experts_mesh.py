"""Every transport of experts on eight devices against a dense sum over all experts, in float64.

Run as a program, this file does the comparison: fake devices must be asked for before jax starts.
`full` as an argument runs the long table.
"""

import collections
import dataclasses
import itertools
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from k3jax.config import FeedForwardConfig, MeshConfig, ModelConfig, MoEConfig
from k3jax.layers.block import DecoderLayer, _layer_function
from k3jax.layers.documents import documents_of
from k3jax.layers.latent_moe import LatentMoE
from k3jax.parallel.experts import ragged
from k3jax.params import partition_specs
from k3jax.sharding import BATCH, SEQUENCE, activation_spec, make_mesh
from k3jax.stacking import LayerKind
from tests.layers.dense_experts import dense_experts
from tests.layers.rows import relative_rms
from tests.multi_device.eight_devices import run_on_eight_devices

EXCHANGES = ("all_to_all", "ragged_all_to_all", "all_gather", "reduce_scatter", "ppermute")
ROWS, TOKENS, D, EXPERTS, K = 8, 4, 10, 8, 3
MOE = MoEConfig(
    experts=EXPERTS, top_k=K, expert_width=6, latent_width=8, bins=16, buffer_factor=0.0
)
DATA, FSDP = MeshConfig(data=2, expert=4), MeshConfig(fsdp=2, expert=4)
TENSOR, CONTEXT = MeshConfig(expert=2, tensor=2, data=2), MeshConfig(expert=2, context=2, fsdp=2)
WIDE = MeshConfig(expert=8)
CASES = [
    (DATA, "padded", {}),
    (DATA, "ragged", {"buffer_factor": 1.0}),
    (FSDP, "ring", {"buffer_factor": 1.0, "latent_width": 0}),
    (FSDP, "padded", {"buffer_factor": 1.0}),
    (TENSOR, "ragged", {}),
    (CONTEXT, "ring", {}),
]
FULL = [
    (mesh, transport, {"buffer_factor": factor, "latent_width": width, "top_k": k})
    for mesh, transport, (factor, width, k) in itertools.product(
        (DATA, FSDP, TENSOR, CONTEXT, WIDE),
        ("ring", "padded", "ragged"),
        ((0.0, 8, 3), (1.0, 0, 1), (1.0, 8, 7)),
    )
] + [(TENSOR, transport, {}, ("data",)) for transport in ("ring", "padded", "ragged")]


def emulated(operand, output, input_offsets, send_sizes, output_offsets, recv_sizes, *, axis_name):
    """`jax.lax.ragged_all_to_all` as it is documented, for platforms that have none.

    NaN where chunks overlap, or where a receiver expects other sizes than are sent.
    """
    chunks = input_offsets.size // jax.lax.axis_size(axis_name)  # for each device
    first = chunks * jax.lax.axis_index(axis_name)

    def to_me(values):
        everyone = jax.lax.all_gather(values, axis_name)
        return jax.lax.dynamic_slice_in_dim(everyone, first, chunks, axis=1).reshape(-1)

    source, sizes, target = map(to_me, (input_offsets, send_sizes, output_offsets))
    device = jnp.repeat(jnp.arange(jax.lax.axis_size(axis_name)), chunks)
    offset = jnp.arange(output.shape[0])[:, None] - target  # [rows, chunks from all devices]
    hit = (offset >= 0) & (offset < sizes)
    row = (hit * (operand.shape[0] * device + source + offset)).sum(1)
    sent = jax.lax.all_gather(operand, axis_name, tiled=True)[row]
    right = jnp.all(recv_sizes == sizes) & jnp.all(hit.sum(1) <= 1)
    hit = hit.any(1).reshape(-1, *(1,) * (operand.ndim - 1))
    return jnp.where(right, jnp.where(hit, sent, output), np.nan).astype(operand.dtype)


def places(mesh):
    """Per token `[ROWS, TOKENS]`: its group of devices, its device of the group, and its number."""
    row, token = np.indices((ROWS, TOKENS))
    per_device = ROWS // (mesh.data * mesh.fsdp * mesh.expert), TOKENS // mesh.context
    shard = row // per_device[0]
    group = shard // mesh.expert * mesh.context + token // per_device[1]
    number = row % per_device[0] * per_device[1] + token % per_device[1]
    return group, shard % mesh.expert, number


def kept_routes(mesh, transport, factor, chosen, real, k):
    """`[ROWS, TOKENS, EXPERTS]`: which routes find room, first come first served, by the contract.

    A padded buffer takes, for each pair of devices, routes in order of expert and token; the others
    take all for one device in order of expert, device and token.
    """
    chosen = chosen & real[..., None]
    if not factor:
        return chosen
    group, device, number = places(mesh)
    routes = [
        (
            (group[r, t], e // (EXPERTS // mesh.expert))
            + (device[r, t],) * (transport == "padded"),
            (e, device[r, t], number[r, t]),
            (r, t, e),
        )
        for r, t, e in np.argwhere(chosen)
    ]
    tokens = ROWS * TOKENS // (mesh.data * mesh.fsdp * mesh.expert * mesh.context)
    balanced = tokens * k / (mesh.expert if transport == "padded" else 1)
    room = int(np.ceil(factor * balanced))
    kept = np.zeros_like(chosen)
    for _, queue in itertools.groupby(sorted(routes), key=lambda route: route[0]):
        for *_, where in list(queue)[:room]:
            kept[where] = True
    return kept


def scenarios(rng, state, mesh):
    """Named `(state, x, real)`: the loads that a transport must bear."""
    router = state["router"]
    x = rng.normal(size=(ROWS, TOKENS, D))
    holes = rng.random((ROWS, TOKENS)) < 0.7
    rows = ROWS // (mesh.data * mesh.fsdp * mesh.expert)
    holes[rows : 2 * rows] = False  # one device has no token

    def with_router(name, value):
        new = jax.tree.map(lambda a: a, state)
        new["router"][name] = router[name].replace(jnp.asarray(value))
        return new

    ranks = np.array([0.0, 6, 1, 2, 8, 7, 5, 4])  # apart by more than a score
    yield "random", state, x, holes
    yield "all to the same", with_router("bias", ranks), x, np.ones_like(holes)
    yield "ties", with_router("kernel", np.zeros((D, EXPERTS))), x, np.ones_like(holes)
    yield "padding only", state, x, np.zeros_like(holes)


def compare(rng, mesh, transport, changes, batch=BATCH):
    """Forward and gradients of the layer on the mesh, to 1e-10, in every scenario.

    Rows are split over the axes `batch`: devices along the others have the same tokens.
    """
    moe = dataclasses.replace(MOE, transport=transport, **changes)
    config = ModelConfig(d_model=D, moe=moe, ffn=FeedForwardConfig(situ_beta=2, situ_linear_beta=3))
    graphdef, shapes = nnx.split(LatentMoE(config, rngs=None))
    layout = partition_specs(shapes)

    def draw(shape):
        wide = np.float64 if shape.dtype == np.float32 else shape.dtype
        return jnp.asarray(rng.normal(0.1, 0.5, shape.shape).astype(wide))

    drawn = jax.tree.map(draw, shapes)

    @jax.jit
    def layer(state, x, ids, ct):
        def run(state, x):
            documents = SimpleNamespace(real=ids > 0)  # all that the layer looks at
            y, _, stats = nnx.merge(graphdef, state)(x, documents=documents)
            return y, stats

        y, pull, stats = jax.vjp(run, state, x, has_aux=True)
        return y, pull(ct), stats

    @jax.jit
    def oracle(state, x, real, kept, ct):
        run = lambda state, x: dense_experts(state, x, real, config, kept)  # noqa: E731
        y, pull = jax.vjp(run, state, x)
        return y, pull(ct)

    for name, state, x, real in scenarios(rng, drawn, mesh):
        ct = jnp.asarray(rng.normal(size=x.shape))
        scores = 1 / (1 + np.exp(-x @ np.asarray(state["router"]["kernel"][...])))
        order = np.argsort(-(scores + np.asarray(state["router"]["bias"][...])), -1, kind="stable")
        chosen = np.zeros(scores.shape, bool)
        np.put_along_axis(chosen, order[..., : moe.top_k], True, -1)
        kept = kept_routes(mesh, transport, moe.buffer_factor, chosen, real, moe.top_k)
        with jax.set_mesh(make_mesh(mesh)):
            put = lambda value, spec: jax.device_put(jnp.asarray(value), spec)  # noqa: E731
            ids, tokens = P(batch, SEQUENCE), P(batch, SEQUENCE, None)
            placed = jax.tree.map(put, state, layout)
            args = put(x, tokens), put(real.astype(np.int32), ids), put(ct, tokens)
            y, grads, stats = jax.device_get(layer(placed, *args))
        want, want_grads = oracle(state, jnp.asarray(x), real, kept.astype(float), ct)
        case = (mesh, transport, changes, name)
        assert y.dtype == np.float64, case
        assert relative_rms(y, want) < 1e-10, (case, relative_rms(y, want))
        flat, wanted = map(jax.tree_util.tree_leaves_with_path, (grads, want_grads))
        for (path, got), (_, leaf) in zip(flat, wanted, strict=True):
            if got.dtype == jax.dtypes.float0:  # the router's counts
                continue
            assert relative_rms(got, leaf) < 1e-10, (case, path, relative_rms(got, leaf))
        dropped = int(stats["dropped_routes"].value)
        assert dropped == (chosen & real[..., None]).sum() - kept.sum(), (case, dropped)
        crowded = name == "all to the same" and moe.buffer_factor and moe.top_k <= K
        assert dropped or not crowded, case
        load = stats["router"]["load"].value
        assert np.array_equal(load, (chosen & real[..., None]).sum((0, 1))), case


def collectives(jaxpr):
    """How many of each collective a program runs, those of inner programs with it."""
    found = collections.Counter(eqn.primitive.name for eqn in jaxpr.eqns)
    for eqn in jaxpr.eqns:
        for inner in jax.tree.leaves(list(eqn.params.values()), is_leaf=is_program):
            if is_program(inner):
                found += collectives(getattr(inner, "jaxpr", inner))
    return {name: found[name] for name in EXCHANGES if found[name]}


def is_program(value):
    return hasattr(value, "eqns") or hasattr(value, "jaxpr")


def count_exchanges(transport, remat, want):
    """The exchanges of a layer's gradient: those of the forward pass twice if nothing is kept."""
    moe = dataclasses.replace(MOE, transport=transport, first_k_dense=0)
    config = ModelConfig(d_model=D, moe=moe, full_attention="gqa", mixers=("full",), layers=1)
    with jax.set_mesh(make_mesh(DATA)):
        layer = DecoderLayer(config, LayerKind("full", True, True), rngs=None)
        graphdef, shapes = nnx.split(layer)
        layer = _layer_function(graphdef, remat, ())

        def loss(params, rest, x):
            state = nnx.merge_state(params, rest)
            documents = documents_of(jnp.ones_like(x[..., 0], jnp.int32))
            return layer(state, x, documents, None, None)[0].sum()

        def place(shape, spec):
            return jax.device_put(jnp.zeros(shape.shape, shape.dtype), spec)

        state = jax.tree.map(place, shapes, partition_specs(shapes))
        x = jax.device_put(jnp.zeros((ROWS, TOKENS, D)), activation_spec(3))
        params, rest = nnx.split_state(state, nnx.Param, ...)
        found = collectives(jax.make_jaxpr(jax.grad(loss))(params, rest, x).jaxpr)
    assert found == want, (transport, remat, found)


def main(cases):
    jax.config.update("jax_enable_x64", True)
    ragged.PLATFORMS = ("cpu",)
    for remat in ("none", "dots", "full"):
        # Counts of routes; tokens and their weights there, sums back; and the same backward.
        count_exchanges("padded", remat, {"all_to_all": 1 + 3 + 3})
        count_exchanges("ragged", remat, {"all_gather": 1, "ragged_all_to_all": 3 + 3})
        count_exchanges("ring", remat, {"all_gather": 2 + 2 + 1, "reduce_scatter": 1 + 2})
    count_exchanges("padded", "everything", {"all_to_all": 7 + 4})
    count_exchanges("ragged", "everything", {"all_gather": 1 + 1, "ragged_all_to_all": 6 + 3})
    count_exchanges("ring", "everything", {"all_gather": 5 + 4, "reduce_scatter": 3 + 1})
    ragged.ragged_all_to_all = emulated
    seed = np.random.SeedSequence().entropy
    rng = np.random.default_rng(seed)
    for case in cases:
        try:
            compare(rng, *case)
        except Exception:
            print("seed", seed, file=sys.stderr)
            raise
    print(len(jax.devices()), "devices agree")


def test_eight_devices_equal_the_dense_sum():
    run_on_eight_devices("tests.multi_device.test_experts_mesh")


@pytest.mark.full
def test_long_table():
    run_on_eight_devices("tests.multi_device.test_experts_mesh", "full")


if __name__ == "__main__":
    main(FULL if sys.argv[1:] == ["full"] else CASES)
