"""What one TensorCore of a TPU generation can do, in the terms of its compiler.

Peaks and HBM rates are those of docs.cloud.google.com/tpu, a chip's divided by its cores. Intervals
and latencies, in cycles, are those on the critical paths that libtpu 0.0.52's own static profiler
prints (`--xla_jf_dump_static_llo_profile_to`); no TPU was measured.
"""

import dataclasses
from typing import NamedTuple


class Interval(NamedTuple):
    """Cycles between two instructions of a kind on one MXU: of float32 and of packed operands."""

    f32: int
    packed: int


@dataclasses.dataclass(frozen=True)
class Chip:
    """One core.

    mxus, mxu_width: matrix units, and the rows (columns) of their square of weights.
    matmul, push: intervals of a block of rows, 8 of float32 or 16 of bfloat16.
    mxu_latency: from a block of rows to its first result.
    xlus, xlu_interval: cross-lane units, and cycles between two instructions on one.
    permute_latency, reduce_latency, transpose_latency: of the cross-lane unit.
    eup_latency: of exp2, reciprocal and their like.
    branch_delay: bundles that still execute after a branch.
    dma_in, dma_out: latency of a copy from and to HBM.
    peak_flops: bfloat16, per second; hbm_bytes: per second.
    """

    mxus: int
    mxu_width: int
    matmul: Interval
    push: Interval
    mxu_latency: int
    xlus: int
    xlu_interval: int
    permute_latency: int
    reduce_latency: int
    transpose_latency: int
    eup_latency: int
    branch_delay: int
    dma_in: int
    dma_out: int
    peak_flops: float
    hbm_bytes: float

    @property
    def clock(self) -> float:
        """Cycles per second: the peak over the FLOPs that the MXUs take in a cycle."""
        per_cycle = self.mxus * 2 * self.mxu_width**2 * 16 / self.matmul.packed
        return self.peak_flops / per_cycle

    @property
    def hbm_bytes_per_cycle(self) -> float:
        return self.hbm_bytes / self.clock


_V5E = Chip(
    mxus=4,
    mxu_width=128,
    matmul=Interval(8, 16),
    push=Interval(2, 4),
    mxu_latency=128,
    xlus=3,
    xlu_interval=8,
    permute_latency=114,
    reduce_latency=115,
    transpose_latency=164,
    eup_latency=6,
    branch_delay=4,
    dma_in=1125,
    dma_out=440,
    peak_flops=197e12,
    hbm_bytes=819e9,
)
_V6E = Chip(
    mxus=2,
    mxu_width=256,
    matmul=Interval(4, 8),
    push=Interval(2, 4),
    mxu_latency=192,
    xlus=2,
    xlu_interval=4,
    permute_latency=123,
    reduce_latency=137,
    transpose_latency=124,
    eup_latency=13,
    branch_delay=4,
    dma_in=545,
    dma_out=450,
    peak_flops=918e12,
    hbm_bytes=1640e9,
)
CHIPS = {
    "v5e": _V5E,
    "v5p": dataclasses.replace(
        _V5E, eup_latency=8, dma_in=660, dma_out=620, peak_flops=459e12 / 2, hbm_bytes=2765e9 / 2
    ),
    "v6e": _V6E,
    "tpu7x": dataclasses.replace(
        _V6E,
        mxu_latency=211,
        permute_latency=127,
        reduce_latency=141,
        transpose_latency=128,
        eup_latency=10,
        branch_delay=6,
        dma_in=610,
        dma_out=590,
        peak_flops=2307e12 / 2,
        hbm_bytes=7380e9 / 2,
    ),
}


def chip_of(topology: str) -> Chip:
    """The core of a topology such as "tpu7x:2x2x1"."""
    name = topology.partition(":")[0]
    if name not in CHIPS:
        raise ValueError(f"topology: {topology!r} does not begin with one of {', '.join(CHIPS)}")
    return CHIPS[name]
