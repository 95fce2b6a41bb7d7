"""Compile the training step for a TPU pod that is not there, and say what it would take.

    python -m experiments.plan --config=kimi_linear --topology=v5p:4x4x4 \\
        --set mesh.fsdp=8 --set mesh.expert=8 --set data.batch_size=64

The step is the one that `experiments.train` runs, TPU kernels included; libtpu compiles it ahead of
time on this machine's CPU (the `tpu-aot` extra), once for each stage of row lengths. Printed are
the bytes of a device against its HBM, the collectives with their mesh axes, counts and sizes, the
FLOPs of the configuration, and the compiler's estimate of the time. Exit code 1 means that it does
not fit; bad input ends in one line and exit code 2.
"""

from __future__ import annotations

import dataclasses
import re
from typing import NamedTuple

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from configs import CONFIGS
from experiments.hlo import Program, read
from experiments.options import topology
from experiments.program import launch
from k3jax.config import ExperimentConfig
from k3jax.cost import flops_per_token
from k3jax.flags import define, resolve
from k3jax.sharding import BATCH, SEQUENCE, make_mesh
from k3jax.train.loop import decoder_blueprint, decoder_step
from k3jax.train.state import bytes_per_device
from pallas_kernels.tpu_schedule.chips import CHIPS

TOPOLOGY = topology()


class Device(NamedTuple):
    """What one jax device of a TPU generation is: bytes of HBM, bfloat16 FLOP/s, and TensorCores.

    Figures of docs.cloud.google.com/tpu, a chip's divided by its devices.
    """

    hbm: int
    peak: float
    cores: int


GIB = 2**30
DEVICES = {
    "v4": Device(32 * GIB, 275e12, 2),
    "v5e": Device(16 * GIB, 197e12, 1),
    "v5p": Device(95 * GIB, 459e12, 2),
    "v6e": Device(32 * GIB, 918e12, 1),
    "tpu7x": Device(96 * GIB, 2307e12 / 2, 1),
}


def plan(config: ExperimentConfig, topology: str) -> bool:
    """Prints the plan of `config` on `topology`; whether it fits.

    Raises `ValueError`, in one line, for a topology that is none and a mesh that does not fit it
    or the model.
    """
    generation, device = topology.partition(":")[0], device_of(topology)
    mesh = make_mesh(config.mesh, devices_of(topology))
    sizes = ", ".join(f"{axis} {size}" for axis, size in mesh.shape.items() if size > 1)
    tokens = config.data.batch_size * config.data.sequence_length
    flops = flops_per_token(config.model, config.data.sequence_length) * tokens / mesh.size
    print(f"{config.name} on {mesh.size} devices of {topology}: {sizes or 'one device'}")
    print(f"{tokens:,} tokens a step, {flops:.3e} FLOPs a device: {flops / device.peak:.3f} s")

    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        step, state, batch = training_step(config, mesh)
        for name in ("params", "opt_state"):
            print(f"{name}: {_bytes(bytes_per_device(getattr(state, name)))} a device")
        lowered = step.lower(state, batch)
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        print(f"does not fit: {_reason(str(error))}")
        return False
    memory = compiled.memory_analysis()
    rows = {
        "arguments": memory.argument_size_in_bytes,
        "results beside them": memory.output_size_in_bytes - memory.alias_size_in_bytes,
        "temporaries": memory.temp_size_in_bytes,
        "program": memory.generated_code_size_in_bytes,
    }
    for name, size in rows.items():
        print(f"{name}: {_bytes(size)} a device")
    total = sum(rows.values())
    fits = total <= device.hbm
    verdict = "fits" if fits else "does not fit"
    print(f"in all: {_bytes(total)} of {_bytes(device.hbm)}: {verdict}")
    program = read(compiled.as_text())
    print(_collectives(program, mesh))
    if program.cycles and generation in CHIPS:
        seconds = program.cycles / CHIPS[generation].clock
        but = f", without {program.unknown:,} ops that it has none for" if program.unknown else ""
        print(f"compiler's estimate, one op after another: {seconds:.3f} s a step{but}")
    return fits


def training_step(config: ExperimentConfig, mesh: Mesh):
    """The step of `config` and the shapes, laid out over `mesh`, of its arguments."""
    recipe = decoder_blueprint(config)
    step = decoder_step(config, recipe, np.ones(config.model.vocab_size, np.float32))

    def placed(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return leaf.update(sharding=NamedSharding(mesh, leaf.sharding.spec))

    parts, layout = config.train.micro_batches, PartitionSpec(None, BATCH, SEQUENCE)
    shape = (parts, config.data.batch_size // parts, config.data.sequence_length)
    dtypes = dict.fromkeys(("inputs", "targets", "segment_ids"), "int32") | {"weights": "float32"}
    batch = {
        name: jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, layout))
        for name, dtype in dtypes.items()
    }
    return step, jax.tree.map(placed, recipe.abstract()), batch


def device_of(topology: str) -> Device:
    """The figures of a device of `topology`."""
    generation, _, shape = topology.partition(":")
    if generation not in DEVICES or not re.fullmatch(r"\d+(x\d+){1,2}", shape):
        raise ValueError(
            f"--topology = {topology!r}: must be one of {', '.join(DEVICES)}, a colon, and a shape "
            "such as 2x2 or 4x4x4"
        )
    return DEVICES[generation]


def devices_of(topology: str) -> list[jax.Device]:
    """The devices that libtpu describes; none of them is there."""
    try:
        return topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    except (RuntimeError, ValueError, NotImplementedError) as error:
        raise ValueError(f"--topology = {topology!r}: {_reason(str(error))}") from error


def _collectives(program: Program, mesh: Mesh) -> str:
    """A line for each kind of collective and the mesh axes that it runs over."""
    lines = ["collectives of a step, for one device: count, bytes"]
    totals: dict[str, list[int]] = {}
    for found in program.collectives:
        axes = found.axes(mesh.devices.shape, mesh.axis_names)
        total = totals.setdefault(f"{found.kind} over {', '.join(axes) or 'nothing'}", [0, 0])
        total[0] += found.count
        total[1] += found.count * found.size
    for name, (count, size) in sorted(totals.items(), key=lambda item: -item[1][1]):
        lines.append(f"  {name}: {count:,}, {_bytes(size)}")
    return "\n".join(lines if totals else [*lines, "  none"])


def _bytes(size: float) -> str:
    return f"{size / GIB:.2f} GiB" if size >= GIB / 100 else f"{size:,} bytes"


def _reason(message: str) -> str:
    """The first line of what the compiler says."""
    return next((line.strip() for line in message.splitlines() if line.strip()), "no reason given")


def run() -> int:
    if TOPOLOGY.value is None:
        raise ValueError("--topology: missing, such as v5p:4x4x4")
    config = resolve(CONFIGS)
    fits = []
    for stage in config.data.schedule():
        if config.data.stages:
            print(f"after step {stage.start}: {stage.batch_size} rows of {stage.sequence_length}")
        now = dataclasses.replace(config, data=config.data.during(stage))
        fits.append(plan(now, TOPOLOGY.value))
    return 0 if all(fits) else 1


if __name__ == "__main__":
    define(CONFIGS)
    launch(run)
