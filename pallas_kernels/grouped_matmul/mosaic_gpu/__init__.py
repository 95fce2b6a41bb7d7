"""Grouped matmul on Hopper in Pallas Mosaic GPU: TMA, wgmma, and a persistent program per
multiprocessor (`pipeline`, `products`). NOTES.md of the room has the times.

Tiles begin at the first row of their group, so that a boundary between groups costs part of a tile
and no more; rows past the last group are written as zeros in the same pass.
"""

import sys

import jax
import jax.numpy as jnp

from ...kda.mosaic_gpu import HOPPER
from ..blocked import run as _blocked
from ..gradients import differentiable
from ..spec import Inputs, Spec

DTYPES = ("bfloat16", "float16")
WIDTH = 64  # what K and M have to be multiples of: the width of a swizzled tile
# Rows are copied in boxes of 128, from multiples of 8 in the gradient of the weights.
ROWS, LEAST = 8, 128


def refuses(spec: Spec, platform: str) -> str | None:
    if platform != "gpu":
        return f"it runs on Hopper GPUs, and the platform is {platform}"
    kind = _device_kind()
    if not any(name in kind for name in HOPPER):
        return f"it runs on Hopper GPUs, and the device is {kind}"
    if spec.dtype not in DTYPES:
        return f"rows are {spec.dtype}, and it takes {' and '.join(DTYPES)}"
    for letter, width in (("K", spec.inner), ("M", spec.outer)):
        if width % WIDTH:
            return f"{letter} = {width} is not a multiple of {WIDTH}"
    return None


def _device_kind() -> str:
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.local_devices()[0].device_kind if device is None else device.device_kind


def run(spec: Spec, inputs: Inputs) -> jax.Array:
    if 0 in (spec.rows, spec.inner, spec.outer):
        return _blocked(spec, inputs)  # nothing is multiplied
    rows, weights, sizes = inputs
    held = max(-(-spec.rows // ROWS) * ROWS, LEAST)
    if held != spec.rows:
        rows = jnp.pad(rows, ((0, held - spec.rows), (0, 0)))
    return differentiable(sys.modules[__name__], rows, weights, sizes)[: spec.rows]


def forward(rows: jax.Array, weights: jax.Array, group_sizes: jax.Array) -> jax.Array:
    from . import products  # and with it Mosaic

    return products.by_rows(rows, weights, group_sizes)


def d_rows(cotangent: jax.Array, weights: jax.Array, group_sizes: jax.Array) -> jax.Array:
    from . import products

    return products.by_rows(cotangent, weights, group_sizes, transposed=True)


def d_weights(rows: jax.Array, cotangent: jax.Array, group_sizes: jax.Array) -> jax.Array:
    from . import products

    return products.by_group(rows, cotangent, group_sizes)
