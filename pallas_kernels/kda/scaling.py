"""Time and memory of `kda` against the number of tokens, as a table:

    python -m pallas_kernels.kda.scaling --tokens 4096 16384 65536 --documents 8

One row of float32 tokens with random values, jitted: the forward pass alone, and together with the
gradient of every input. `MiB` is what the compiled program takes above its arguments and results.
With `--documents` the row holds that many, with an initial and a final state for each.

Compiled for a CPU, with gradients, H = 4 and D = 128, `chunked` takes 70, 209 and 834 MiB for
4,096, 16,384 and 65,536 tokens, and 122, 391 and 1,498 MiB where they are eight documents.
"""

import argparse
import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from . import kda


def inputs(tokens: int, heads: int, width: int, documents: int) -> dict[str, jax.Array]:
    """Random arguments of `kda`, K = V = width; `documents` equal ones with states, or 0."""
    shapes: dict[str, tuple[int, ...]]
    shapes = {n: (1, tokens, heads, width) for n in ("q", "k", "v", "gate")}
    shapes |= {"beta": (1, tokens, heads), "a_log": (heads,), "dt_bias": (heads, width)}
    if documents:
        shapes["initial_state"] = (1, documents, heads, width, width)
    keys = jax.random.split(jax.random.key(0), len(shapes))
    x = {n: jax.random.normal(key, s) for key, (n, s) in zip(keys, shapes.items(), strict=True)}
    if documents:
        x["segment_ids"] = 1 + jnp.arange(tokens)[None] * documents // tokens
    return x


def forward(x: dict[str, Any], **options: Any) -> tuple[Any, ...]:
    """o, and the final states of packed documents."""
    states = x.get("initial_state")
    if states is not None:
        options |= {"max_documents": states.shape[1], "return_final_state": True}
    out = kda(**x, gate_form="bounded", beta_form="logit", **options)
    return out if states is not None else out[:1]


def with_gradients(x: dict[str, jax.Array], **options: Any) -> tuple[Any, Any]:
    """The results of `forward`, and the gradients of their squares' sum in every float."""
    ids = {n: x[n] for n in ("segment_ids",) if n in x}
    floats = {n: y for n, y in x.items() if n not in ids}
    out, pull = jax.vjp(lambda floats: forward(floats | ids, **options), floats)
    return out, pull(out)


def compile_for(
    program: Callable[..., Any], tokens: int, heads: int, width: int, documents: int, **options: Any
) -> jax.stages.Compiled:
    """`forward` or `with_gradients`, compiled for `inputs` of these sizes."""
    x = jax.eval_shape(functools.partial(inputs, tokens, heads, width, documents))
    return jax.jit(functools.partial(program, **options)).lower(x).compile()


def temporary_mib(compiled: jax.stages.Compiled) -> float:
    """What a compiled program takes above its arguments and results."""
    sizes = compiled.memory_analysis()
    return sizes.temp_size_in_bytes / 2**20 if sizes else float("nan")


def seconds(compiled: jax.stages.Compiled, x: dict[str, jax.Array], repeats: int = 3) -> float:
    """The quickest of a few runs after the first."""
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        jax.block_until_ready(compiled(x))
        times.append(time.perf_counter() - start)
    return min(times[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[2**n for n in range(10, 17)])
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--documents", type=int, default=0)
    parser.add_argument("--implementation", default=None)
    flags = parser.parse_args()
    print(f"{'T':>7} {'forward':>24} {'with gradients':>29}")
    print(f"{'':>7} {'ms':>9} {'us/token':>9} {'MiB':>6} {'ms':>12} {'us/token':>9} {'MiB':>6}")
    for tokens in flags.tokens:
        sizes = (tokens, flags.heads, flags.width, flags.documents)
        x = inputs(*sizes)
        cells = []
        for program in (forward, with_gradients):
            compiled = compile_for(program, *sizes, implementation=flags.implementation)
            s = seconds(compiled, x)
            cells.append(f"{1e3 * s:9.1f} {1e6 * s / tokens:9.1f} {temporary_mib(compiled):6.0f}")
        print(f"{tokens:7d} {cells[0]}    {cells[1]}", flush=True)


if __name__ == "__main__":
    main()
