"""The whole mixture of experts of Kimi K3 compiles for TPUs, and sends what the formula says.

896 experts, latent width 3584, 16 of them per token, forward and backward, on 64 chips and more; no
chip is needed, only libtpu. Run as a program with the name of a case, this file compiles it and
prints a line of JSON: one process must not open two topologies.
"""

import dataclasses
import json
import math
import re
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.experimental import topologies
from jax.sharding import NamedSharding

from configs import CONFIGS
from k3jax.config import MeshConfig
from k3jax.cost import exchange_bytes
from k3jax.layers.latent_moe import LatentMoE
from k3jax.params import partition_specs
from k3jax.sharding import activation_spec, make_mesh
from tests.aot.without_a_tpu import needs_libtpu, run

TOKENS, LATENT = 4096, 3584  # of each device; width
CASES = {
    "v5p ragged": ("v5p:4x4x4", "ragged", MeshConfig(expert=64)),
    "v6e ragged": ("v6e:8x8", "ragged", MeshConfig(expert=64)),
    "tpu7x ragged": ("tpu7x:4x4x4", "ragged", MeshConfig(expert=64, fsdp=2)),
    "v5p padded": ("v5p:4x4x4", "padded", MeshConfig(expert=64)),
    "v5p ring": ("v5p:4x4x4", "ring", MeshConfig(expert=8, fsdp=8)),
}
BYTES = {"bf16": 2, "f32": 4, "s32": 4, "u32": 4, "pred": 1}
OP = re.compile(r"^\s*(?:ROOT )?%?([\w.-]+) = (\(.*?\)|\S+) ([\w-]+)\((.*)$")
EXCHANGES = ("all-to-all", "ragged-all-to-all", "all-gather", "reduce-scatter", "all-reduce")


def size(shapes):
    """Bytes of all arrays named in a piece of HLO."""
    found = re.findall(rf"({'|'.join(BYTES)})\[([\d,]*)\]", shapes)
    return sum(
        BYTES[kind] * math.prod(int(n) for n in dims.split(",") if n) for kind, dims in found
    )


def exchanges(hlo):
    """`(collective, dtype, bytes, scope)` of each collective of compiled HLO text.

    Bytes are what a device contributes to a gather, what it gets of a scatter, and what it has of
    the rest; of a ragged exchange, the smaller of what it reads from and what it writes to.
    """
    operations = [match.groups() for match in map(OP.match, hlo.splitlines()) if match]
    shape = {name: result for name, result, _, _ in operations}
    found = []
    for _, result, code, rest in operations:
        kind = code.removesuffix("-start")
        if kind not in EXCHANGES:
            continue
        operands = re.findall(r"%([\w.-]+)", rest.partition(")")[0])
        parts = [shape[operand] for operand in operands]
        if kind == "ragged-all-to-all":
            moved = min(size(part) for part in parts[:2])
        elif kind == "reduce-scatter":
            moved = size(result) if code == kind else min(map(size, parts))
        else:
            moved = sum(map(size, parts))
        scope = re.search(r'op_name="([^"]*)"', rest)
        found.append((kind, parts[0].partition("[")[0], moved, scope[1] if scope else ""))
    return found


def bytes_sent(found, transport, devices):
    """What a device sends of tokens and results, of all that `exchanges` found."""
    if transport != "ring":
        moved = [n for kind, dtype, n, _ in found if "to-all" in kind and dtype == "bf16"]
        return sum(moved) * (devices - 1) / devices
    # libtpu writes a reduce-scatter of rows as an all-reduce, padded and unnamed, within a fusion.
    mine, whole = TOKENS * LATENT * 2, devices * TOKENS * LATENT * 4
    there = sum(kind == "all-gather" and moved == mine for kind, _, moved, _ in found)
    back = sum(
        (kind == "reduce-scatter" and devices * moved == whole)
        or (kind == "all-reduce" and not scope and whole <= moved < 1.05 * whole)
        for kind, _, moved, scope in found
    )
    return (there * mine + back * whole // devices) * (devices - 1)


def compile_layer(topology, transport, mesh):
    """The layer with all its gradients, compiled: its memory, and its collectives."""
    config = CONFIGS["kimi_k3"]().model
    config = dataclasses.replace(config, moe=dataclasses.replace(config.moe, transport=transport))
    chips = topologies.get_topology_desc(platform="tpu", topology_name=topology)
    devices = make_mesh(mesh, list(chips.devices))
    with jax.sharding.use_abstract_mesh(devices.abstract_mesh):
        graphdef, state = nnx.split(LatentMoE(config, rngs=None))

        def placed(shape, spec, dtype=None):
            sharding = NamedSharding(devices, spec)
            return jax.ShapeDtypeStruct(shape.shape, dtype or shape.dtype, sharding=sharding)

        state = jax.tree.map(placed, state, partition_specs(state))
        params, rest = nnx.split_state(state, nnx.Param, ...)
        rows = mesh.data * mesh.fsdp * mesh.expert
        x = jax.ShapeDtypeStruct((rows, TOKENS, config.d_model), jnp.bfloat16)
        x, ids = (
            placed(x, activation_spec(3)),
            placed(x.update(shape=(rows, TOKENS)), activation_spec(2), jnp.int32),
        )

        def step(params, rest, x, ids, ct):
            def run(params, x):
                layer = nnx.merge(graphdef, params, rest)
                y, _, stats = layer(x, documents=SimpleNamespace(real=ids > 0))
                return y, stats

            y, pull, stats = jax.vjp(run, params, x, has_aux=True)
            return y, pull(ct), stats

        program = jax.jit(step).lower(params, rest, x, ids, x).compile()
    memory, moe = program.memory_analysis(), config.moe
    return {
        "arguments": memory.argument_size_in_bytes,
        "temporaries": memory.temp_size_in_bytes,
        "exchanges": exchanges(program.as_text()),
        "formula": 2 * exchange_bytes(moe, LATENT, TOKENS, mesh.expert, transport),
    }


def main(case):
    print(json.dumps(compile_layer(*CASES[case])))


@pytest.mark.full
@needs_libtpu
@pytest.mark.parametrize("case", CASES)
def test_bytes_sent_are_those_of_the_formula(case):
    done = run("tests.aot.test_experts_tpu", case)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    _, transport, mesh = CASES[case]
    assert bytes_sent(found["exchanges"], transport, mesh.expert) == found["formula"]
    assert found["arguments"] + found["temporaries"] < 2**35


if __name__ == "__main__":
    main(sys.argv[1])
