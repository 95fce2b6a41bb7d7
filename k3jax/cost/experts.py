"""What expert parallelism sends and computes in one layer, per device and forward pass.

D devices share a bank of experts; each has t tokens, which work at width l and take k experts of
hidden width m. With balanced loads, and P bytes per element there and back together:

    sent      t k l P (1 - 1/D)          every route to its expert, and the result back
    computed  6 l m k t                  three products

so that communication takes `P F (1 - 1/D) / (6 m B)` of the time of computation, at F FLOP/s and B
bytes/s: of the model only the experts' hidden width m matters. The backward pass sends as much
again and computes twice as much. Counts, indices and combination weights, a few bytes per route,
are left out.
"""

from __future__ import annotations

from k3jax.config import MoEConfig, Transport

_SUM_BYTES = 4  # of an element of a partial sum on its way through a ring


def exchange_bytes(
    moe: MoEConfig,
    width: int,
    tokens: int,
    devices: int,
    transport: Transport,
    *,
    element_bytes: int = 2,
) -> float:
    """Bytes that one of `devices`, with `tokens` of its own, sends there and back.

    `local` sends nothing; `ragged` what the formula says (and so does `auto`, a lower bound that
    has no buffers); `padded` its whole buffers, `moe.buffer_factor` times as much; `ring` every
    token to every device, and partial sums of at least four bytes back.
    """
    if transport == "local":
        return 0.0
    if transport == "ring":
        both_ways = element_bytes + max(element_bytes, _SUM_BYTES)
        return tokens * width * both_ways * (devices - 1)
    routes: float = tokens * moe.top_k
    if transport == "padded":
        worst = devices * tokens * min(moe.top_k, moe.experts // devices)
        routes = min(moe.buffer_factor * routes, worst) if moe.buffer_factor else worst
    return routes * width * 2 * element_bytes * (1 - 1 / devices)


def expert_flops(moe: MoEConfig, width: int, tokens: int) -> float:
    """FLOPs of the routed experts of `tokens` tokens."""
    return 6.0 * width * moe.expert_width * moe.top_k * tokens


def exchange_share(
    moe: MoEConfig,
    devices: int,
    flops_per_second: float,
    bytes_per_second: float,
    *,
    element_bytes: int = 2,
) -> float:
    """Time of sending every route there and back over the time of the experts' products."""
    sent = 2 * element_bytes * (1 - 1 / devices) / bytes_per_second
    return sent / (6 * moe.expert_width / flops_per_second)
