"""Runs the program of one op: scalar unit exactly, vector units by scoreboard, copies by bandwidth.

Bundles between branches are a block. A block is timed the first three times that it is reached by
one path (the block before, the predicates of both); after that the third time's figures stand.
"""

import collections
import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from .bundles import Instruction, Program
from .chips import Chip
from .scalar import HBM, ScalarUnit, Value, unsigned
from .vector import Scoreboard, Timing

_GRANULE = 32  # bytes of a unit of a copy's size
_TIMED = 3
_MAX_BLOCKS = 250_000


@dataclasses.dataclass
class Execution:
    """What a run took.

    compute_cycles: bundles and the stalls between them; dma_cycles: waiting for copies.
    stalls: cycles by cause. visits: how often each block ran, by (first bundle, end).
    hbm_in, hbm_out: bytes copied.
    unknown_branches: branches decided by a value that is not known.
    complete: False if the run was cut short.
    """

    compute_cycles: int = 0
    dma_cycles: float = 0.0
    bundles: int = 0
    stalls: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    visits: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    hbm_in: int = 0
    hbm_out: int = 0
    unknown_branches: int = 0
    complete: bool = True

    @property
    def cycles(self) -> int:
        return round(self.compute_cycles + self.dma_cycles)


class _Block(NamedTuple):
    """Bundles lo to hi; `work` is what is executed and not only timed, with its bundle."""

    lo: int
    hi: int
    work: tuple[tuple[int, Instruction], ...]
    predicates: tuple[str, ...]


class _Copies:
    """Copies by DMA: a latency each, and one channel to HBM for all."""

    def __init__(self, chip: Chip, result: Execution):
        self._chip, self._result = chip, result
        self._channel_free = 0.0
        # Copies by the flag that they raise: granules, and the cycle in which they have arrived.
        self._flags: dict = collections.defaultdict(collections.deque)

    def start(self, op: str, args: Sequence[Value], now: float) -> None:
        source, granules, target, flag = args
        granules = unsigned(granules)
        reads = source >= HBM or ".hbm_to" in op
        writes = target >= HBM or "to_hbm" in op
        done = now
        if reads or writes:
            size = int(granules) * _GRANULE
            self._result.hbm_in += size * reads
            self._result.hbm_out += size * writes
            done = max(self._channel_free, now) + size / self._chip.hbm_bytes_per_cycle
            self._channel_free = done
        latency = self._chip.dma_out if writes else self._chip.dma_in
        self._flags[flag].append((granules, done + latency))

    def wait(self, args: Sequence[Value], now: float) -> None:
        flag, *size = args
        queue, need, done = self._flags[flag], unsigned(size[0]) if size else 0, now
        while queue and need > 0:
            granules, arrived = queue.popleft()
            need, done = need - granules, max(done, arrived)
        self._result.dma_cycles += done - now


class Machine:
    """One core that runs one op; `contents` is what `ScalarUnit` takes."""

    def __init__(self, program: Program, chip: Chip, contents: Mapping[int, Sequence[Value]]):
        self._bundles = program.bundles
        self._label = {r: k for k, bundle in enumerate(self._bundles) for r in bundle.regions}
        self._blocks = self._cut(chip.branch_delay)
        self._scalar = ScalarUnit(program, contents)
        self._vector = Scoreboard(chip)
        self._result = Execution()
        self._copies = _Copies(chip, self._result)
        self._replayed = 0  # cycles that were not timed anew

    def run(self) -> Execution:
        timings: dict[tuple, Timing] = {}
        seen: collections.Counter = collections.Counter()
        result, at, before = self._result, 0, None
        for _ in range(_MAX_BLOCKS):
            block = self._blocks.get(at)
            if block is None:
                break
            target, copies = self._execute(block)
            state = tuple(self._scalar.enabled((p, False)) for p in block.predicates)
            path = (before, block.lo, state)
            start = self._vector.now + self._replayed
            seen[path] += 1
            if seen[path] <= _TIMED:
                timings[path] = self._vector.run(
                    self._bundles, block.lo, block.hi, lambda i: self._scalar.enabled(i.predicate)
                )
            else:
                self._replayed += timings[path].cycles
            self._copy(copies, timings[path], start)
            result.stalls += timings[path].stalls
            result.visits[block.lo, block.hi] += 1
            result.bundles += block.hi - block.lo
            before, at = (block.lo, state), block.hi if target is None else target
        result.complete = at not in self._blocks
        result.compute_cycles = self._vector.now + self._replayed
        return result

    def _cut(self, branch_delay: int) -> dict[int, _Block]:
        """Blocks by their first bundle; they end where a branch takes effect or leads to."""
        cuts = {0, len(self._bundles)}
        for k, bundle in enumerate(self._bundles):
            for i in bundle.instructions:
                if i.op.startswith("sbr"):
                    cuts |= {self._target(i), k + branch_delay + 1}
        ordered = sorted(cut for cut in cuts if cut <= len(self._bundles))
        return {lo: self._block(lo, hi) for lo, hi in itertools.pairwise(ordered)}

    def _block(self, lo: int, hi: int) -> _Block:
        work, predicates = [], set()
        for k in range(lo, hi):
            # Within a bundle copies of the path come first and aliases of pointers last.
            for i in sorted(
                self._bundles[k].instructions,
                key=lambda i: (not i.op.startswith("sphi"), i.op.startswith("int_to_ptr")),
            ):
                if i.predicate:
                    predicates.add(i.predicate[0])
                scalar = i.result and i.result[1] in "sp" and i.op[0] != "v"
                if scalar or i.op.startswith(("dma.", "sst", "sbr")):
                    work.append((k, i))
        return _Block(lo, hi, tuple(work), tuple(sorted(predicates)))

    def _target(self, branch: Instruction) -> int:
        return self._label.get(branch.args[-1].split("$region")[1], len(self._bundles))

    def _execute(self, block: _Block) -> tuple[int | None, list[tuple[int, str, list[Value]]]]:
        """Runs a block's scalar work; returns where it branches, and the copies it starts or waits
        for: bundle, instruction, values of the arguments."""
        scalar, target, copies = self._scalar, None, []
        for k, i in block.work:
            branches = i.op.startswith("sbr")
            if branches and i.predicate:
                self._result.unknown_branches += scalar.is_unknown(i.predicate[0])
            if not scalar.enabled(i.predicate):
                scalar.skip(i)
            elif branches:
                target = self._target(i)
            elif i.op.startswith("dma."):
                args = [scalar.value(arg) for arg in i.args[:4]]
                copies.append((k, i.op, args))
                if i.op.endswith("to_smem"):
                    scalar.copy_in(args[0], unsigned(args[1]), args[2])
            else:
                scalar.execute(i)
        return target, copies

    def _copy(self, copies: list[tuple[int, str, list[Value]]], timing: Timing, start: int) -> None:
        for k, op, args in copies:
            now = start + timing.issue[k] + self._result.dma_cycles
            if op == "dma.done.wait":
                self._copies.wait(args, now)
            else:
                self._copies.start(op, args, now)
