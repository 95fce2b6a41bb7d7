"""KDA on a TPU, told from the compiler's schedule (`pallas_kernels.tpu_schedule`); no TPU is used.

The floor of HBM is every argument and result once (`pallas_kernels.kda.cost`). Costs are given per
chunk-head, 64 tokens of one head, which makes shapes comparable.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from experiments.bench import kda_cases
from experiments.bench.kda_cases import Call
from pallas_kernels.kda import cost
from pallas_kernels.tpu_schedule import Report, report, table

_CHUNK = 64
_CASES = kda_cases.__name__


@dataclasses.dataclass(frozen=True)
class Row:
    """A line of the summary: one call by one implementation.

    hbm: bytes a token-head, and their ratio to the floor. cycles, spills, fills: a chunk-head.
    mxu: the share of cycles in which the matrix units take rows. vmem: of the largest op, bytes.
    unknown: a branch of a kernel hangs on a value that is not known.
    """

    who: str
    call: Call
    ms: float
    xla_ms: float
    cycles: float
    mxu: float
    spills: float
    fills: float
    vmem: int
    hbm: float
    hbm_ratio: float
    unknown: bool


def measure(
    implementation: str, calls: Sequence[Call], topology: str, rival: bool
) -> dict[str, Any]:
    """Prints the ops of each call and a summary, tokamax's beside if `rival`.

    Returns: the summary's rows and the whole reports, which JSON can hold.

    Raises:
      RuntimeError: with what the compiler says, if ours does not compile; tokamax's is a line.
    """
    rows, reports = [], []
    for call in calls:
        for who in (implementation, "tokamax") if rival else (implementation,):
            try:
                result = _report(who, call, topology)
            except RuntimeError as error:
                if who == implementation:
                    raise
                print(f"{who}: {str(error).splitlines()[-1]}\n")
                continue
            print(table(result) + "\n")
            rows.append(_row(who, call, result))
            reports.append(result.as_json())
    print(_summary(rows, topology))
    return {
        "topology": topology,
        "rows": [dataclasses.asdict(row) for row in rows],
        "reports": reports,
    }


def _report(who: str, call: Call, topology: str) -> Report:
    settings = dataclasses.asdict(call)
    if who == "tokamax":
        return report(f"{_CASES}:tokamax", topology, **settings)
    return report(f"{_CASES}:ours", topology, implementation=who, **settings)


def _row(who: str, call: Call, result: Report) -> Row:
    spec = kda_cases.spec_of(call)
    floor = cost.forward(spec).bytes_accessed
    if call.gradients:
        floor += cost.backward(spec).bytes_accessed
    cycles = sum(op.calls * op.cycles for op in result.ops)

    def a_chunk_head(total: float) -> float:
        return total / (call.token_heads / _CHUNK)

    return Row(
        who=who,
        call=call,
        ms=result.ms,
        xla_ms=result.total("ms", "xla"),
        cycles=a_chunk_head(cycles),
        mxu=sum(op.calls * op.floors["MXU"] for op in result.ops) / max(cycles, 1),
        spills=a_chunk_head(sum(op.calls * op.uses["SPILL"] for op in result.ops)),
        fills=a_chunk_head(sum(op.calls * op.uses["FILL"] for op in result.ops)),
        vmem=max((op.vmem for op in result.ops), default=0),
        hbm=result.hbm_bytes / call.token_heads,
        hbm_ratio=result.hbm_bytes / floor,
        unknown=any(op.unknown_branches for op in result.ops if op.kind == "kernel"),
    )


def _summary(rows: Sequence[Row], topology: str) -> str:
    lines = [
        f"KDA on {topology}, one core, K = V = {kda_cases.WIDTH}; {_CHUNK}xH: per {_CHUNK} tokens "
        "and head, TxH: per token and head; docs: packed into a row, S with states",
        f"{'':14}{'B,T,H':>13}{'gate':>10}{'pass':>9}{'docs':>6}{'ms':>8}{'of XLA':>7}"
        f"{'cyc/64xH':>9}{'MXU%':>5}{'spill/64xH':>11}{'fill/64xH':>10}{'VMEM MB':>8}"
        f"{'HBM B/TxH':>10}{'/floor':>7}",
    ]
    for row in rows:
        c = row.call
        lines.append(
            f"{row.who + '*' * row.unknown:14}{f'{c.batch},{c.tokens},{c.heads}':>13}"
            f"{c.gate_form:>10}{'fwd+vjp' if c.gradients else 'fwd':>9}{_packing(c):>6}"
            f"{row.ms:8.3f}{row.xla_ms:7.3f}{row.cycles:9.0f}{100 * row.mxu:5.0f}"
            f"{row.spills:11.0f}{row.fills:10.0f}{row.vmem / 1e6:8.1f}{row.hbm:10.0f}"
            f"{row.hbm_ratio:7.2f}"
        )
    return "\n".join(lines)


def _packing(call: Call) -> str:
    return f"{call.documents or '-'}{' S' if call.states else ''}"
