"""Calls that between them compile every variant of the grouped matmul's Hopper kernels."""

import jax
import jax.numpy as jnp

from pallas_kernels.grouped_matmul import check, mosaic_gpu


def call(rows, inner, outer, groups, dtype):
    """Forward and both gradients as a function, and its arguments' shapes."""

    def both(x, w, ct, sizes):
        out, pull = jax.vjp(lambda x, w: mosaic_gpu.run(*check(x, w, sizes)), x, w)
        return out, pull(ct)

    shapes = ((rows, inner), (groups, inner, outer), (rows, outer))
    floats = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
    return both, (*floats, jax.ShapeDtypeStruct((groups,), jnp.int32))


def programs():
    return {
        "k3_1b": call(131072, 2048, 1024, 64, "bfloat16"),
        "K3": call(65536, 3584, 3072, 112, "bfloat16"),
        "float16": call(4096, 2304, 1024, 256, "float16"),
        "narrow": call(1001, 64, 192, 3, "bfloat16"),
        "parts of tiles": call(500, 192, 320, 3, "bfloat16"),
    }
