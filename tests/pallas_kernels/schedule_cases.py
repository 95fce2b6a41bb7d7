"""A small TPU kernel whose blocks and branches hang on scalars that are computed before it.

    python -m tests.pallas_kernels.schedule_cases

records what `tests/data/tpu_schedule` holds: libtpu's dump of it for TPU7x. It needs libtpu.
"""

import re
import shutil
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.tpu_schedule import worker

STEPS, BLOCK = 8, (64, 128)
BLOCK_BYTES = BLOCK[0] * BLOCK[1] * 4
RECORDED = Path(__file__).parents[1] / "data" / "tpu_schedule"
TOPOLOGY = "tpu7x:2x2x1"
JUMPS = [2, 0, 0, 4, 0, 1, 0, 2]  # blocks 2 2 2 6 6 7 7 9: four of them, three even


def pick(jumps: list[int] | None):
    """Blocks of an array by the running sum of `jumps`: even ones are doubled, odd ones go through
    exp. None leaves the jumps unknown."""

    def kernel(blocks, x, o):
        even = blocks[pl.program_id(0)] % 2 == 0

        @pl.when(even)
        def _():
            o[...] = x[...] + x[...]

        @pl.when(jnp.logical_not(even))
        def _():
            o[...] = jnp.exp(x[...])

    def fn(jumps, x):
        return pl.pallas_call(
            kernel,
            out_shape=jax.ShapeDtypeStruct((STEPS * BLOCK[0], BLOCK[1]), jnp.float32),
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=1,
                grid=(STEPS,),
                in_specs=[pl.BlockSpec(BLOCK, lambda i, blocks: (blocks[i], 0))],
                out_specs=pl.BlockSpec(BLOCK, lambda i, blocks: (i, 0)),
            ),
            name="pick",
        )(jnp.cumsum(jumps), x)

    unknown = jax.ShapeDtypeStruct((STEPS,), jnp.int32)
    # Too large for VMEM, so that XLA leaves it in HBM.
    x = jax.ShapeDtypeStruct((1 << 20, BLOCK[1]), jnp.float32)
    return fn, (unknown if jumps is None else np.array(jumps, np.int32), x)


def record() -> None:
    case = f"{pick.__module__}:pick".replace("__main__", "tests.pallas_kernels.schedule_cases")
    with tempfile.TemporaryDirectory() as place:
        worker.compile_case(case, {"jumps": JUMPS}, TOPOLOGY, Path(place))
        shutil.rmtree(RECORDED, ignore_errors=True)
        RECORDED.mkdir(parents=True)
        kept = [worker.FACTS, worker.CALLS, "*pick*final_bundles.txt", "*pick*utilization.txt"]
        for pattern in kept:
            for file in Path(place).glob(pattern):
                if "analysis" not in file.name:
                    name = re.sub(r"^\d+-", "1-", file.name)
                    shutil.copyfile(file, RECORDED / name)
        # Without the kernel's bytes and the paths of the source.
        hlo = re.sub(r'"body":"[^"]*"', '"body":""', (Path(place) / worker.HLO).read_text())
        hlo = re.sub(r"FileNames.*?(?=\n\n\n)", "", hlo, flags=re.DOTALL)
        (RECORDED / worker.HLO).write_text(hlo)


if __name__ == "__main__":
    record()
