"""What a call must cost: useful FLOPs of the chunkwise form and the bytes of its arguments.

A kernel states these as its `cost_estimate`; a measured time divided by them is its efficiency.
"""

from typing import NamedTuple

import numpy as np

from .spec import Spec


class Cost(NamedTuple):
    """`flops` count a multiply-add as two; `bytes_accessed` is every argument and result once."""

    flops: int
    bytes_accessed: int
    transcendentals: int


def forward(spec: Spec, chunk: int = 64) -> Cost:
    """KLR eq. 13 with K and V apart: per token and value head 6 K V for the state (read, error,
    write), C (2 K + V) for the lower triangles of L, P and their products, C^2 for the inverse."""
    token_heads = spec.batch * spec.tokens * spec.value_heads
    k, v = spec.key_width, spec.value_width
    flops = token_heads * (6 * k * v + chunk * (2 * k + v) + chunk * chunk)
    exponentials = token_heads * 4 * (k if spec.gate_width else 0)
    return Cost(flops, _argument_bytes(spec), exponentials)


def backward(spec: Spec, chunk: int = 64) -> Cost:
    """The gradient with full recomputation (one state per few chunks saved): per token and value
    head 16 K V for the state and 11 C (K + V) for the pairs of a chunk; the tokens and the
    cotangent of o are read, and the gradients of the tokens written."""
    once = forward(spec, chunk)
    token_heads = spec.batch * spec.tokens * spec.value_heads
    k, v = spec.key_width, spec.value_width
    flops = token_heads * (16 * k * v + 11 * chunk * (k + v))
    return Cost(flops, 2 * once.bytes_accessed, 2 * once.transcendentals)


def _argument_bytes(spec: Spec) -> int:
    tokens = spec.batch * spec.tokens

    def size(dtype: str) -> int:
        return np.dtype(dtype).itemsize

    per_token = spec.heads * spec.key_width * (size(spec.q_dtype) + size(spec.k_dtype))
    per_token += 2 * spec.value_heads * spec.value_width * size(spec.v_dtype)
    per_token += spec.value_heads * size(spec.beta_dtype)
    if spec.gate_width:
        per_token += spec.value_heads * spec.gate_width * size(spec.gate_dtype)
    states = int(spec.has_initial_state) + int(spec.return_final_state)
    return tokens * per_token + states * int(np.prod(spec.state_shape)) * size(spec.dtype)
