"""The chunkwise form in plain JAX against the oracle."""

from tests.pallas_kernels.kda_suite import KdaSuite


class TestChunked(KdaSuite):
    implementation = "chunked"
