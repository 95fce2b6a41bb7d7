"""The calls of KDA that are measured, ours and those of peers, from raw inputs to output.

Callers hold `[B, T, H*D]`, what a projection writes, and reshape inside the jitted program, so a
transpose that an implementation needs is part of its cost. tokamax is given its own layout,
`[H, B, T, D]`, as in its own benchmark.
"""

import dataclasses
import importlib.util
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.kda import Spec, check, gates, kda

WIDTH = 128  # K and V
LOWER_BOUND = -5.0


@dataclasses.dataclass(frozen=True)
class Call:
    """One call: `documents` of a packed row, or 0; `states`: each document has an initial and a
    final one; `gradients`: the forward pass and its VJP; `final`: each document has a final state;
    `lengths`: those of the documents, drawn where it is empty."""

    batch: int
    tokens: int
    heads: int
    gate_form: str
    documents: int
    states: bool
    gradients: bool
    final: bool = False
    lengths: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if min(self.batch, self.tokens, self.heads) < 1:
            raise ValueError(
                f"--shape = {self.batch},{self.tokens},{self.heads}: must be B,T,H, each at least 1"
            )
        if not 0 <= self.documents <= self.tokens:
            raise ValueError(
                f"--documents = {self.documents}: not in 0 (no packing) .. T = {self.tokens}"
            )
        given = len(self.lengths), sum(self.lengths)
        if self.lengths and given != (self.documents, self.tokens):
            raise ValueError(
                f"lengths = {self.lengths}: must be {self.documents} that sum to {self.tokens}"
            )

    @property
    def state_shape(self) -> tuple[int, ...]:
        return (self.batch, self.documents or 1, self.heads, WIDTH, WIDTH)

    @property
    def token_heads(self) -> int:
        return self.batch * self.tokens * self.heads


def segment_ids(call: Call) -> np.ndarray | None:
    """Ids `[B, T]` of the documents; lengths that are not given are random, the same in every run.
    None without packing."""
    if not call.documents:
        return None
    if call.lengths:
        ids = np.repeat(np.arange(1, call.documents + 1, dtype=np.int32), call.lengths)
        return np.broadcast_to(ids, (call.batch, call.tokens))
    ids = np.zeros((call.batch, call.tokens), np.int32)
    for row in range(call.batch):
        cuts = np.random.default_rng(row).choice(call.tokens - 1, call.documents - 1, replace=False)
        ids[row, cuts + 1] = 1
    return 1 + np.cumsum(ids, axis=1, dtype=np.int32)


def spec_of(call: Call) -> Spec:
    """What the call is to an implementation, for its floor of FLOPs and bytes."""
    found = []

    def judge(floats: dict[str, jax.Array], ids: jax.Array | None) -> None:
        found.append(check(**_arguments(floats, ids, call))[0])

    jax.eval_shape(judge, _floats(call), segment_ids(call))
    return found[0]


def ours(implementation: str, **settings: Any) -> tuple[Callable, tuple]:
    """`kda` by one implementation; `settings` are the fields of `Call`."""
    call = Call(**settings)

    def forward(floats: dict[str, jax.Array], ids: jax.Array | None) -> tuple:
        o, final = kda(**_arguments(floats, ids, call), implementation=implementation)
        return o.reshape(call.batch, call.tokens, -1), final

    return _program(call, forward, _floats(call))


def has_tokamax() -> bool:
    return importlib.util.find_spec("tokamax") is not None


def tokamax(**settings: Any) -> tuple[Callable, tuple]:
    """tokamax's Mosaic TPU kernels (version 0.0.17), which take beta after its sigmoid."""
    from tokamax._src import config
    from tokamax._src.ops.kda import pallas_mosaic_tpu

    call = Call(**settings)
    operation = pallas_mosaic_tpu.PallasMosaicTpuKimiDeltaAttention()
    shape = (call.heads, call.batch, call.tokens, WIDTH)
    ready = call.gate_form == "log_decay"
    floats = {
        **{name: _bf16(shape) for name in ("query", "key", "value", "gate")},
        "beta": _bf16(shape[:-1]),
    }
    if not ready:
        floats["a_log"] = jax.ShapeDtypeStruct((call.heads,), jnp.float32)
        floats["delta_time_bias"] = jax.ShapeDtypeStruct((call.heads * WIDTH,), jnp.float32)

    if call.states:
        floats["initial_state"] = jax.ShapeDtypeStruct(call.state_shape, jnp.float32)

    def forward(floats: dict[str, jax.Array], ids: jax.Array | None) -> tuple:
        with config.cross_compile(True):
            return operation(
                **floats,
                scale=WIDTH**-0.5,
                use_qk_l2norm=True,
                use_gate_in_kernel=not ready,
                lower_bound=LOWER_BOUND if call.gate_form == "bounded" else None,
                segment_ids=ids,
                max_num_segments=call.documents or None,
                output_final_state=call.states,
            )

    return _program(call, forward, floats)


def jla(**settings: Any) -> tuple[Callable, tuple]:
    """jax-linear-attention's Hopper kernels (version 0.1.0). They take activated gates in float32;
    packed rows have neither initial nor final states."""
    from jla.ops.mosaic_gpu.kda import kda as run

    call = Call(**settings)
    if call.states and call.documents:
        raise NotImplementedError("no states of packed documents")

    def forward(floats: dict[str, jax.Array], ids: jax.Array | None) -> tuple:
        x = _arguments(floats, ids, call)
        g = x["gate"].astype(jnp.float32)
        g = gates.log_decay(g, x["a_log"], x["dt_bias"], call.gate_form, LOWER_BOUND)
        o, final = run(
            *(x[name] for name in ("q", "k", "v")),
            g,
            gates.write_strength(x["beta"].astype(jnp.float32), "logit"),
            use_qk_l2norm=True,
            segment_ids=ids,
            initial_state=x["initial_state"][:, 0] if call.states else None,
            output_final_state=(call.states or call.final) and not call.documents,
        )
        return o.reshape(call.batch, call.tokens, -1), None if final is None else final[:, None]

    return _program(call, forward, _floats(call))


def _program(call: Call, forward: Callable, floats: dict[str, Any]) -> tuple[Callable, tuple]:
    """The function to compile and its arguments; with gradients the last are the cotangents."""
    ids = segment_ids(call)
    if not call.gradients:
        return forward, (floats, ids)

    def both(floats: dict[str, jax.Array], ids: jax.Array | None, cotangents: tuple) -> tuple:
        results, pull = jax.vjp(lambda floats: forward(floats, ids), floats)
        return results, *pull(cotangents)

    return both, (floats, ids, jax.eval_shape(forward, floats, ids))


def _floats(call: Call) -> dict[str, jax.ShapeDtypeStruct]:
    row = (call.batch, call.tokens, call.heads * WIDTH)
    arrays = {name: _bf16(row) for name in ("q", "k", "v", "gate")}
    arrays["beta"] = _bf16((call.batch, call.tokens, call.heads))
    if call.gate_form != "log_decay":
        arrays["a_log"] = jax.ShapeDtypeStruct((call.heads,), jnp.float32)
        arrays["dt_bias"] = jax.ShapeDtypeStruct((call.heads, WIDTH), jnp.float32)
    if call.states:
        arrays["initial_state"] = jax.ShapeDtypeStruct(call.state_shape, jnp.float32)
    return arrays


def _arguments(floats: dict[str, jax.Array], ids: jax.Array | None, call: Call) -> dict[str, Any]:
    """The arguments of `kda` from what a caller holds."""
    by_head = (call.batch, call.tokens, call.heads, WIDTH)
    return {
        "a_log": None,
        "dt_bias": None,
        "initial_state": None,
        **floats,
        **{name: floats[name].reshape(by_head) for name in ("q", "k", "v", "gate")},
        "gate_form": call.gate_form,
        "beta_form": "logit",
        "lower_bound": LOWER_BOUND,
        "qk_l2norm": True,
        "scale": None,
        "segment_ids": ids,
        "max_documents": call.documents or 1,
        "return_final_state": call.states or call.final,
    }


def _bf16(shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)
