"""Compiles every Triton kernel of a grouped matmul for a GPU that need not be there.

    python -m tests.pallas_kernels.grouped_matmul_triton_offline 9.0 bfloat16

One JSON line per kernel, as `kda_triton_offline` gives it.
"""

import functools
import json
import sys
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.grouped_matmul import check
from pallas_kernels.grouped_matmul import triton as implementation
from pallas_kernels.kda.triton import launch
from tests.pallas_kernels.kda_triton_offline import build

_TYPES = {"bfloat16": "*bf16", "float16": "*fp16", "float32": "*fp32", "int32": "*i32"}
# Rows, K, M and groups: wide, and with remainders everywhere.
SHAPES = ((65536, 3584, 3072, 112), (1000, 72, 200, 7))


def calls(capability: str, dtype: str) -> list[tuple[Any, ...]]:
    """What forward and gradient launch on a target: kernel, types, warps, stages, constants."""
    found = []

    def call(kernel, arrays, sizes, results, programs, *, warps, stages, **constants):
        types = [_TYPES[x.dtype.name] for x in arrays] + ["i32"] * len(sizes)
        types += [_TYPES[r.dtype.name] for r in results]
        found.append((kernel, types, warps, stages, constants))
        return tuple(jnp.zeros(r.shape, r.dtype) for r in results)

    launch.call, launch.current_target = call, functools.partial(launch.target_of, capability)

    def total(rows, weights, sizes):
        out = implementation.run(*check(rows, weights, sizes))
        return out.astype(jnp.float32).sum()

    for rows, inner, outer, groups in SHAPES:
        x = jax.ShapeDtypeStruct((rows, inner), jnp.dtype(dtype))
        w = jax.ShapeDtypeStruct((groups, inner, outer), jnp.dtype(dtype))
        sizes = jax.ShapeDtypeStruct((groups,), jnp.int32)
        jax.eval_shape(jax.grad(total, argnums=(0, 1)), x, w, sizes)
    return found


def main() -> None:
    capability, dtype = sys.argv[1:]
    for call in calls(capability, dtype):
        print(json.dumps(build(capability, call)), flush=True)


if __name__ == "__main__":
    main()
