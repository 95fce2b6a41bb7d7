"""Grouped matmul by megablox compiles for every TPU generation: no chip is needed, only libtpu.

Run as a program with a topology, this file compiles every case for it and prints a line of JSON
each, as `test_kda_tpu` does.
"""

import sys

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels.grouped_matmul import grouped_matmul
from tests.aot.without_a_tpu import compile_cases, needs_libtpu, said

TOPOLOGIES = ("v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1")
# Rows, K, M, groups.
CASES = {
    "k3_1b": (131072, 2048, 1024, 64, "bfloat16"),
    "256 groups": (131072, 2304, 1024, 256, "bfloat16"),
    "K3": (65536, 3584, 3072, 112, "bfloat16"),
    "many groups": (16384, 1024, 512, 896, "bfloat16"),
    "odd": (1001, 72, 200, 7, "bfloat16"),
    "odd, float32": (1001, 72, 200, 7, "float32"),
    "float32": (8192, 2048, 1024, 8, "float32"),
}


def compile_case(devices, rows, inner, outer, groups, dtype):
    """Forward and both gradients; returns bytes of temporaries."""
    mesh = Mesh(np.array(devices), ("data",), axis_types=(AxisType.Explicit,))

    def both(x, w, ct, sizes):
        out, pull = jax.vjp(lambda x, w: grouped_matmul(x, w, sizes), x, w)
        return out, pull(ct)

    everywhere = NamedSharding(mesh, P())
    shapes = ((rows, inner), (groups, inner, outer), (rows, outer))
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        arguments = [jax.ShapeDtypeStruct(s, dtype, sharding=everywhere) for s in shapes]
        sizes = jax.ShapeDtypeStruct((groups,), "int32", sharding=everywhere)
        local = jax.shard_map(both, in_specs=P(), out_specs=P(), check_vma=False)
        program = jax.jit(local).lower(*arguments, sizes).compile()
    assert program.as_text().count("tpu_custom_call") >= 3
    return program.memory_analysis().temp_size_in_bytes


@pytest.mark.full
@needs_libtpu
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_compiles(topology, case):
    problem = said("tests.aot.test_grouped_matmul_tpu", topology)(case)
    assert not problem, problem


if __name__ == "__main__":
    compile_cases(CASES, lambda case, devices: compile_case(devices[:1], *CASES[case]), sys.argv[1])
