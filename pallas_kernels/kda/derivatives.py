"""Second derivatives: the kernels' gradients have none, and say so."""

import functools
from typing import Any

import jax


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def first_alone[Tree](implementation: str, tree: Tree) -> Tree:
    """`tree`, of which nothing can be differentiated: what a kernel's gradient is computed from.

    Raises:
      NotImplementedError: in one line, where a gradient of the gradient is asked for.
    """
    return tree


@first_alone.defjvp
def _second(implementation: str, primals: Any, tangents: Any) -> Any:
    raise NotImplementedError(
        f"kda: implementation={implementation!r} has no second derivatives; "
        "implementation='chunked' has them"
    )
