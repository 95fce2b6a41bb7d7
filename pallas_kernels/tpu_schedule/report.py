"""From libtpu's dump of a program to what each op costs, and to a table."""

import collections
import dataclasses
import json
import re
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from . import bundles, machine, operands, worker
from .chips import Chip, chip_of
from .hlo import Module

# The columns of libtpu's utilization file; the matrix and cross-lane units are counted here.
_COUNTED = ("MATMUL", "MATPUSH", "XLU")
_READ = ("VALU", "VPOP", "EUP", "VLOAD", "FILL", "VSTORE", "SPILL", "SALU")
_COLUMNS = (*_COUNTED, *_READ)
_MEMORY_PORTS = 4  # loads and stores in a bundle


@dataclasses.dataclass(frozen=True)
class Op:
    """The cost of one op; cycles and counts are of one call, times of all `calls`.

    kind: "kernel" (Pallas) or "xla". steps: of the grid (trips of the outer loop).
    bundles: issued, one a cycle at best. cycles: with stalls, and with waits for copies.
    stalls: cycles by cause. uses: instructions by unit. floors: the cycles that each unit alone
      would need. vmem: bytes of windows, scratch and spills. hbm_in, hbm_out: bytes copied.
    unknown_branches: branches decided by a value that is not known, and read as 0.
    complete: False if the run was cut short.
    """

    name: str
    kind: str
    calls: int
    steps: int
    bundles: int
    compute_cycles: int
    dma_cycles: int
    cycles: int
    ms: float
    issue_ms: float
    dma_ms: float
    stalls: dict[str, int]
    uses: dict[str, int]
    floors: dict[str, int]
    vmem: int
    hbm_in: int
    hbm_out: int
    unknown_branches: int
    complete: bool

    @property
    def hbm_bytes(self) -> int:
        return self.calls * (self.hbm_in + self.hbm_out)


@dataclasses.dataclass(frozen=True)
class Report:
    """The cost of a program on one core; ops from the longest to the shortest.

    copied_bytes: what XLA moves between HBM and VMEM beside the ops; its time is not counted.
    """

    case: str
    settings: dict[str, Any]
    topology: str
    device: str
    clock: float
    hbm_rate: float
    copied_bytes: int
    temporary_bytes: int
    ops: tuple[Op, ...]

    def total(self, field: str, kind: str | None = None) -> float:
        """A field of the ops (of one kind), added up."""
        return sum(getattr(op, field) for op in self.ops if kind in (None, op.kind))

    @property
    def ms(self) -> float:
        return self.total("ms")

    @property
    def hbm_bytes(self) -> int:
        return int(self.total("hbm_bytes")) + self.copied_bytes

    def as_json(self) -> dict[str, Any]:
        totals = {
            "ms": self.ms,
            "kernel_ms": self.total("ms", "kernel"),
            "xla_ms": self.total("ms", "xla"),
            "issue_ms": self.total("issue_ms"),
            "dma_ms": self.total("dma_ms"),
            "hbm_bytes": self.hbm_bytes,
        }
        return {**dataclasses.asdict(self), **totals}


def report(case: str, topology: str, **settings: Any) -> Report:
    """Compiles a case in a process of its own and adds up what its ops cost.

    Args:
      case: "module:function". The function is called with `settings`, which JSON can hold, under
        the abstract mesh of one core, and returns `(fn, args)`. `args` are `ShapeDtypeStruct`s, and
        numpy arrays where the values matter: they reach the scalar memory of the kernels.
      topology: such as "tpu7x:2x2x1".

    Raises:
      ValueError: for a topology of no known chip.
      ModuleNotFoundError, RuntimeError: as `worker.compile_case` does.
    """
    chip_of(topology)
    with tempfile.TemporaryDirectory(prefix="tpu_schedule_") as directory:
        worker.compile_case(case, settings, topology, Path(directory))
        return read(Path(directory), case, topology, settings)


def read(directory: Path, case: str, topology: str, settings: dict[str, Any]) -> Report:
    """The report of a directory that `worker.compile_case` filled."""
    chip = chip_of(topology)
    module = Module.parse((directory / worker.HLO).read_text())
    calls = json.loads((directory / worker.CALLS).read_text())
    ops = [op_cost(*files, chip, module, calls) for files in _dumped_ops(directory)]
    return Report(
        case=case,
        settings=settings,
        topology=topology,
        clock=chip.clock,
        hbm_rate=chip.hbm_bytes,
        copied_bytes=module.copied_bytes(),
        ops=tuple(sorted(ops, key=lambda op: -op.ms)),
        **json.loads((directory / worker.FACTS).read_text()),
    )


def _dumped_ops(directory: Path) -> Iterator[tuple[str, list[str], Path, Path]]:
    """Of each op: its name, the names of the instructions that share it (libtpu emits equal ops
    once), its bundles and its utilization."""
    twins: dict[str, list[str]] = {}
    for file in directory.glob("*deduplication-map.txt"):
        for block in file.read_text().split("key:")[1:]:
            key, *rest = block.split("\n")
            twins[key] = [line.strip() for line in rest if line.startswith("  ")]
    for file in directory.glob("*-final_bundles.txt"):
        found = re.fullmatch(r"(\d+-(.*))-\d+-final_bundles\.txt", file.name)
        if found is None or found.group(2) == "TLP" or found.group(2).startswith("<"):
            continue
        prefix, name = found.groups()
        (usage,) = (
            path
            for path in directory.glob("*-final_hlo-static-per-bundle-utilization.txt")
            if re.fullmatch(re.escape(prefix) + r"-\d+-final_hlo.*", path.name)
        )
        yield name, twins.get(name) or [name], file, usage


def op_cost(
    name: str,
    twins: Sequence[str],
    bundle_file: Path,
    usage_file: Path,
    chip: Chip,
    module: Module,
    calls: Sequence[tuple[list[str], list[Any]]],
) -> Op:
    """Runs one op; `calls` are those of `operands.kernel_calls`."""
    program = bundles.parse(bundle_file.read_text())
    is_kernel = module.is_kernel(name)
    contents = _contents(program, module, calls) if is_kernel else {}
    run = machine.Machine(program, chip, contents).run()
    uses, floors = _unit_use(program, run, chip, usage_file.read_text())
    loops = [n for (lo, _), n in run.visits.items() if program.bundles[lo].loop_depth == 1]
    executions = sum(module.executions(twin) for twin in twins)
    cycles = run.cycles
    to_ms = executions * 1e3 / chip.clock
    moved = run.hbm_in + run.hbm_out
    return Op(
        name=name,
        kind="kernel" if is_kernel else "xla",
        calls=executions,
        steps=program.steps if program.steps > 1 else max(loops, default=1),
        bundles=run.bundles,
        compute_cycles=run.compute_cycles,
        dma_cycles=round(run.dma_cycles),
        cycles=cycles,
        ms=cycles * to_ms,
        issue_ms=run.bundles * to_ms,
        dma_ms=moved / chip.hbm_bytes_per_cycle * to_ms,
        stalls=dict(run.stalls),
        uses=uses,
        floors=floors,
        vmem=module.scoped_vmem(name),
        hbm_in=run.hbm_in,
        hbm_out=run.hbm_out,
        unknown_branches=run.unknown_branches,
        complete=run.complete,
    )


def _contents(
    program: bundles.Program, module: Module, calls: Sequence[tuple[list[str], list[Any]]]
) -> dict[int, list[int | float]]:
    """The words of a kernel's operands that are known: those of the calls with its shapes.

    Two calls that agree in their shapes and not in a value leave that value unknown.
    """
    inputs = sorted(
        {op.index: op.shape for op in program.operands.values() if op.kind == "input"}.items()
    )
    shapes = [shape for _, shape in inputs]
    matching = [values for call_shapes, values in calls if call_shapes == shapes]
    contents = {}
    for (index, shape), *values in zip(inputs, *matching, strict=True):
        tile = module.tile(program.arguments[index])
        if not values or values[0] is None or any(v != values[0] for v in values):
            continue
        if shape.endswith("[]"):
            contents[index] = [values[0]]
        elif tile is not None:
            contents[index] = operands.words(np.asarray(values[0]), tile)
    return contents


def _unit_use(
    program: bundles.Program, run: machine.Execution, chip: Chip, usage: str
) -> tuple[dict[str, int], dict[str, int]]:
    """Instructions by unit, and the cycles that each unit alone would need."""
    capacity, *rows = (
        dict(zip(_COLUMNS, map(int, line.split()), strict=True))
        for line in usage.splitlines()
        if re.fullmatch(r"[\d ]+", line.strip())
    )
    uses: collections.Counter = collections.Counter()
    busy: collections.Counter = collections.Counter()
    for (lo, hi), visits in run.visits.items():
        for k in range(lo, hi):
            if k < len(rows):
                uses.update({unit: visits * rows[k][unit] for unit in _READ})
            for i in program.bundles[k].instructions:
                if i.unit and not i.op.startswith(("vpop", "vmatprep", "vset")):
                    unit, interval = _busy(i, chip)
                    uses[unit] += visits
                    busy[unit] += visits * interval
    memory = (uses["VLOAD"] + uses["VSTORE"]) / _MEMORY_PORTS
    floors = {
        "MXU": busy["MATMUL"] / chip.mxus,
        "PUSH": busy["MATPUSH"] / chip.mxus,
        "XLU": busy["XLU"] / chip.xlus,
        "VALU": uses["VALU"] / capacity["VALU"],
        "VPOP": uses["VPOP"] / capacity["VPOP"],
        "EUP": uses["EUP"] / capacity["EUP"],
        "LDST": max(uses["VLOAD"] / capacity["VLOAD"], uses["VSTORE"] / capacity["VSTORE"], memory),
    }
    return {unit: uses[unit] for unit in _COLUMNS}, {u: round(n) for u, n in floors.items()}


def _busy(i: bundles.Instruction, chip: Chip) -> tuple[str, int]:
    """The unit of an instruction, and for how many cycles it takes no other."""
    if i.op.startswith("vmatmul"):
        return "MATMUL", chip.matmul.packed if i.packed else chip.matmul.f32
    if i.op.startswith("vmatpush"):
        return "MATPUSH", chip.push.packed if i.packed else chip.push.f32
    return "XLU", chip.xlu_interval


def table(result: Report, least_ms: float = 0.001) -> str:
    """Ops that take at least `least_ms`, and the totals. Percentages are of an op's cycles."""
    head = (
        f"{'op':34}{'calls':>6}{'steps':>6}{'cyc/step':>9}{'ms':>8}{'issue':>7}{'DMA':>7}{'wait':>5}"
        f"{'MXU':>4}{'push':>5}{'XLU':>4}{'VALU':>5}{'EUP':>4}{'LDST':>5}{'spill':>6}{'fill':>6}"
        f"{'VMEM MB':>8}{'HBM MB':>8}  stalls"
    )
    lines = [
        f"{result.case} {result.settings} on {result.topology} ({result.device}, "
        f"{result.clock / 1e9:.2f} GHz, {result.hbm_rate / 1e9:.0f} GB/s a core)",
        head,
        *(_row(op) for op in result.ops if op.ms >= least_ms),
        f"{result.ms:.3f} ms = kernels {result.total('ms', 'kernel'):.3f} + XLA's ops "
        f"{result.total('ms', 'xla'):.3f}; every bundle without a stall "
        f"{result.total('issue_ms'):.3f}, HBM alone {result.total('dma_ms'):.3f}; "
        f"HBM {result.hbm_bytes / 1e6:.1f} MB, {result.copied_bytes / 1e6:.1f} of it copied by "
        f"XLA; temporaries {result.temporary_bytes / 1e6:.1f} MB",
    ]
    if any(op.unknown_branches for op in result.ops):
        lines.append("* some branches hang on values that are not known and were read as 0")
    if not all(op.complete for op in result.ops):
        lines.append("! the run was cut short: the op takes longer than this")
    return "\n".join(lines)


def _row(op: Op) -> str:
    shares = {**op.floors, "wait": op.dma_cycles, **op.stalls}
    percent = {key: round(100 * value / max(op.cycles, 1)) for key, value in shares.items()}
    stalls = sorted((cause for cause in op.stalls if percent[cause] > 1), key=lambda c: -percent[c])
    mark = "!" if not op.complete else "*" if op.unknown_branches else ""
    return (
        f"{op.name[:32] + mark:34}{op.calls:6}{op.steps:6}{op.compute_cycles / op.steps:9.0f}"
        f"{op.ms:8.3f}{op.issue_ms:7.3f}{op.dma_ms:7.3f}{percent['wait']:5}{percent['MXU']:4}"
        f"{percent['PUSH']:5}{percent['XLU']:4}{percent['VALU']:5}{percent['EUP']:4}"
        f"{percent['LDST']:5}{op.uses['SPILL'] / op.steps:6.0f}{op.uses['FILL'] / op.steps:6.0f}"
        f"{op.vmem / 1e6:8.2f}{op.hbm_bytes / 1e6:8.1f}  "
        + " ".join(f"{cause} {percent[cause]}%" for cause in stalls)
    )
