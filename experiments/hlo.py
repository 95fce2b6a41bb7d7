"""What a compiled program sends between devices, read from its HLO text.

Instructions count as often as they run: the body of a loop as often as the compiler knows it to
turn, a branch as if it were taken.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator

import numpy as np

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
KINDS += ("ragged-all-to-all", "collective-broadcast")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?\S+ = (?P<type>\(.*?\)|\S+) (?P<opcode>[\w-]+)\(")
_COMPUTATION = re.compile(r"^(?P<entry>ENTRY )?%?(?P<name>[\w.-]+) \(.*\{$")
_CALLED = re.compile(r"(?:body|calls|to_apply|true_computation|false_computation)=%?([\w.-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_TURNS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_ARRAY = re.compile(r"\b([a-z]+\d*\w*)\[([\d,]*)\]")
_IOTA = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_GROUP = re.compile(r"(?:replica_groups|source_target_pairs)=\{\{([\d,]*)\}")


@dataclasses.dataclass(frozen=True)
class Collective:
    """One instruction: its kind, how often it runs, the bytes of its result on a device, and the
    devices of its first group."""

    kind: str
    count: int
    size: int
    group: tuple[int, ...]

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
    """The collectives of a program, and the cycles that its instructions are estimated to take, 0
    where the compiler gives no estimates."""

    collectives: tuple[Collective, ...]
    cycles: int


def read(text: str) -> Program:
    """The `Program` of a compiled module's text."""
    computations: dict[str, list[str]] = {}
    entry, lines = "", []
    for line in text.splitlines():
        if head := _COMPUTATION.match(line):
            lines = computations.setdefault(head["name"], [])
            entry = head["name"] if head["entry"] else entry
        else:
            lines.append(line)
    found: list[Collective] = []
    cycles = sum(_walk(computations, entry, 1, found))
    return Program(tuple(found), cycles)


def _walk(
    computations: dict[str, list[str]], name: str, times: int, found: list[Collective]
) -> Iterator[int]:
    """Adds what computation `name`, run `times` times, sends; yields its cycles."""
    for line in computations.get(name, ()):
        instruction = _INSTRUCTION.match(line)
        if instruction is None or instruction["opcode"].endswith(("-done", "-update")):
            continue
        opcode = instruction["opcode"]
        kind = opcode.removesuffix("-start")
        if kind in KINDS:
            size = _size(instruction["type"], started=kind != opcode)
            found.append(Collective(kind, times, size, _group(line)))
        if cycles := _CYCLES.search(line):
            yield times * int(cycles[1])
        turns = _TURNS.search(line) if opcode == "while" else None
        inside = times * int(turns[1]) if turns else times
        called = _CALLED.findall(line) if kind not in KINDS else []
        if branches := _BRANCHES.search(line):
            called += [branch.strip().lstrip("%") for branch in branches[1].split(",")]
        for computation in called:
            inner = list(_walk(computations, computation, inside, found))
            if not cycles:  # those of a fusion are its caller's
                yield from inner


def _size(shapes: str, started: bool) -> int:
    """Bytes of an instruction's result; one that was started holds its operands before it."""
    arrays = [
        math.prod(map(int, filter(None, sizes.split(",")))) * _width(dtype)
        for dtype, sizes in _ARRAY.findall(shapes)
    ]
    if started and len(arrays) > 1:
        return max(arrays)
    return sum(arrays)


def _width(dtype: str) -> int:
    if dtype == "pred":
        return 1
    bits = re.search(r"\d+", dtype)
    return max(int(bits[0]) // 8, 1) if bits else 0


def _group(line: str) -> tuple[int, ...]:
    if iota := _IOTA.search(line):
        groups, dims, order = (
            [int(n) for n in part.split(",")] if part else None for part in iota.groups()
        )
        ids = np.arange(math.prod(dims)).reshape(dims)
        return tuple(ids.transpose(order).reshape(groups)[0].tolist())
    group = _GROUP.search(line)
    return tuple(int(n) for n in group[1].split(",") if n) if group else ()
