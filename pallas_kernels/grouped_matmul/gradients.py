"""A differentiable grouped matmul of three products, as every backend with kernels has them."""

import functools
from typing import Protocol

import jax
from jax.custom_batching import custom_vmap

from ..vma import vary_together


class Products(Protocol):
    """A module, or another hashable object, with the three products of arrays `rows [N, K]`,
    `weights [G, K, M]`, `cotangent [N, M]`, `group_sizes [G]`; rows past the last group give zero
    and count for nothing."""

    @staticmethod
    def forward(rows: jax.Array, weights: jax.Array, group_sizes: jax.Array) -> jax.Array:
        """`[N, M]`."""

    @staticmethod
    def d_rows(cotangent: jax.Array, weights: jax.Array, group_sizes: jax.Array) -> jax.Array:
        """`[N, K]`."""

    @staticmethod
    def d_weights(rows: jax.Array, cotangent: jax.Array, group_sizes: jax.Array) -> jax.Array:
        """`[G, K, M]`."""


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def differentiable(
    products: Products, rows: jax.Array, weights: jax.Array, group_sizes: jax.Array
) -> jax.Array:
    return _mappable(products.forward)(rows, weights, group_sizes)


def _forward(products, rows, weights, group_sizes):
    return differentiable(products, rows, weights, group_sizes), (rows, weights, group_sizes)


def _backward(products, residuals, cotangent):
    rows, weights, sizes = residuals
    d_rows = _mappable(products.d_rows)(cotangent, weights, sizes)
    return d_rows, _mappable(products.d_weights)(rows, cotangent, sizes), None


differentiable.defvjp(_forward, _backward)


@functools.cache
def _mappable(product):
    """`product`, which vmap turns into one call after another, since kernels have no batching."""

    @custom_vmap
    def call(*arrays):
        # Under shard_map kernels do not say over which axes their outputs vary.
        return vary_together((product(*arrays), arrays))[0]

    @call.def_vmap
    def one_after_another(size, batched, *arrays):
        def at(i):
            return call(*(x[i] if mapped else x for x, mapped in zip(arrays, batched, strict=True)))

        return jax.lax.map(at, jax.numpy.arange(size)), True

    return call
