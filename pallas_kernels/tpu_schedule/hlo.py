"""What the report needs of a compiled program's HLO text."""

import collections
import dataclasses
import math
import re

_COMPUTATION = re.compile(r"(?:ENTRY )?%?([\w.\-]+) \(.*\{$")
_DEFINITION = re.compile(r"\s+(?:ROOT )?%?([\w.\-]+) = (.*)")
_CALLED = re.compile(r"(?:body|to_apply|calls|true_computation|false_computation)=%?([\w.\-]+)")
_CONDITION = re.compile(r" while\(.*condition=%?([\w.\-]+)")
_BOUND = re.compile(r"^s32\[\]\S* constant\((\d+)\)")
_SCOPED = re.compile(r'"used_scoped_memory_configs":\[\{"memory_space":"1",[^}]*"size":"(\d+)"')
_COPY = re.compile(r"\((\w+)\[([\d,]*)\]\{([^}]*)\}, \w+\[[\d,]*\]\{([^}]*)\}.* copy-start\(")
_IN_VMEM = "S(1)"


@dataclasses.dataclass
class Module:
    """definitions: the right side of each instruction, by name; computation: where it is."""

    definitions: dict[str, str]
    computation: dict[str, str]
    _calls: dict[str, list[tuple[str, str | None]]]
    _bounds: dict[str, list[int]]

    @classmethod
    def parse(cls, text: str) -> "Module":
        definitions: dict[str, str] = {}
        computation: dict[str, str] = {}
        calls: dict = collections.defaultdict(list)
        bounds: dict = collections.defaultdict(list)
        here = ""
        for line in text.splitlines():
            if head := _COMPUTATION.match(line):
                here = head.group(1)
            elif found := _DEFINITION.match(line):
                name, body = found.groups()
                definitions[name], computation[name] = body, here
                bounds[here] += map(int, _BOUND.findall(body))
                condition = _CONDITION.search(body)
                for called in _CALLED.findall(body):
                    calls[called].append((here, condition and condition.group(1)))
        return cls(definitions, computation, calls, bounds)

    def executions(self, name: str) -> int:
        """How often an instruction runs: the trips of the loops around it. A loop is taken to count
        up to the constant in its condition."""
        return self._runs(self.computation.get(name, ""))

    def _runs(self, computation: str) -> int:
        callers = self._calls.get(computation)
        if not callers:
            return 1
        trips = (
            self._runs(caller) * max(self._bounds.get(condition or "") or [1])
            for caller, condition in callers
        )
        return max(1, sum(trips))

    def is_kernel(self, name: str) -> bool:
        """Whether an instruction is a Pallas kernel (XLA has custom calls of its own)."""
        return 'custom_call_target="tpu_custom_call"' in self.definitions.get(name, "")

    def scoped_vmem(self, name: str) -> int:
        """Bytes of VMEM that an instruction takes for itself: windows, scratch and spills."""
        found = _SCOPED.search(self.definitions.get(name, ""))
        return int(found.group(1)) if found else 0

    def tile(self, name: str) -> tuple[int, ...] | None:
        """The tile of an array in memory, row-major, by the axes that it covers; None if the text
        does not say, or the axes are in another order."""
        found = re.match(r"\w+\[([\d,]*)\]\{([\d,]*):T\(([\d,]*)\)", self.definitions.get(name, ""))
        if found is None:
            return None
        shape, order, tile = ([int(n) for n in group.split(",") if n] for group in found.groups())
        return tuple(tile) if order == sorted(order, reverse=True) and shape else None

    def copied_bytes(self) -> int:
        """Bytes that XLA itself copies between HBM and VMEM, beside the ops."""
        total = 0
        for name, body in self.definitions.items():
            found = _COPY.match(body)
            if found is None:
                continue
            dtype, dims, target, source = found.groups()
            if (_IN_VMEM in target) != (_IN_VMEM in source):
                width = re.search(r"\d+", dtype)
                bits = int(width.group()) if width else 8
                size = math.prod(int(n) for n in dims.split(",") if n)
                total += self.executions(name) * size * bits // 8
        return total
