"""Which implementation of an operation takes a call, and why another one did not.

An implementation is a module with two functions:

    refuses(spec, platform) -> str | None    why it cannot take the call, in one line, or None
    run(spec, inputs) -> outputs             the operation itself

where `spec` is the operation's frozen description of a call (shapes, dtypes, options). It joins
with one `register` line in the package of its operation, fastest first, and is imported at the
first call that asks about it, so that a backend whose library is missing costs nothing.
"""

import dataclasses
import functools
import importlib
import logging
from types import ModuleType
from typing import Any

import jax

log = logging.getLogger("pallas_kernels")

_PLATFORMS = {"cuda": "gpu", "rocm": "gpu"}


@dataclasses.dataclass(frozen=True)
class Implementation:
    """One row of the capability table.

    name: what callers pass as `implementation=`.
    module: dotted path of the module with `refuses` and `run`.
    platforms: where `implementation=None` may choose it, among "cpu", "gpu", "tpu". A named call
      is refused by `refuses` alone, so that a kernel's interpreter can be asked for by name.
    """

    name: str
    module: str
    platforms: tuple[str, ...]

    def load(self) -> ModuleType:
        return importlib.import_module(self.module)


_table: dict[str, list[Implementation]] = {}


def register(operation: str, implementation: Implementation) -> None:
    """Adds a row to the table of `operation`; earlier rows are preferred."""
    rows = _table.setdefault(operation, [])
    if any(row.name == implementation.name for row in rows):
        raise ValueError(f"{operation}: implementation {implementation.name!r} is registered twice")
    rows.append(implementation)


def names(operation: str) -> tuple[str, ...]:
    """The implementations of `operation`, fastest first."""
    return tuple(row.name for row in _table[operation])


def current_platform() -> str:
    """The platform that a traced call is compiled for: "cpu", "gpu" or "tpu".

    It is that of the current (abstract) mesh where there is one, so that a program compiled ahead
    of time for a TPU gets the TPU kernel on a CPU host; else that of the default backend.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    platform = jax.default_backend() if device is None else device.platform
    return _PLATFORMS.get(platform, platform)


def refusal(row: Implementation, spec: Any, platform: str) -> str | None:
    """Why `row` cannot take the call that `spec` describes on `platform`, or None."""
    try:
        module = row.load()
    except ImportError as error:
        return f"its module cannot be imported ({error})"
    return module.refuses(spec, platform)


def explain(operation: str, spec: Any, platform: str | None = None) -> dict[str, str | None]:
    """For every implementation: why it cannot take the call, or None where it can."""
    platform = platform or current_platform()
    return {row.name: refusal(row, spec, platform) for row in _table[operation]}


def choose(operation: str, spec: Any, implementation: str | None) -> ModuleType:
    """The module that takes the call.

    Args:
      operation: a registered operation, such as "kda".
      spec: the operation's description of the call.
      implementation: a registered name, or None for the first row whose platforms hold the
        current one and which does not refuse. Where that is plain JAX although there are kernels
        for the platform, a warning says why, once for each reason.

    Raises:
      ValueError: in one line, if the name is unknown, if the named implementation refuses, or if
        every implementation does.
    """
    platform = current_platform()
    rows = _table[operation]
    if implementation is None:
        reasons: list[str] = []
        for row in rows:
            if platform in row.platforms:
                reason = refusal(row, spec, platform)
                if reason is None:
                    if reasons and "cpu" in row.platforms:  # plain JAX where a kernel could be
                        _warn(f"{operation} on {platform} runs as {row.name}: {'; '.join(reasons)}")
                    return row.load()
                reasons.append(f"{row.name}: {reason}")
        raise ValueError(f"{operation}: no implementation on {platform}; " + "; ".join(reasons))
    for row in rows:
        if row.name == implementation:
            reason = refusal(row, spec, platform)
            if reason is not None:
                raise ValueError(f"{operation}: implementation={implementation!r}: {reason}")
            return row.load()
    raise ValueError(
        f"{operation}: implementation={implementation!r} is none of {', '.join(names(operation))}"
    )


@functools.cache
def _warn(line: str) -> None:
    log.warning(line)
