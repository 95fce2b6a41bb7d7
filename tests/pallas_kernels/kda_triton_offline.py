"""Compiles every Triton kernel of a call for a GPU that need not be there, and says what it takes.

    python -m tests.pallas_kernels.kda_triton_offline 9.0 bfloat16 128

One JSON line per kernel: registers, bytes of spills, bytes of shared memory. For sm_80 and sm_90
also the uniform registers that machine code reads before it writes them: Triton 3.6's ptxas (12.8)
has left the descriptor of a wgmma operand undefined, and the kernel then reads anywhere.
"""

import functools
import json
import os
import re
import subprocess
import sys
import tempfile
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.kda import check
from pallas_kernels.kda import triton as implementation
from pallas_kernels.kda.triton import launch

_TYPES = {"bfloat16": "*bf16", "float16": "*fp16", "float32": "*fp32", "int32": "*i32"}


def calls(capability: str, dtype: str, width: int) -> list[tuple[Any, ...]]:
    """What forward and gradient launch on a target: kernel, types, warps, stages, constants."""
    found = []

    def call(kernel, arrays, sizes, results, programs, *, warps, stages, **constants):
        types = [_TYPES[x.dtype.name] for x in arrays] + ["i32"] * len(sizes)
        types += [_TYPES[r.dtype.name] for r in results]
        found.append((kernel, types, warps, stages, constants))
        return tuple(jnp.zeros(r.shape, r.dtype) for r in results)

    launch.call, launch.current_target = call, functools.partial(launch.target_of, capability)
    lead = (1, 128, 96)
    like = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.dtype(dtype))
    state = jax.ShapeDtypeStruct((1, 1, 96, width, width), jnp.float32)
    head = jax.ShapeDtypeStruct((96,), jnp.float32)
    channel = jax.ShapeDtypeStruct((96, width), jnp.float32)

    def total(q, k, v, gate, beta, a_log, dt_bias, initial_state):
        spec, x = check(
            q, k, v, gate, beta, a_log=a_log, dt_bias=dt_bias, gate_form="bounded",
            beta_form="logit", lower_bound=-5.0, qk_l2norm=True, scale=None,
            initial_state=initial_state, segment_ids=None, max_documents=1,
            return_final_state=True,
        )  # fmt: skip
        o, final = implementation.run(spec, x)
        return o.astype(jnp.float32).sum() + final.sum()

    wide = like((*lead, width))
    tokens = (wide, wide, wide, wide, like(lead))
    jax.eval_shape(jax.grad(total, argnums=tuple(range(8))), *tokens, head, channel, state)
    return found


def build(capability: str, call: tuple[Any, ...]) -> dict[str, Any]:
    """A kernel's machine code, in numbers."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel, types, warps, stages, constants = call
    amd = capability.startswith("gfx")
    target = GPUTarget("hip", capability, 64)
    if not amd:
        target = GPUTarget("cuda", round(10 * float(capability)), 32)
    names = kernel.arg_names
    signature = {n: types[i] if i < len(types) else "constexpr" for i, n in enumerate(names)}
    aligned = {(i,): [["tt.divisibility", 16]] for i, t in enumerate(types) if t[0] == "*"}
    source = ASTSource(
        kernel, signature, {(names.index(n),): v for n, v in constants.items()}, attrs=aligned
    )
    binary = triton.compile(
        source, target=target, options={"num_warps": warps, "num_stages": stages}
    )
    found = {
        "kernel": kernel.__name__,
        "backward": bool(constants.get("BACKWARD")),
        "shared": binary.metadata.shared,
        "undefined": [],
    }
    if amd:
        text = binary.asm["amdgcn"]
        found["registers"] = int(re.search(r"\.vgpr_count:\s+(\d+)", text)[1])
        found["spilled"] = int(re.search(r"\.private_segment_fixed_size:\s+(\d+)", text)[1])
        return found
    tools = os.path.join(os.path.dirname(triton.__file__), "backends/nvidia/bin")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.asm["cubin"])
        file.flush()
        usage = _run(f"{tools}/cuobjdump", "-res-usage", file.name)
        registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", usage).groups()
        found |= {"registers": int(registers), "spilled": int(stack)}
        if target.arch < 100:
            found["undefined"] = undefined(_run(f"{tools}/nvdisasm", "-c", file.name))
    return found


def _run(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def undefined(sass: str) -> list[str]:
    """Instructions that read a uniform register which nothing before them writes. What a descriptor
    of a register operand would stand in is not read, though named."""
    written: set[int] = set()
    found = []
    for line in sass.splitlines():
        match = re.search(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?(\S+)\s*(.*?);", line)
        if not match:
            continue
        name, operands = match.groups()
        operands = [x.strip() for x in operands.split(",")]
        target = re.fullmatch(r"UR(\d+)", operands[0])
        for n, operand in enumerate(operands[1:] if target else operands):
            descriptor = re.match(r"gdesc\[UR(\d+)\]", operand)
            if descriptor:
                first = int(descriptor[1])
                # Both operands in shared memory take four registers, one takes the last two.
                reads = range(first if n == 1 else first + 2, first + 4)
            else:
                reads = [int(x) for x in re.findall(r"\bUR(\d+)\b", operand)]
            if not written.issuperset(reads):
                found.append(f"{name} {', '.join(operands)}")
        if target:
            size = {"64": 2, "128": 4}.get(name.rsplit(".", 1)[-1], 2 if "WIDE" in name else 1)
            written |= set(range(int(target[1]), int(target[1]) + size))
    return found


def main() -> None:
    capability, dtype, width = sys.argv[1:]
    for call in calls(capability, dtype, int(width)):
        print(json.dumps(build(capability, call)), flush=True)


if __name__ == "__main__":
    main()
