"""flash-linear-attention (fla-core 0.6.0, in torch) as a program of the GPU benchmark.

Its Triton kernels are tuned at their first call of a shape, which takes minutes.
"""

from typing import Any

import jax
import numpy as np
import torch
from fla.ops.kda import chunk_kda

from experiments.bench import kda_cases
from experiments.bench.kda_cases import WIDTH, Call


def program(call: Call, arrays: tuple) -> tuple[Any, ...]:
    """What `gpu.Program` holds, for the arguments of `kda_cases.ours`."""
    floats, ids, *cotangents = arrays
    if call.documents and call.batch > 1:
        raise NotImplementedError("packed rows are one row")
    by_head = (call.batch, call.tokens, call.heads, WIDTH)
    x = {name: _tensor(y).requires_grad_(call.gradients) for name, y in floats.items()}
    given = [_tensor(y) for y in jax.tree.leaves(cotangents)]
    bounded = call.gate_form == "bounded"
    cuts = None
    if call.documents:
        starts = np.flatnonzero(np.diff(np.asarray(ids)[0])) + 1
        cuts = torch.tensor([0, *starts, call.tokens], device="cuda")

    def forward() -> tuple:
        initial = x.get("initial_state")
        o, final = chunk_kda(
            *(x[name].reshape(by_head) for name in ("q", "k", "v", "gate")),
            x["beta"],
            initial_state=None if initial is None else initial.flatten(0, 1),
            output_final_state=call.states or call.final,
            use_qk_l2norm_in_kernel=True,
            use_gate_in_kernel=call.gate_form != "log_decay",
            use_beta_sigmoid_in_kernel=True,
            safe_gate=bounded,
            lower_bound=kda_cases.LOWER_BOUND if bounded else None,
            A_log=x.get("a_log"),
            dt_bias=x["dt_bias"].flatten() if "dt_bias" in x else None,
            cu_seqlens=cuts,
        )
        o = o.reshape(call.batch, call.tokens, -1)
        return o, None if final is None else final.reshape(call.state_shape)

    def run() -> tuple:
        if not call.gradients:
            with torch.no_grad():
                return forward()
        out = forward()
        kept = [y for y in out if y is not None]
        gradients = torch.autograd.grad(kept, list(x.values()), given)
        return out, dict(zip(x, gradients, strict=True))

    def memory() -> int:
        torch.cuda.reset_peak_memory_stats()
        run()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated()

    def values(out: tuple) -> Any:
        return jax.tree.map(lambda y: y.detach().float().cpu().numpy(), out)

    return run, lambda out: torch.cuda.synchronize(), values, memory


def _tensor(x: jax.Array) -> torch.Tensor:
    return torch.from_dlpack(x).clone()
