"""The vector units of a core as a scoreboard that issues bundles in order.

A bundle issues when the registers that it reads are ready, its units are free and the results that
it pops have arrived. A block of rows and a push of weights are each preceded by a `vmatprep` of
their first half, which has a port of its own: four ports per MXU.
"""

import collections
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from .bundles import Bundle, Instruction, physical
from .chips import Chip

_EUP = ("vexp2", "vlog2", "vrcp", "vrsqrt", "vtanh", "vsigshft", "vpow2", "vsin", "vcos", "verf")
_MASKS = ("vcmp", "vcmask", "vmand", "vmor", "vmneg", "vmxor", "vmmov")
_ONE_CYCLE = ("vld", "vsel", "vmov", "vpop", "vset", *_MASKS)
_NOT_ISSUED = ("sphi", "vphi", "int_to_ptr", "inlined")
_PUSH_TO_SCALAR = 49  # vector register to scalar unit
_SCALAR_LOAD = 6
_SLOT = re.compile(r"mrb\[(\d+)")


class Timing(NamedTuple):
    """Of a stretch of bundles: cycles, the cycle at which each issues, stalls by cause."""

    cycles: int
    issue: dict[int, int]
    stalls: dict[str, int]


class Scoreboard:
    def __init__(self, chip: Chip):
        self.now = 0
        self._chip = chip
        self._ready: dict = collections.defaultdict(int)  # when a register (result slot) is there
        self._free: dict = collections.defaultdict(int)  # when a port takes the next instruction
        # Results that are popped in order, as [ready, how many are left], by (unit, kind).
        self._queues: dict = collections.defaultdict(collections.deque)
        self._pops_per_transpose: dict[str, int] = {}

    def run(
        self, bundles: Sequence[Bundle], lo: int, hi: int, enabled: Callable[[Instruction], bool]
    ) -> Timing:
        """Issues bundles lo to hi; `enabled` says whether a predicate is on."""
        start, issue = self.now, {}
        stalls: collections.Counter = collections.Counter()
        self._pops_per_transpose = _pops_per_transpose(bundles[lo:hi])
        for k in range(lo, hi):
            now = self.now + 1
            live = [
                i
                for i in bundles[k].instructions
                if (i.otherwise or enabled(i)) and not i.op.startswith(_NOT_ISSUED)
            ]
            for i in live:
                at = self._earliest(i, now)
                if at > now:
                    stalls[_cause(i.op)] += at - now
                    now = at
            for i in live:
                self._retire(i, now)
            self.now, issue[k] = now, now - start
        return Timing(self.now - start, issue, stalls)

    def _earliest(self, i: Instruction, now: int) -> int:
        """The first cycle from `now` on at which `i` can issue."""
        now = max(now, *(self._ready[r] for r in i.sources)) if i.sources else now
        if i.unit is None:
            return now
        if i.op.startswith("vpop"):
            slot = _SLOT.search(i.op)
            if slot:  # a result with an address
                return max(now, self._ready["mrb", i.unit, int(slot.group(1))])
            queue = self._queues.get((i.unit, i.op.split(".")[-2]))
            return max(now, queue[0][0]) if queue else now
        now = max(now, self._free[_port(i)])
        # "vlgmr" makes the pushed weights the current ones
        return max(now, self._free["weights", i.unit]) if "vlgmr" in i.op else now

    def _retire(self, i: Instruction, now: int) -> None:
        latency = 2 if i.op[0] == "v" else 1
        if i.op.startswith("vmat"):
            self._matrix(i, now)
        elif i.op.startswith("vpop"):
            self._pop(i)
        elif i.unit and not i.op.startswith("vset"):
            latency = self._cross_lane(i, now)
        elif i.op.startswith(_EUP):
            latency = self._chip.eup_latency
        elif i.op == "vpush":
            latency = _PUSH_TO_SCALAR
        elif i.op == "sld":
            latency = _SCALAR_LOAD
        if i.result:
            if i.result[1] == "p":
                latency = 2
            elif i.op.startswith(_ONE_CYCLE):
                latency = 1
            self._ready[physical(i.result)] = now + latency

    def _matrix(self, i: Instruction, now: int) -> None:
        pushes = i.op.startswith("vmatpush")
        interval = self._chip.push if pushes or ".subr" in i.op else self._chip.matmul
        self._free[_port(i)] = now + (interval.packed if i.packed else interval.f32)
        if pushes:
            self._free["weights", i.unit] = now + 3
        if not i.op.startswith("vmatmul"):
            return
        ready = now + self._chip.mxu_latency
        results = (1 + i.packed) * self._chip.mxu_width // 128  # registers of 8 rows of float32
        slot = _SLOT.search(i.op)
        if slot is None:
            self._queues[i.unit, "mrf"].append([ready, results])
            return
        for k in range(results):
            self._ready["mrb", i.unit, int(slot.group(1)) + k] = ready

    def _pop(self, i: Instruction) -> None:
        queue = self._queues.get((i.unit, i.op.split(".")[-2]))
        if queue:
            queue[0][1] -= 1
            if queue[0][1] <= 0:
                queue.popleft()

    def _cross_lane(self, i: Instruction, now: int) -> int:
        """A permute, reduction or transpose; returns its latency."""
        chip, unit = self._chip, i.unit
        self._free[_port(i)] = now + chip.xlu_interval
        if i.op.startswith("vxpose") and ".start" in i.op:
            self._ready["transpose", unit] = now
        if i.op.startswith("vxpose") and i.op.endswith("end"):
            first = self._ready["transpose", unit] + chip.transpose_latency
            ready = max(first, now + chip.transpose_latency // 2)
            results = self._pops_per_transpose.get(unit or "", 1)
            self._queues[unit, "trf"].append([ready, results])
        return chip.reduce_latency if ".xlane" in i.op else chip.permute_latency


def _port(i: Instruction) -> tuple[str, str | None]:
    if i.op.startswith("vmatprep"):
        return i.op.split(".")[1], i.unit
    return (i.op[:7] if i.op.startswith("vmat") else "xlu"), i.unit


def _pops_per_transpose(bundles: Sequence[Bundle]) -> dict[str, int]:
    """Registers that one transpose leaves, by unit: pops over transposes in this stretch."""
    pops: collections.Counter = collections.Counter()
    transposes: collections.Counter = collections.Counter()
    for bundle in bundles:
        for i in bundle.instructions:
            pops[i.unit] += i.op.startswith("vpop.trf")
            transposes[i.unit] += i.op.startswith("vxpose") and i.op.endswith("end")
    return {unit: -(-pops[unit] // n) for unit, n in transposes.items() if n}


def _cause(op: str) -> str:
    if op.startswith("vmat"):
        return "mxu_port"
    if op.startswith("vpop.") and "mxu" in op:
        return "mxu_result"
    if "xlu" in op:
        return "xlu"
    if "erf" in op:  # the queue of the transcendental unit
        return "eup"
    return "valu" if op[0] == "v" else "scalar"
