"""What a program hands to the scalar memory of its kernels, computed ahead of time on the host.

Block indices and branches of a kernel may hang on such values (the boundaries of documents, the
sizes of groups). They are usually computed from an argument just before the kernel, so the traced
program is evaluated as far as it follows from the arguments whose values are given.
"""

import contextlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend.core import Jaxpr, Literal

# The control flow whose body does not see the operands one for one.
_LOOPS = ("scan", "while", "cond")
_MAX_WORDS = 1 << 18  # a scalar memory is 1 MB
_HLO_TYPES = (
    ("bfloat", "bf"),
    ("float8_", "f8"),
    ("float", "f"),
    ("uint", "u"),
    ("int", "s"),
    ("bool", "pred"),
)


class Call(NamedTuple):
    """A call of a kernel: shapes of its operands as HLO writes them, `s32[4,8]`, and the values of
    those 32-bit ones that are known (None where not)."""

    shapes: list[str]
    values: list[np.ndarray | None]


def kernel_calls(traced: Jaxpr, args: Sequence[Any]) -> list[Call]:
    """The calls of Pallas kernels in a program, in order.

    Args:
      traced: of `jax.make_jaxpr(fn)(*args)`.
      args: pytrees of `ShapeDtypeStruct`, or of numpy arrays where values are given.
    """
    known = [leaf if isinstance(leaf, np.ndarray) else None for leaf in jax.tree.leaves(args)]
    calls: list[Call] = []
    _evaluate(traced, known, calls)
    return calls


def _evaluate(jaxpr: Jaxpr, args: Sequence[Any], calls: list[Call]) -> list[Any]:
    """The results of `jaxpr` that follow from the known `args`; the others are None."""
    inputs = [*jaxpr.constvars, *jaxpr.invars]
    values = dict(zip(inputs, [*jaxpr.consts, *args], strict=True))
    for equation in jaxpr.eqns:
        operands = [x.val if isinstance(x, Literal) else values.get(x) for x in equation.invars]
        results: Sequence[Any] = [None] * len(equation.outvars)
        if equation.primitive.name == "pallas_call":
            shapes = [_shape(x.aval) for x in equation.invars]
            calls.append(Call(shapes, [_small(x) for x in operands]))
        elif (body := _body(equation)) is not None:
            results = _evaluate(body, operands, calls)
        elif all(x is not None for x in operands) and not equation.effects:
            with contextlib.suppress(NameError):  # what asks for a mesh axis is not known here
                found = equation.primitive.bind(*operands, **equation.params)
                results = found if equation.primitive.multiple_results else [found]
        values.update(zip(equation.outvars, results, strict=True))
    return [x.val if isinstance(x, Literal) else values.get(x) for x in jaxpr.outvars]


def _body(equation: Any) -> Jaxpr | None:
    """The one jaxpr that an equation calls with its operands."""
    if equation.primitive.name in _LOOPS:
        return None
    inside = [x for x in equation.params.values() if isinstance(x, Jaxpr)]
    same = len(inside) == 1 and len(inside[0].invars) == len(equation.invars)
    return inside[0] if same else None


def _shape(aval: Any) -> str:
    name = np.dtype(aval.dtype).name
    for prefix, letters in _HLO_TYPES:
        if name.startswith(prefix):
            name = letters + name.removeprefix(prefix)
            break
    return f"{name}[{','.join(map(str, aval.shape))}]"


def _small(x: Any) -> np.ndarray | None:
    if x is None or x.size > _MAX_WORDS:
        return None
    if np.dtype(x.dtype) not in (np.int32, np.uint32, np.float32):
        return None
    return np.asarray(x)


def words(values: np.ndarray, tile: tuple[int, ...]) -> list[int | float]:
    """The 32-bit words of an array as memory holds it: row-major tiles, each of them row-major.

    Args:
      values: any shape; tile: of its last axes, such as (8, 128); padding holds zeros.
    """
    values = np.atleast_1d(values)
    lead, last = values.shape[: values.ndim - len(tile)], values.shape[values.ndim - len(tile) :]
    padding = [(0, -size % step) for size, step in zip(last, tile, strict=True)]
    values = np.pad(values, [(0, 0)] * len(lead) + padding)
    counts = [size // step for size, step in zip(values.shape[len(lead) :], tile, strict=True)]
    split = [n for pair in zip(counts, tile, strict=True) for n in pair]
    values = values.reshape(*lead, *split)
    first = len(lead)
    outer = range(first, values.ndim, 2)
    inner = range(first + 1, values.ndim, 2)
    return values.transpose(*range(first), *outer, *inner).ravel().tolist()
