"""What a compiled program sends between devices, read from its HLO text.

Instructions count as often as they run, by `pallas_kernels.tpu_schedule.hlo`: the body of a loop as
often as the constant in its condition says, a branch as if it were taken.
"""

from __future__ import annotations

import dataclasses
import math
import re

import numpy as np

from pallas_kernels.tpu_schedule.hlo import Module

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
KINDS += ("ragged-all-to-all", "collective-broadcast")
_INSTRUCTION = re.compile(r"(?P<type>\(.*?\)|\S+) (?P<opcode>[\w-]+)\(")
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_ARRAY = re.compile(r"\b([a-z]+\d*\w*)\[([\d,]*)\]")
_IOTA = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_AXES = re.compile(r"replica_groups=mesh\[[^\]]*\] \{([^}]*)\}")
_GROUP = re.compile(r"(?:replica_groups|source_target_pairs)=\{\{([\d,]*)\}")


@dataclasses.dataclass(frozen=True)
class Collective:
    """One instruction: its kind, how often it runs, the bytes of its result on a device, and which
    devices take part: those of its first group, or those along the mesh axes `along`."""

    kind: str
    count: int
    size: int
    group: tuple[int, ...] = ()
    along: tuple[str, ...] = ()

    def axes(self, shape: tuple[int, ...], names: tuple[str, ...]) -> tuple[str, ...]:
        """The mesh axes along which the devices of a group differ."""
        if self.along:
            return self.along
        if not self.group:  # all devices
            return tuple(name for name, size in zip(names, shape, strict=True) if size > 1)
        places = np.stack(np.unravel_index(self.group, shape))
        return tuple(
            name for name, row in zip(names, places, strict=True) if np.unique(row).size > 1
        )


@dataclasses.dataclass(frozen=True)
class Program:
    """The collectives of a program, and the cycles that its instructions are estimated to take, 0
    where the compiler gives no estimates."""

    collectives: tuple[Collective, ...]
    cycles: int


def read(text: str) -> Program:
    """The `Program` of a compiled module's text."""
    module = Module.parse(text)
    found, cycles = [], 0
    for name, body in module.definitions.items():
        instruction = _INSTRUCTION.match(body)
        if instruction is None:
            continue
        times, opcode = module.executions(name), instruction["opcode"]
        if estimate := _CYCLES.search(body):
            cycles += times * int(estimate[1])
        kind = opcode.removesuffix("-start")
        if kind in KINDS:
            size = _size(instruction["type"], started=kind != opcode)
            along = _AXES.search(body)
            names = tuple(re.findall(r"'(\w+)'", along[1])) if along else ()
            found.append(Collective(kind, times, size, _group(body), names))
    return Program(tuple(found), cycles)


def _size(shapes: str, started: bool) -> int:
    """Bytes of an instruction's result; one that was started holds its operands before it."""
    arrays = [
        math.prod(map(int, filter(None, sizes.split(",")))) * _width(dtype)
        for dtype, sizes in _ARRAY.findall(shapes)
    ]
    return max(arrays) if started else sum(arrays)


def _width(dtype: str) -> int:
    bits = re.search(r"\d+", dtype)
    return max(int(bits[0]) // 8, 1) if bits else 1


def _group(body: str) -> tuple[int, ...]:
    if iota := _IOTA.search(body):
        groups, dims, order = (
            [int(n) for n in part.split(",")] if part else None for part in iota.groups()
        )
        ids = np.arange(math.prod(dims)).reshape(dims)
        return tuple(ids.transpose(order).reshape(groups)[0].tolist())
    group = _GROUP.search(body)
    return tuple(int(n) for n in group[1].split(",") if n) if group else ()
