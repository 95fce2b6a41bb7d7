"""What a compiled TPU program costs, told from the compiler's own schedule; no TPU is needed.

    from pallas_kernels.tpu_schedule import report, table
    print(table(report("my_module:my_case", "tpu7x:2x2x1", heads=32)))

libtpu compiles for every generation on any host and can leave the final bundles of each op (what a
core issues in a cycle). Their scalar program is executed, so that loops, branches and copies are
exact (`scalar`, `machine`), and the vector units are timed by a scoreboard with the latencies that
libtpu's own static profiler has (`vector`, `chips`). The values that a kernel reads from scalar
memory (boundaries of documents, sizes of groups) are computed on the host where the case gives the
values of its arguments (`operands`), so what hangs on them is exact too.

A figure is no stopwatch. It does not see conflicts in VMEM, pages of HBM, fetches of instructions,
launches, XLA's copies beside the ops, or anything between chips; published times of three code
bases on two chips are 1.25 to 1.45 times theirs. Compare figures with each other.
"""

from .report import Op, Report, report, table

__all__ = ["Op", "Report", "report", "table"]
