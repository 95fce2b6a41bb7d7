"""Megablox, interpreted on a CPU, against the loop over groups."""

from tests.pallas_kernels.grouped_matmul_suite import GroupedMatmulSuite


class TestMegablox(GroupedMatmulSuite):
    implementation = "megablox"
    dtypes = ("bfloat16", "float32")
    widths = ((40, 33), (256, 136))
