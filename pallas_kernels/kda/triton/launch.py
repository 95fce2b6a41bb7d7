"""How a kernel is run: through jax-triton on a GPU, in Triton's interpreter on a CPU.

jax-triton is imported at the first call, since on a jaxlib without GPU support its import raises.
The interpreter takes the place of the compiler where TRITON_INTERPRET=1 stood in the environment
when Triton was first imported.
"""

import dataclasses
import functools
import importlib.util
import os
from collections.abc import Callable, Sequence
from typing import Any

import jax

from ...vma import vary_together


@dataclasses.dataclass(frozen=True)
class Target:
    """What code is generated for.

    capability: as jax names it, "9.0" or "gfx942". shared: bytes of shared memory that one program
    may use.
    """

    capability: str
    shared: int

    @property
    def amd(self) -> bool:
        return self.capability.startswith("gfx")

    @property
    def precision(self) -> str:
        """How a product of float32 keeps float32's accuracy on the matrix units."""
        return "ieee" if self.amd else "tf32x3"


_KIB = 1024
# Shared memory per program, by what jax calls the compute capability.
_SHARED = {"8.0": 163 * _KIB, "8.6": 99 * _KIB, "8.9": 99 * _KIB, "9.0": 227 * _KIB,
           "10.0": 227 * _KIB, "10.3": 227 * _KIB, "12.0": 99 * _KIB,
           "gfx942": 64 * _KIB, "gfx950": 160 * _KIB}  # fmt: skip


def target_of(capability: str) -> Target:
    """The target of a compute capability ("9.0", "gfx942"); unknown ones get the smallest."""
    capability = capability.split(":")[0]
    smallest = (64 if capability.startswith("gfx") else 99) * _KIB
    return Target(capability, _SHARED.get(capability, smallest))


@functools.cache
def current_target() -> Target:
    """The target of this process' first GPU, which jax-triton compiles for; without one, Hopper."""
    try:
        device = jax.devices("gpu")[0]
    except RuntimeError:
        return target_of("9.0")
    return target_of(str(device.compute_capability))


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def missing() -> str | None:
    """Which library is not installed, in one line, or None."""
    needed = ("triton",) if interpreted() else ("triton", "jax_triton")
    absent = [name.replace("_", "-") for name in needed if importlib.util.find_spec(name) is None]
    return f"{' and '.join(absent)} not installed (pip install 'k3jax[gpu]')" if absent else None


def call(
    kernel: Callable[..., Any],
    arrays: Sequence[jax.Array],
    sizes: Sequence[int],
    results: Sequence[jax.ShapeDtypeStruct],
    programs: int,
    *,
    warps: int,
    stages: int,
    **constants: Any,
) -> tuple[jax.Array, ...]:
    """Runs `programs` programs of a kernel, whose parameters are the arrays, the sizes, the results
    and the constants, in this order."""
    if interpreted():
        from . import interpreter

        run = functools.partial(interpreter.run, kernel, results, sizes, programs, constants)
        out = jax.pure_callback(run, tuple(results), *arrays)
    else:
        import jax_triton

        # 0.4 calls it out_type, and needs Triton 3.7.
        out = jax_triton.triton_call(
            *arrays,
            *sizes,
            kernel=kernel,
            out_shape=tuple(results),
            grid=(programs,),
            name=kernel.__name__,
            num_warps=warps,
            num_stages=stages,
            **constants,
        )
    return tuple(vary_together((tuple(out), tuple(arrays)))[0])
