"""How arguments are refused: ValueError with one line that names the argument, its value and what
is allowed."""

import reprlib
from typing import NoReturn

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike


def fail(argument: str, problem: str) -> NoReturn:
    raise ValueError(f"{argument}: {problem}")


def as_array(argument: str, x: ArrayLike) -> jax.Array:
    """`x` as jax holds it; None, strings and ragged lists are refused by the argument's name."""
    try:
        return jnp.asarray(x)
    except (TypeError, ValueError, OverflowError):
        pass
    fail(argument, f"{reprlib.repr(x)} is not an array of numbers".replace("\n", " "))


def concrete(x: jax.Array) -> bool:
    """Whether the values of `x` can be read here without a transformation or another process."""
    return not isinstance(x, jax.core.Tracer) and getattr(x, "is_fully_addressable", True)
