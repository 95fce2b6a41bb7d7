"""Projections, heads and RMS norms: what every layer is made of."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.nn import initializers
from jax.sharding import PartitionSpec

from k3jax.config import OptimiserRule
from k3jax.params import ParamSpec, weight
from k3jax.sharding import spec_of, under_mesh

# One function object per std: graph definitions of equal modules are then equal, and jit is reused.
normal = functools.cache(initializers.normal)


def island(dtype: jnp.dtype) -> jnp.dtype:
    """The dtype of a float32 island: at least float32, and float64 for float64 inputs."""
    return jnp.promote_types(dtype, jnp.float32)


def matrix(
    shape: tuple[int, int],
    axes: tuple[str | None, str | None],
    hf_name: str | None,
    std: float,
    rule: OptimiserRule = "muon",
    **more: Any,
) -> ParamSpec:
    """The spec of a projection `[in, out]` (official checkpoints store `[out, in]`)."""
    return ParamSpec(shape, axes, normal(std), rule=rule, decay=True, hf_name=hf_name, **more)


def gain(width: int, hf_name: str, axis: str | None = None) -> ParamSpec:
    """The spec of an RMS norm's gain `[width]`, one at the start, without weight decay."""
    return ParamSpec((width,), (axis,), initializers.ones, hf_name=hf_name)


def project(x: jax.Array, kernel: nnx.Variable, dtype: jnp.dtype | None = None) -> jax.Array:
    """`x [..., in] @ kernel [in, out]` in `dtype`, by default that of `x`.

    In float32 and above the product runs at full precision; bfloat16 accumulates in float32. Where
    both sides are split along the contraction (a row-parallel projection), the result is summed
    over those devices.
    """
    dtype = x.dtype if dtype is None else dtype
    return matmul(x.astype(dtype), weight(kernel, dtype))


@jax.custom_vjp
def matmul(x: jax.Array, w: jax.Array) -> jax.Array:
    """`x [..., in] @ w [in, out]` in their dtype.

    The gradient is that of `jnp.matmul`, with the weight's written as one contraction over all
    tokens: what differentiation makes of it, a product and a transpose, is 3 to 10 times slower on
    a CPU.
    """
    return _contract("...i,io->...o", x, w, (*spec_of(x)[:-1], spec_of(w)[-1]))


def _matmul_forward(x: jax.Array, w: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return matmul(x, w), (x, w)


def _matmul_backward(
    saved: tuple[jax.Array, jax.Array], dy: jax.Array
) -> tuple[jax.Array, jax.Array]:
    x, w = saved
    tokens = "abcdefgh"[: x.ndim - 1]
    dx = _contract("...o,io->...i", dy, w, spec_of(x))
    return dx, _contract(f"{tokens}i,{tokens}o->io", x, dy, spec_of(w))


matmul.defvjp(_matmul_forward, _matmul_backward)


def _contract(sum_of: str, a: jax.Array, b: jax.Array, spec: Iterable[Any]) -> jax.Array:
    """An einsum laid out as `spec` where there is a mesh, accumulated in at least float32."""
    out = PartitionSpec(*spec) if under_mesh() else None
    # Matrix units accumulate in float32 whatever they return. What is summed once more, over
    # devices or by parts of the tokens, is returned in float32 too.
    summed_again = sum_of[0] != "." or spec_of(a)[-1] is not None
    y = jnp.einsum(
        sum_of,
        a,
        b,
        precision=jax.lax.Precision.HIGHEST if a.dtype == island(a.dtype) else None,
        preferred_element_type=island(a.dtype) if summed_again else a.dtype,
        out_sharding=out,
    )
    return y.astype(a.dtype)


def split_heads(x: jax.Array, heads: int) -> jax.Array:
    """`[..., H * D]` as `[..., H, D]`, of any size, none included."""
    return x.reshape(*x.shape[:-1], heads, x.shape[-1] // heads)


def merge_heads(x: jax.Array) -> jax.Array:
    """`[..., H, D]` as `[..., H * D]`."""
    return x.reshape(*x.shape[:-2], x.shape[-2] * x.shape[-1])


@functools.partial(jax.checkpoint, static_argnums=2)  # the backward pass saves `x` and the gain
def rms_norm(x: jax.Array, gain: jax.Array | None, eps: float) -> jax.Array:
    """RMS norm over the last axis: normalised in a float32 island, cast back, scaled by `gain`.

    The order of cast and gain is the official code's (K3HF); `gain` None leaves it out.
    """
    wide = x.astype(island(x.dtype))
    normed = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    normed = normed.astype(x.dtype)
    return normed if gain is None else normed * gain.astype(x.dtype)
