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
UNKNOWN = 2**63 - 1  # what stands for no estimate: of work that a SparseCore does, for one
_ARRAY = re.compile(r"\b([a-z]+\d*\w*)\[([\d,]*)\]")
_IOTA = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH = re.compile(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}")
_GROUP = re.compile(r"(?:replica_groups|source_target_pairs)=\{\{([\d,]*)\}")


@dataclasses.dataclass(frozen=True)
class Collective:
    """One instruction: its kind, how often it runs, the bytes of its result on a device, and which
    devices take part: those of its first group, or all."""

    kind: str
    count: int
    size: int
    group: tuple[int, ...] = ()

    def axes(self, shape: tuple[int, ...], names: tuple[str, ...]) -> tuple[str, ...]:
        """The mesh axes along which the devices of a group differ."""
        if not self.group:  # all devices
            return tuple(name for name, size in zip(names, shape, strict=True) if size > 1)
        places = np.stack(np.unravel_index(self.group, shape))
        return tuple(
            name for name, row in zip(names, places, strict=True) if np.unique(row).size > 1
        )


@dataclasses.dataclass(frozen=True)
class Program:
    """The collectives of a program, the cycles that its instructions are estimated to take, 0 where
    the compiler gives no estimates, and how many runs of instructions it could not estimate."""

    collectives: tuple[Collective, ...]
    cycles: int
    unknown: int


def read(text: str) -> Program:
    """The `Program` of a compiled module's text."""
    module = Module.parse(text)
    found, cycles, unknown = [], 0, 0
    for name, body in module.definitions.items():
        instruction = _INSTRUCTION.match(body)
        if instruction is None:
            continue
        times, opcode = module.executions(name), instruction["opcode"]
        if estimate := _CYCLES.search(body):
            if int(estimate[1]) == UNKNOWN:
                unknown += times
            else:
                cycles += times * int(estimate[1])
        kind = opcode.removesuffix("-start")
        if kind in KINDS:
            size = _size(instruction["type"], started=kind != opcode)
            found.append(Collective(kind, times, size, _group(body)))
    return Program(tuple(found), cycles, unknown)


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
    if mesh := _MESH.search(body):  # of the program's own axes, or of others over the same devices
        sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", mesh[1])}
        ids = np.arange(math.prod(sizes.values())).reshape(list(sizes.values()))
        along = re.findall(r"'(\w+)'", mesh[2])
        first = tuple(slice(None) if name in along else 0 for name in sizes)
        return tuple(ids[first].ravel().tolist())
    if iota := _IOTA.search(body):
        groups, dims, order = (
            [int(n) for n in part.split(",")] if part else None for part in iota.groups()
        )
        ids = np.arange(math.prod(dims)).reshape(dims)
        return tuple(ids.transpose(order).reshape(groups)[0].tolist())
    group = _GROUP.search(body)
    return tuple(int(n) for n in group[1].split(",") if n) if group else ()
