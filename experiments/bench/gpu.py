"""KDA on the GPU at hand: errors against float64, then times, of ours and of peers in one run.

Every implementation gets the same random inputs and is checked before it is timed: some heads of
all rows against the recurrence in float64. A time is that of a group of calls in flight, over their
number; medians and the spread between groups are given, device memory as XLA plans it (as torch's
allocator counted it, for fla). Floors are the useful FLOPs and the bytes of
`pallas_kernels.kda.cost` at rates measured on the card.
"""

import dataclasses
import importlib.util
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments.bench import kda_cases
from experiments.bench.kda_cases import WIDTH, Call
from pallas_kernels.kda import cost
from pallas_kernels.kda.tolerances import TOLERANCES, relative_rms

# By device kind: bytes/s of a copy, read and written, and FLOP/s of a bfloat16 product of
# 8192 x 8192 matrices of random numbers, both measured.
RATES = {"NVIDIA H200": (4.3e12, 7.9e14)}
PEERS = {"jla": "jla", "fla": "fla"}
GROUPS, SECONDS = 7, 0.03
COMPARED = 16384  # tokens times heads
# Threads compile; kernels are traced by one of them at a time, as Triton wants.
_LOWERING = threading.Lock()
NAMES = ("q", "k", "v", "gate", "beta", "a_log", "dt_bias", "initial_state")

RESULTS = ("o", "final_state")
GRADIENTS = tuple(f"d{name}" for name in NAMES)
_AXIS_OF_HEADS = {"a_log": 0, "dt_bias": 0, "initial_state": 2, "final_state": 2}

Outputs = dict[str, Any]


class Program(NamedTuple):
    """One call of an implementation: `run` does not wait for the device, `wait` does; `values`
    makes arrays of what it returns; `memory` in bytes at its peak."""

    run: Callable[[], Any]
    wait: Callable[[Any], Any]
    values: Callable[[Any], Any]
    memory: Callable[[], int]


@dataclasses.dataclass(frozen=True)
class Row:
    """A line of the table: one call by one implementation. ms is the median of groups, low and high
    the fastest and the slowest; of_bytes and of_flops: floors over ms, None on an unknown card;
    bytes: of device memory at the peak; errors: relative RMS of each output; refused: why it did
    not run, in which case nothing else is told."""

    who: str
    call: Call
    ms: float = 0.0
    low: float = 0.0
    high: float = 0.0
    of_bytes: float | None = None
    of_flops: float | None = None
    bytes: int = 0
    errors: dict[str, float] = dataclasses.field(default_factory=dict)
    refused: str = ""


def table(gate_form: str, passes: Sequence[str]) -> list[Call]:
    """The calls that are measured where no shape is named: final states out."""
    plain = ((1, 8192, 96), (4, 4096, 32), (8, 2048, 32), (1, 65536, 32), (1, 8192, 8))
    packed = ((1300, 547, 2048, 963, 271, 3063), (1024,) * 8)
    calls = [(*shape, ()) for shape in plain] + [(1, 8192, 96, lengths) for lengths in packed]
    return [
        Call(B, T, H, gate_form, len(lengths), False, name == "backward", True, lengths)
        for B, T, H, lengths in calls
        for name in passes
    ]


def missing(peer: str) -> str | None:
    """Why a peer cannot be measured, or None."""
    if peer not in PEERS:
        raise ValueError(f"--peers = {peer}: must be of {', '.join(PEERS)}")
    if importlib.util.find_spec(PEERS[peer]) is None:
        return f"{peer} is not installed"
    return None


def measure(implementations: Sequence[str], calls: Sequence[Call]) -> dict[str, Any]:
    """Prints a Markdown table of the calls by each of `implementations` (ours and peers).

    Returns: the rows, which JSON can hold. One that raises has a row that says why.
    """
    card = jax.devices()[0].device_kind
    shapes: dict[Call, Call] = {}  # one oracle for both passes of a shape
    for call in calls:
        key = dataclasses.replace(call, gradients=False)
        if call.gradients or key not in shapes:
            shapes[key] = call
    with ThreadPoolExecutor() as pool:  # all is compiled before anything is timed
        pairs = [(who, call) for call in calls for who in implementations]
        ready = {pair: pool.submit(_compile, *pair) for pair in pairs}
        oracles = {key: pool.submit(compile_oracle, call) for key, call in shapes.items()}
    rows = []
    for key, widest in shapes.items():
        arrays = draw(widest)
        expected = oracles.pop(key).result()(arrays)
        for call in calls:
            if dataclasses.replace(call, gradients=False) != key:
                continue
            given = arrays if call.gradients else arrays[:2]
            for who in implementations:
                row = _row(who, call, given, ready.pop((who, call)), expected, RATES.get(card))
                rows.append(row)
                told = row.refused or f"{row.ms:8.3f}  {_worst(row)}"
                print(f"{who:11} {_name(call):26} {told}", flush=True)
    found = f"{card}, jax {jax.__version__}, {time.strftime('%Y-%m-%d')}"
    print(f"\n{found}; K = V = {WIDTH}, {calls[0].gate_form} gate; ms\n\n{markdown(rows)}")
    return {"card": found, "rows": [dataclasses.asdict(row) for row in rows]}


def settings(call: Call) -> dict[str, Any]:
    return {f.name: getattr(call, f.name) for f in dataclasses.fields(call)}


def draw(call: Call) -> tuple:
    """Random arguments of the call's program; with gradients the cotangents are the last. The same
    for every implementation, and in every run."""
    _, shapes = kda_cases.ours("chunked", **settings(call))
    leaves, tree = jax.tree.flatten(shapes)
    keys = jax.random.split(jax.random.key(0), len(leaves))

    def leaf(key, x):
        if isinstance(x, np.ndarray):
            return jnp.asarray(x)  # the ids of documents
        return jax.random.normal(key, x.shape).astype(x.dtype)

    floats, *others = jax.tree.unflatten(tree, map(leaf, keys, leaves))
    if "a_log" in floats:
        floats["a_log"] = 0.3 * floats["a_log"]
    return floats, *others


def compile_oracle(call: Call) -> Callable[[tuple], Outputs]:
    """From a call's arguments its outputs for `compared(call)` heads of all rows, in float64."""
    few = dataclasses.replace(call, heads=compared(call))
    fn, shapes = kda_cases.ours("recurrent", **settings(few))

    def widen(x):
        wide = jnp.issubdtype(x.dtype, jnp.floating)
        return jax.ShapeDtypeStruct(x.shape, jnp.float64) if wide else x

    with jax.enable_x64(), _LOWERING:
        lowered = jax.jit(fn).lower(*jax.tree.map(widen, shapes))
    compiled = lowered.compile()

    def oracle(arrays: tuple) -> Outputs:
        floats, ids, *cotangents = arrays
        floats = first_heads(call, floats)
        if cotangents:
            pair = dict(zip(RESULTS, cotangents[0], strict=True))
            pair = first_heads(call, {name: x for name, x in pair.items() if x is not None})
            cotangents = [tuple(pair.get(name) for name in RESULTS)]
        with jax.enable_x64():
            wide = jax.tree.map(lambda x: x.astype(jnp.float64), (floats, *cotangents))
            out = compiled(wide[0], ids, *wide[1:])
            return jax.tree.map(np.asarray, by_name(out, few))

    return oracle


def compared(call: Call) -> int:
    """Heads that are compared: a gradient of the recurrence keeps a state per token and head."""
    return min(call.heads, max(1, COMPARED // (call.batch * call.tokens)))


def by_name(out: tuple, call: Call) -> Outputs:
    """The outputs of a program by the names that the tolerances know."""
    results, *gradients = out if call.gradients else (out,)
    named = {name: x for name, x in zip(RESULTS, results, strict=True) if x is not None}
    return named | {"d" + name: x for name, x in (gradients[0] if gradients else {}).items()}


def first_heads(call: Call, named: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Those heads of each array that are compared."""
    heads = compared(call)

    def cut(name, x):
        axis = _AXIS_OF_HEADS.get(name.removeprefix("d") if name in GRADIENTS else name, -1)
        size = x.shape[axis] // call.heads * heads
        return jax.lax.slice_in_dim(x, 0, size, axis=axis % x.ndim)

    return {name: cut(name, x) for name, x in named.items()}


def errors(call: Call, actual: Outputs, expected: Outputs) -> dict[str, float]:
    """Relative RMS of the heads compared. An implementation that has no final states is compared in
    o alone: its gradients are those of another function."""
    if "final_state" in expected and "final_state" not in actual:
        actual = {"o": actual["o"]}
    some = first_heads(call, actual)
    return {name: relative_rms(x, expected[name]) for name, x in some.items()}


def _row(who: str, call: Call, arrays: tuple, ready: Future, expected: Outputs, rates) -> Row:
    try:
        program = ready.result()(arrays)
        error = errors(call, by_name(program.values(program.run()), call), expected)
        times = timed(program)
        peak = program.memory()
    except Exception as problem:  # of a peer's library, say: the others still have their rows
        lines = str(problem).splitlines() or [""]
        return Row(who, call, refused=f"{type(problem).__name__}: {lines[0]}")
    spec = kda_cases.spec_of(call)
    needs = [cost.forward(spec)] + [cost.backward(spec)] * call.gradients
    ms = statistics.median(times)
    of_bytes = of_flops = None
    if rates:
        of_bytes = 1e3 * sum(x.bytes_accessed for x in needs) / rates[0] / ms
        of_flops = 1e3 * sum(x.flops for x in needs) / rates[1] / ms
    return Row(who, call, ms, min(times), max(times), of_bytes, of_flops, peak, error)


def _compile(who: str, call: Call) -> Callable[[tuple], Program]:
    """From the arguments of `kda_cases.ours` an implementation's program."""
    if who == "fla":
        from experiments.bench import gpu_fla  # and with it torch

        return lambda arrays: Program(*gpu_fla.program(call, arrays))
    if who == "jla":
        fn, shapes = kda_cases.jla(**settings(call))
    else:
        fn, shapes = kda_cases.ours(who, **settings(call))
    with _LOWERING:
        lowered = jax.jit(fn).lower(*shapes)
    compiled = lowered.compile()

    def memory() -> int:
        m = compiled.memory_analysis()
        return m.argument_size_in_bytes + m.output_size_in_bytes + m.temp_size_in_bytes

    def bind(arrays: tuple) -> Program:
        floats, ids, *cotangents = arrays
        if cotangents and shapes[-1][1] is None:
            cotangents = [(cotangents[0][0], None)]  # it has no final states

        def run() -> Any:
            return compiled(floats, ids, *cotangents)

        return Program(run, jax.block_until_ready, lambda out: out, memory)

    return bind


def timed(program: Program) -> list[float]:
    """Milliseconds of a call in each of some groups of calls that are all in flight."""
    program.wait(program.run())
    start = time.perf_counter()
    program.wait(program.run())
    calls = min(max(4, round(SECONDS / (time.perf_counter() - start))), 200)
    times = []
    for _ in range(GROUPS):
        start = time.perf_counter()
        for _ in range(calls):
            out = program.run()
        program.wait(out)
        times.append(1e3 * (time.perf_counter() - start) / calls)
    return times


def markdown(rows: Sequence[Row]) -> str:
    """The rows as a table."""
    lines = [
        "| B, T, H | pass | who | ms | spread | of bytes | of FLOPs | GB | error |",
        "|---|---|---|---|---|---|---|---|---|",
    ]

    def share(x):
        return "-" if x is None else f"{100 * x:.0f} %"

    for row in rows:
        shape, which = _name(row.call).rsplit(" ", 1)
        if row.refused:
            lines.append(f"| {shape} | {which} | {row.who} | - | {row.refused} | | | | |")
            continue
        lines.append(
            f"| {shape} | {which} | {row.who} | {row.ms:.3f} | {row.low:.3f}-{row.high:.3f} "
            f"| {share(row.of_bytes)} | {share(row.of_flops)} | {row.bytes / 1e9:.2f} "
            f"| {_worst(row)} |"
        )
    return "\n".join(lines)


def _worst(row: Row) -> str:
    """The error that is the largest part of its tolerance."""
    name = max(row.errors, key=lambda name: row.errors[name] / TOLERANCES["bfloat16"][name])
    return f"{name} {row.errors[name]:.1e}"


def _name(call: Call) -> str:
    packing = f" in {call.documents}" if call.documents else ""
    return f"{call.batch}, {call.tokens}, {call.heads}{packing} {'f+b' if call.gradients else 'f'}"
