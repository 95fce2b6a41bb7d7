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
WIDTH = 64  # of a swizzled tile: K and M are padded to multiples of it
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
    return None


def _device_kind() -> str:
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.local_devices()[0].device_kind if device is None else device.device_kind


def run(spec: Spec, inputs: Inputs) -> jax.Array:
    if 0 in (spec.rows, spec.inner, spec.outer):
        return _blocked(spec, inputs)  # nothing is multiplied
    n, k, m = max(_up(spec.rows, ROWS), LEAST), _up(spec.inner, WIDTH), _up(spec.outer, WIDTH)
    rows = _padded(inputs.rows, n, k)
    weights = _padded(inputs.weights, spec.groups, k, m)
    out = differentiable(sys.modules[__name__], rows, weights, inputs.group_sizes)
    return out[: spec.rows, : spec.outer]


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _padded(x: jax.Array, *shape: int) -> jax.Array:
    """`x` with zeros at the end of each axis up to `shape`."""
    return jnp.pad(x, [(0, to - size) for size, to in zip(x.shape, shape, strict=True)])


def forward(rows: jax.Array, weights: jax.Array, group_sizes: jax.Array) -> jax.Array:
    from . import products  # and with it Mosaic

    return products.by_rows(rows, weights, group_sizes)


def d_rows(cotangent: jax.Array, weights: jax.Array, group_sizes: jax.Array) -> jax.Array:
    from . import products

    return products.by_rows(cotangent, weights, group_sizes, transposed=True)


def d_weights(rows: jax.Array, cotangent: jax.Array, group_sizes: jax.Array) -> jax.Array:
    from . import products

    return products.by_group(rows, cotangent, group_sizes)
