"""What a call of KDA costs, shape by shape, with a rival beside it.

    python -m experiments.bench_kda --backend=tpu --topology=tpu7x:2x2x1
    python -m experiments.bench_kda --backend=tpu --topology=v6e:2x2 --shape=1,8192,32 \
        --shape=1,8192,96 --pass=forward --documents=25 --json=out.json
    python -m experiments.bench_kda --backend=gpu --peers=jla,fla
    python -m experiments.bench_kda --backend=gpu --checks=repeats,lengths,prefix

`--backend=tpu` needs no TPU: libtpu (`pip install 'k3jax[tpu-aot]'`) compiles on any host, and the
schedule that it emits is executed and timed (`pallas_kernels.tpu_schedule`). Published times are
1.25 to 1.45 times such figures, so they are for comparing. tokamax is measured beside ours where
it is installed. `--backend=gpu` measures on the card at hand, the rows of a table of its own unless
shapes are named, after a comparison with float64. Bad input ends in one line and exit code 2.
"""

from __future__ import annotations

from typing import Any

from absl import flags

from experiments.bench import gpu, gpu_checks, kda_cases, tpu
from experiments.options import json_file, topology, write_json
from experiments.program import launch
from pallas_kernels import dispatch
from pallas_kernels.kda.spec import GATE_FORMS

BACKEND = flags.DEFINE_enum("backend", "tpu", ["tpu", "gpu"], "Compiled for, or run on.")
TOPOLOGY = topology()
SHAPES = flags.DEFINE_multi_string(
    "shape", None, "B,T,H with K = V = 128; may repeat. Of a TPU 1,8192,32, of a GPU a table."
)
GATE_FORM = flags.DEFINE_enum("gate_form", "bounded", GATE_FORMS, "See kda's docstring.")
PASSES = flags.DEFINE_list(
    "pass", ["forward", "backward"], "forward; backward: the forward pass and all gradients."
)
DOCUMENTS = flags.DEFINE_integer("documents", 0, "Documents packed into each row; 0: no packing.")
STATES = flags.DEFINE_bool("states", False, "With an initial and a final state per document.")
IMPLEMENTATION = flags.DEFINE_list(
    "implementation", None, "Of kda. mosaic_tpu, or on a GPU mosaic_gpu,triton."
)
PEERS = flags.DEFINE_list("peers", [], "On a GPU, beside ours: jla, fla.")
CHECKS = flags.DEFINE_list(
    "checks", [], f"On a GPU, instead of times: {', '.join(gpu_checks.CHECKS)}."
)
json_file()


_OURS = {"tpu": ["mosaic_tpu"], "gpu": ["mosaic_gpu", "triton"]}


def calls() -> list[kda_cases.Call]:
    """The calls that the flags describe."""
    unknown = set(PASSES.value) - {"forward", "backward"}
    if unknown or not PASSES.value:
        raise ValueError(f"--pass = {','.join(PASSES.value)}: must be of forward, backward")
    packing = (GATE_FORM.value, DOCUMENTS.value, STATES.value)
    if BACKEND.value == "gpu" and not SHAPES.value and not DOCUMENTS.value:
        return gpu.table(GATE_FORM.value, PASSES.value)
    return [
        kda_cases.Call(
            *_shape(text), *packing, gradients=name == "backward", final=BACKEND.value == "gpu"
        )
        for text in SHAPES.value or ["1,8192,32"]
        for name in PASSES.value
    ]


def _shape(text: str) -> list[int]:
    parts = text.split(",")
    if len(parts) != 3 or not all(part.strip().isdecimal() for part in parts):
        raise ValueError(f"--shape = {text!r}: must be B,T,H, such as 1,8192,32")
    return [int(part) for part in parts]


def run() -> int:
    names = IMPLEMENTATION.value or _OURS[BACKEND.value]
    for name in names:
        if name not in dispatch.names("kda"):
            known = ", ".join(dispatch.names("kda"))
            raise ValueError(f"--implementation = {name!r}: must be one of {known}")
    found = (_on_gpu if BACKEND.value == "gpu" else _for_tpu)(names)
    write_json(found)
    return 0


def _on_gpu(names: list[str]) -> dict[str, Any]:
    for peer in PEERS.value:
        if reason := gpu.missing(peer):
            print(f"{reason}: measured without it\n")
        else:
            names = [*names, peer]
    if CHECKS.value:
        return gpu_checks.run(CHECKS.value, names, GATE_FORM.value)
    return gpu.measure(names, calls())


def _for_tpu(names: list[str]) -> dict[str, Any]:
    if len(names) != 1:
        raise ValueError(f"--implementation = {','.join(names)}: one at a time with --backend=tpu")
    if PEERS.value or CHECKS.value:
        raise ValueError("--peers and --checks: need --backend=gpu")
    rival = kda_cases.has_tokamax()
    if not rival:
        print("tokamax is not installed (pip install tokamax==0.0.17): ours alone\n")
    return tpu.measure(names[0], calls(), TOPOLOGY.value or "tpu7x:2x2x1", rival)


if __name__ == "__main__":
    launch(run, RuntimeError)
