"""The calls of the grouped matmul that are measured on a GPU, and the steps of routing beside them.

Peers are optional imports: jla and tokamax as their users call them, and the example kernels that
come with jax, at the tiles that their own tuning tries first.
"""

import dataclasses
import functools
import importlib
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import dispatch
from pallas_kernels.grouped_matmul import grouped_matmul

PEERS = ("jla", "tokamax", "jax_mosaic")
SPREADS = ("even", "zipf")
# The rounding of a result to bfloat16 is 1.7e-3.
TOLERANCE = 4e-3


@dataclasses.dataclass(frozen=True)
class Call:
    """rows `[N, K]` of G groups, K -> M; spread: even groups, or sizes by Zipf's law (exponent 1),
    in random order."""

    rows: int
    inner: int
    outer: int
    groups: int
    spread: str

    def sizes(self) -> np.ndarray:
        if self.spread == "even":
            return np.diff(np.arange(self.groups + 1) * self.rows // self.groups).astype(np.int32)
        share = 1 / np.arange(1, self.groups + 1)
        sizes = np.floor(self.rows * share / share.sum()).astype(np.int32)
        sizes[0] += self.rows - sizes.sum()
        return np.random.default_rng(0).permutation(sizes)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self.rows, self.inner, self.outer, self.groups

    @property
    def flops(self) -> int:
        """Of one product; forward and backward together are three."""
        return 2 * self.rows * self.inner * self.outer


def product_of(who: str, groups: int) -> Callable:
    """`(rows, weights, sizes) -> out`, differentiable, of an implementation or a peer.

    Raises:
      ModuleNotFoundError: if a peer is not installed.
      ValueError: if it cannot take the call.
    """
    if who in dispatch.names("grouped_matmul"):
        return functools.partial(grouped_matmul, implementation=who)
    if who == "jla":
        ragged_dot = importlib.import_module("jla.ops.mosaic_gpu.ragged_dot").ragged_dot
        return lambda x, w, s: ragged_dot(x, w, s, full_groups=True)
    if who == "tokamax":
        ragged_dot = importlib.import_module("tokamax").ragged_dot
        return lambda x, w, s: ragged_dot(x, w, s, implementation="mosaic")
    if groups > 128:
        raise ValueError("its search is unrolled over the groups: minutes of compilation")
    return _jax_mosaic()


def _jax_mosaic() -> Callable:
    """jax's own examples, whose three kernels a user has to put together."""
    from jax.experimental.pallas.ops.gpu.ragged_dot_mgpu import ragged_dot
    from jax.experimental.pallas.ops.gpu.transposed_ragged_dot_mgpu import transposed_ragged_dot

    tile = {"block_m": 128, "block_n": 128, "block_k": 64, "max_concurrent_steps": 4}

    @jax.custom_vjp
    def product(x, w, s):
        return ragged_dot(x, w, group_sizes=s, **tile, grid_block_n=2)

    def backward(residuals, ct):
        x, w, s = residuals
        d_rows = ragged_dot(ct, w, group_sizes=s, **tile, grid_block_n=2, transpose_rhs=True)
        return d_rows, transposed_ragged_dot(x, ct, group_sizes=s, **tile, grid_block_n=2), None

    product.defvjp(lambda x, w, s: (product(x, w, s), (x, w, s)), backward)
    return product


def draw(call: Call, seed: int) -> tuple[jax.Array, ...]:
    """rows, weights, cotangent, sizes; in bfloat16, of order one."""
    keys = jax.random.split(jax.random.key(seed), 3)

    @functools.partial(jax.jit, static_argnums=(1, 2))
    def normal(key, shape, scale):
        return jax.random.normal(key, shape, jnp.bfloat16) * jnp.bfloat16(scale)

    weights = normal(keys[1], (call.groups, call.inner, call.outer), call.inner**-0.5)
    rows = normal(keys[0], (call.rows, call.inner), 1.0)
    return rows, weights, normal(keys[2], (call.rows, call.outer), 1.0), jnp.asarray(call.sizes())


@jax.jit
def _errors(arrays, found, first, stop, some_rows, some_channels):
    """Squares of errors and of values, of output, d_rows and d_weights, at some rows and channels
    of the group that owns rows first .. stop - 1; group g's matrices come instead of all."""
    (rows, matrix, cotangent), (out, d_rows, d_matrix) = arrays, found
    own = (jnp.arange(len(rows)) >= first) & (jnp.arange(len(rows)) < stop)

    def product(a, b):
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
        return jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)

    def masked(x):
        return jnp.where(own[:, None], x, 0)

    pairs = (
        (out[some_rows], product(rows[some_rows], matrix)),
        (d_rows[some_rows], product(cotangent[some_rows], matrix.T)),
        (d_matrix[some_channels], product(masked(rows[:, some_channels]).T, masked(cotangent))),
    )
    return jnp.array([(((g - w) ** 2).mean() / (w**2).mean()) ** 0.5 for g, w in pairs])


PARTS = ("out", "d_rows", "d_weights")


def errors_of(
    call: Call, arrays: Sequence[jax.Array], found: Sequence[jax.Array]
) -> dict[str, float]:
    """Relative RMS errors of output and gradients against float32, the largest of four groups, the
    first, the last, the largest and the smallest: of 64 rows, its first and last included, and of
    64 channels of its gradient."""
    sizes = call.sizes()
    starts = np.cumsum(sizes) - sizes
    used = np.flatnonzero(sizes)
    worst = np.zeros(3)
    for g in (used[0], used[-1], used[np.argmax(sizes[used])], used[np.argmin(sizes[used])]):
        some = np.linspace(starts[g], starts[g] + sizes[g] - 1, 64).astype(np.int32)
        channels = np.linspace(0, call.inner - 1, 64).astype(np.int32)
        rows, weights, cotangent = arrays[:3]
        out, d_rows, d_weights = found
        errors = _errors(
            (rows, weights[g], cotangent),
            (out, d_rows, d_weights[g]),
            np.int32(starts[g]),
            np.int32(starts[g] + sizes[g]),
            some,
            channels,
        )
        worst = np.maximum(worst, errors)
    return dict(zip(PARTS, worst.tolist(), strict=True))


def seconds(program: Callable, arrays: tuple[Any, ...], repeats: int) -> float:
    """Median wall time of a call, in groups of eight calls that are not waited for one by one."""
    jax.block_until_ready(program(*arrays))
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        for _ in range(8):
            out = program(*arrays)
        jax.block_until_ready(out)
        times.append((time.perf_counter() - begin) / 8)
    return statistics.median(times)


def compiled(who: str, shape: tuple[int, int, int, int]) -> tuple[Callable, Callable] | str:
    """Forward, and forward with both gradients, compiled; or why a peer has none."""
    rows, inner, outer, groups = shape
    shapes = ((rows, inner), (groups, inner, outer), (rows, outer))
    arrays = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    sizes = jax.ShapeDtypeStruct((groups,), jnp.int32)
    try:
        product = product_of(who, groups)

        def forward(rows, weights, cotangent, sizes):
            return product(rows, weights, sizes)

        def both(rows, weights, cotangent, sizes):
            out, pull = jax.vjp(lambda r, w: product(r, w, sizes), rows, weights)
            return out, *pull(cotangent)

        return tuple(jax.jit(f).lower(*arrays, sizes).compile() for f in (forward, both))
    except Exception as error:  # a peer may fail in any way, and the others go on
        if who in dispatch.names("grouped_matmul"):
            raise
        return f"{type(error).__name__}: {error}".splitlines()[0][:120]


def measure(
    who: str, call: Call, programs: tuple[Callable, Callable] | str, repeats: int
) -> dict[str, Any]:
    """A row of the table: error, milliseconds and TFLOP/s; or `said`, why there are none."""
    row: dict[str, Any] = {"who": who, **dataclasses.asdict(call)}
    if isinstance(programs, str):
        return row | {"said": programs}
    forward, both = programs
    arrays = draw(call, seed=0)
    row["errors"] = errors_of(call, arrays, both(*arrays))
    # A peer that is wrong is timed all the same, and shown with its error.
    if max(row["errors"].values()) > TOLERANCE and who in dispatch.names("grouped_matmul"):
        return row | {"said": f"wrong: {row['errors']}"}
    for name, program, products in (("forward", forward, 1), ("both", both, 3)):
        row[f"{name}_ms"] = 1e3 * seconds(program, arrays, repeats)
        row[f"{name}_tflops"] = products * call.flops / row[f"{name}_ms"] / 1e9
    return row


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown."""
    lines = [
        "| N, K -> M, groups | spread | who | forward ms | TFLOP/s | with gradients ms | TFLOP/s |"
        " error |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        shape = f"{r['rows']}, {r['inner']} -> {r['outer']}, {r['groups']}"
        begin = f"| {shape} | {r['spread']} | {r['who']} |"
        if "said" in r:
            lines.append(f"{begin} {r['said']} | | | | |")
        else:
            lines.append(
                f"{begin} {r['forward_ms']:.3f} | {r['forward_tflops']:.0f} | {r['both_ms']:.3f} |"
                f" {r['both_tflops']:.0f} | {_shown(r['errors'])} |"
            )
    return "\n".join(lines)


def _shown(errors: dict[str, float]) -> str:
    """The largest error, or all where one is too large."""
    if max(errors.values()) < TOLERANCE:
        return f"{max(errors.values()):.1e}"
    return ", ".join(f"{name} {error:.1e}" for name, error in errors.items())


@dataclasses.dataclass(frozen=True)
class Routing:
    """Tokens that each choose k of E experts, of `inner` -> `outer` -> `inner` with a gate."""

    tokens: int = 65536
    experts: int = 896
    k: int = 16
    inner: int = 3584
    outer: int = 3072


def top_k(scores: jax.Array, k: int) -> jax.Array:
    return jax.lax.top_k(scores, k)[1]


def top_k_by_maxima(scores: jax.Array, k: int) -> jax.Array:
    """The largest, k times over: exact, ties to the lower number, no sort."""
    column = jax.lax.broadcasted_iota(jnp.int32, scores.shape, 1)
    found = []
    for _ in range(k):
        best = jnp.argmax(scores, axis=1).astype(jnp.int32)
        found.append(best)
        scores = jnp.where(column == best[:, None], -jnp.inf, scores)
    return jnp.stack(found, axis=1)


def order_by_argsorts(indices: jax.Array, experts: int) -> tuple[jax.Array, ...]:
    """Row -> route, route -> row and rows of every expert, by two sorts of pairs."""
    expert = indices.reshape(-1)
    order = jnp.argsort(expert, stable=True)
    ends = jnp.searchsorted(expert[order], jnp.arange(experts), side="right").astype(jnp.int32)
    return order, jnp.argsort(order), jnp.diff(ends, prepend=0)


def order_by_keys(indices: jax.Array, experts: int) -> tuple[jax.Array, ...]:
    """The same by one sort of single unsigned words, which hold expert and route."""
    routes = indices.size
    bits = (routes - 1).bit_length()
    if experts << bits > 1 << 32:
        raise ValueError(f"indices: {routes} routes to {experts} experts do not fit 32 bits")
    route = jnp.arange(routes, dtype=jnp.uint32)
    key = jnp.sort((indices.reshape(-1).astype(jnp.uint32) << bits) | route)
    order = (key & ((1 << bits) - 1)).astype(jnp.int32)
    place = jnp.zeros(routes, jnp.int32).at[order].set(route.astype(jnp.int32), unique_indices=True)
    return order, place, jnp.zeros(experts, jnp.int32).at[indices.reshape(-1)].add(1)


def measure_routing(routing: Routing, who: str, repeats: int) -> dict[str, Any]:
    """Milliseconds of the steps of routing, and of the experts that they route to."""
    shape = (routing.tokens, routing.experts)
    scores = jax.random.uniform(jax.random.key(1), shape)
    # A router also wants the score that its choice had to beat.
    steps: dict[str, float] = {}
    chosen = None
    for choose in (top_k, top_k_by_maxima):
        program = jax.jit(functools.partial(choose, k=routing.k + 1))
        found = program(scores)
        assert chosen is None or bool((found == chosen).all()), choose
        chosen = found
        steps[choose.__name__] = 1e3 * seconds(program, (scores,), repeats)
    indices = chosen[:, : routing.k]
    ordered = None
    for order in (order_by_argsorts, order_by_keys):
        program = jax.jit(functools.partial(order, experts=routing.experts))
        found = program(indices)
        assert ordered is None or all(
            bool((a == b).all()) for a, b in zip(found, ordered, strict=True)
        ), order
        ordered = found
        steps[order.__name__] = 1e3 * seconds(program, (indices,), repeats)
    del scores
    # Gate and up are two of the first product, down is the second.
    rows = routing.tokens * routing.k
    experts_ms = 0.0
    for inner, outer, times in (
        (routing.inner, routing.outer, 2),
        (routing.outer, routing.inner, 1),
    ):
        call = Call(rows, inner, outer, routing.experts, "even")
        x, w, _, _ = draw(call, seed=2)
        program = jax.jit(product_of(who, routing.experts))
        experts_ms += times * 1e3 * seconds(program, (x, w, ordered[2]), repeats)
        del x, w
    return {**dataclasses.asdict(routing), "steps_ms": steps, "experts_forward_ms": experts_ms}
