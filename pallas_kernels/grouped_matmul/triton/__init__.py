"""Grouped matmul in Triton kernels, through jax-triton: one code for every GPU that Triton serves.

bfloat16 and float16 accumulate in float32; float32 keeps its accuracy (three TF32 products, or
plain float32 ones on AMD). Tiles are fixed by shape and device, nothing is tuned at run time.
On a CPU the same kernels run in Triton's interpreter where TRITON_INTERPRET=1.
"""

import sys

import jax

from ...kda.triton import launch
from ..blocked import run as _blocked
from ..gradients import differentiable
from ..spec import Inputs, Spec

DTYPES = ("bfloat16", "float16", "float32")


def refuses(spec: Spec, platform: str) -> str | None:
    if spec.dtype not in DTYPES:
        return f"rows are {spec.dtype}, and it takes {', '.join(DTYPES)}"
    if platform != "gpu" and not (platform == "cpu" and launch.interpreted()):
        return f"it needs a GPU, not {platform} (on a CPU, TRITON_INTERPRET=1 interprets it)"
    return launch.missing()


def run(spec: Spec, inputs: Inputs) -> jax.Array:
    if 0 in (spec.rows, spec.inner, spec.outer):
        return _blocked(spec, inputs)  # nothing is multiplied
    return differentiable(sys.modules[__name__], *inputs)


def forward(rows: jax.Array, weights: jax.Array, group_sizes: jax.Array) -> jax.Array:
    from . import operation  # and with it triton

    return operation.by_rows(rows, weights, group_sizes, transposed=False)


def d_rows(cotangent: jax.Array, weights: jax.Array, group_sizes: jax.Array) -> jax.Array:
    from . import operation

    return operation.by_rows(cotangent, weights, group_sizes, transposed=True)


def d_weights(rows: jax.Array, cotangent: jax.Array, group_sizes: jax.Array) -> jax.Array:
    from . import operation

    return operation.by_group(rows, cotangent, group_sizes)
