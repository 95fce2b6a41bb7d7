"""Triton's CPU interpreter over numpy arrays, without PyTorch.

Of an argument the interpreter asks what `_Argument` has. Its own bfloat16 truncates, and its
products multiply the bits; here both are those of a GPU.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import ml_dtypes
import numpy as np
import triton.language as tl
from triton.runtime import interpreter as triton_interpreter

_NAMES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "int32": "i32", "int8": "i8"}


class _Argument:
    """A contiguous numpy array as the interpreter sees a tensor, and as its own storage."""

    def __init__(self, array: np.ndarray):
        self.array = array
        self.dtype = _NAMES[array.dtype.name]
        self.shape = array.shape

    def data_ptr(self) -> int:
        return self.array.ctypes.data

    def untyped_storage(self) -> "_Argument":
        return self

    def cpu(self) -> "_Argument":
        return self

    def copy_(self, other: "_Argument") -> None:
        assert other.data_ptr() == self.data_ptr()  # the kernel wrote in place

    def new_empty(self, *_: Any, **__: Any) -> "_Argument":
        return _Argument(self.array)

    def set_(self, storage: "_Argument", *_: Any) -> None:
        self.array = storage.array

    def storage_offset(self) -> int:
        return 0

    def size(self) -> tuple[int, ...]:
        return self.array.shape

    def stride(self) -> tuple[int, ...]:
        return self.array.strides


def run(
    kernel: Any,
    results: Sequence[jax.ShapeDtypeStruct],
    sizes: Sequence[int],
    programs: int,
    constants: dict[str, Any],
    *arrays: jax.Array,
) -> tuple[np.ndarray, ...]:
    """Every program in turn; results begin as NaN, so that what is not written is seen."""
    _repair()
    _patched.clear()
    # A kernel never writes to an argument, so views will do.
    inputs = [np.ascontiguousarray(x) for x in arrays]
    outputs = [np.full(r.shape, np.nan, r.dtype) for r in results]
    arguments = (*map(_Argument, inputs), *sizes, *map(_Argument, outputs))
    with np.errstate(all="ignore"):
        kernel[(programs,)](*arguments, **constants)
    return tuple(outputs)


def _repair() -> None:
    """Once per process: what the interpreter gets wrong, or does again for every nested call."""
    builder = triton_interpreter.InterpreterBuilder
    if builder.create_dot is _dot:
        return
    cast, tensor, language = (
        builder.cast_impl,
        triton_interpreter._patch_lang_tensor,
        triton_interpreter._patch_lang,
    )

    def cast_impl(self, source, to):
        if source.dtype.scalar == tl.float32 and to.scalar == tl.bfloat16:
            bits = source.data.astype(ml_dtypes.bfloat16).view(np.uint16)
            return triton_interpreter.TensorHandle(bits, tl.bfloat16)
        return cast(self, source, to)

    def patch_tensor(kind, scope):
        tensor(kind, scope)
        # Since numpy 2.5 an array of one element is no int.
        scope.set_attr(kind, "__index__", lambda self: int(self.handle.data.item()))

    def patch_language(function):
        modules = _modules(function)
        if modules in _patched:
            return None
        _patched.add(modules)
        return language(function)

    builder.cast_impl = cast_impl
    builder.create_dot = _dot
    triton_interpreter._patch_lang_tensor = patch_tensor
    triton_interpreter._patch_lang = patch_language


# Modules of Triton's language that are the interpreter's during this run.
_patched: set[frozenset[str]] = set()


@functools.cache
def _modules(function: Callable[..., Any]) -> frozenset[str]:
    found = (x for x in function.__globals__.values() if x is tl or x is tl.core)
    return frozenset(x.__name__ for x in found)


def _dot(self, a, b, acc, input_precision, max_num_imprecise_acc):
    def wide(x):
        data = x.data.view(ml_dtypes.bfloat16) if x.dtype.scalar == tl.bfloat16 else x.data
        return data.astype(np.float32)

    product = np.matmul(wide(a), wide(b)) + acc.data
    return triton_interpreter.TensorHandle(product, acc.dtype.scalar)
