"""The TPU kernels of `kda` compile for every generation: no chip is needed, only libtpu.

Run as a program with a topology, this file compiles every case for it and prints a line of JSON
each: libtpu ends the process on some errors, and one process must not open two topologies.
"""

import sys

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels.kda import kda
from tests.aot.without_a_tpu import compile_cases, needs_libtpu, said

TOPOLOGIES = ("v4:2x2x1", "v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1")
FOUR = "heads over four devices"
# Sizes and options that differ from 32 heads of width 128 in bfloat16 with the bounded gate.
CASES: dict[str, dict] = {
    "bounded": {},
    "softplus": {"gate_form": "softplus"},
    "float32": {"dtype": "float32"},
    "packed": {"documents": 4},
    "packed, float32": {"documents": 4, "dtype": "float32"},
    "groups of four": {"H": 8},
    "groups of five": {"H": 2, "HV": 10},
    "one head": {"H": 1, "HV": 1},
    "8 heads": {"H": 8, "HV": 8},
    "width 64": {"K": 64, "V": 64},
    "width 256": {"K": 256, "V": 256},
    "width 256, float32": {"K": 256, "V": 256, "dtype": "float32"},
    "K=128 V=64": {"V": 64},
    "K=64 V=256": {"K": 64, "V": 256},
    FOUR: {"documents": 4},
}
HEADS = P(None, None, "heads")  # of tokens and of states


def call(H=32, HV=32, K=128, V=128, documents=0, gate_form="bounded", dtype="bfloat16"):
    """`kda` on the heads of a device, shapes of its arguments, and their specs."""
    B, T = 1, 512
    shapes = {"q": (H, K), "k": (H, K), "v": (HV, V), "gate": (HV, K), "beta": (HV,)}
    x = {n: jax.ShapeDtypeStruct((B, T, *s), dtype) for n, s in shapes.items()}
    specs = dict.fromkeys(x, HEADS) | {"a_log": P("heads"), "dt_bias": P("heads")}
    x |= {
        n: jax.ShapeDtypeStruct(s, "float32") for n, s in (("a_log", (HV,)), ("dt_bias", (HV, K)))
    }
    options = {"gate_form": gate_form, "beta_form": "logit", "implementation": "mosaic_tpu"}
    if documents:
        x["segment_ids"] = jax.ShapeDtypeStruct((B, T), "int32")
        x["initial_state"] = jax.ShapeDtypeStruct((B, documents, HV, K, V), "float32")
        specs |= {"segment_ids": P(), "initial_state": HEADS}
        options |= {"max_documents": documents, "return_final_state": True}

    def run(x):
        o, state = kda(**x, **options)
        return {"o": o} if state is None else {"o": o, "state": state}

    out_specs = {n: HEADS for n in jax.eval_shape(run, x)}
    run = jax.shard_map(run, in_specs=(specs,), out_specs=out_specs, check_vma=False)
    return run, x, specs


def with_gradients(run):
    def both(x, cotangents):
        ids = {n: y for n, y in x.items() if n == "segment_ids"}
        floats = {n: y for n, y in x.items() if n not in ids}
        out, pull = jax.vjp(lambda floats: run(floats | ids), floats)
        return out, pull(cotangents)

    return both


def compile_both(case, devices):
    """Compiles a case forward, then with its gradients."""
    mesh = Mesh(np.array(devices), ("heads",), axis_types=(AxisType.Explicit,))
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        run, x, specs = call(**case)

        def placed(shape, spec):
            return jax.ShapeDtypeStruct(
                shape.shape, shape.dtype, sharding=NamedSharding(mesh, spec)
            )

        x = {n: placed(y, specs[n]) for n, y in x.items()}
        cotangents = {n: placed(y, HEADS) for n, y in jax.eval_shape(run, x).items()}
        programs = (
            jax.jit(run).lower(x).compile(),
            jax.jit(with_gradients(run)).lower(x, cotangents).compile(),
        )
    for program, kernels in zip(programs, (1, 2), strict=True):
        assert program.as_text().count("tpu_custom_call") >= kernels


@pytest.mark.full
@needs_libtpu
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_compiles(topology, case):
    problem = said("tests.aot.test_kda_tpu", topology)(case)
    assert not problem, problem


if __name__ == "__main__":
    compile_cases(
        CASES,
        lambda case, devices: compile_both(CASES[case], devices[: 4 if case == FOUR else 1]),
        sys.argv[1],
    )
