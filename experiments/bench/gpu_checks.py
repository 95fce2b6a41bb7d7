"""What must hold of KDA on a GPU whatever its speed: the same bits, and errors that do not grow.

repeats   100 calls, forward and backward, give the same bits in every output
prefix    outputs keep their bits when later tokens change
lengths   errors against float64 at T = 1024 to 65536, forward and every gradient
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from experiments.bench import gpu, kda_cases
from experiments.bench.kda_cases import Call

RUNS = 100
REPEATED = (1, 4096, 16)
LENGTHS = (1024, 4096, 16384, 65536)


def run(checks: Sequence[str], names: Sequence[str], gate_form: str) -> dict[str, Any]:
    """Prints a line per check and implementation. Returns them, which JSON can hold."""
    for check in checks:
        if check not in CHECKS:
            raise ValueError(f"--checks = {check}: must be of {', '.join(CHECKS)}")
    found: dict[str, Any] = {"card": jax.devices()[0].device_kind}
    for check in checks:
        for who in names:
            found[f"{check} {who}"] = result = CHECKS[check](who, gate_form)
            print(f"{check:8} {who:11} {result}", flush=True)
    return found


def repeats(who: str, gate_form: str) -> str:
    """Of which outputs the bits changed."""
    call = Call(*REPEATED, gate_form, 0, True, True)
    run, arrays = _program(who, call)
    first = jax.tree.map(_bits, gpu.by_name(run(*arrays), call))
    equal = jax.jit(lambda a, b: jax.tree.map(lambda x, y: jnp.array_equal(x, _bits(y)), a, b))
    changed = set()
    for _ in range(RUNS - 1):
        same = jax.device_get(equal(first, gpu.by_name(run(*arrays), call)))
        changed |= {name for name, x in same.items() if not x}
    return f"{RUNS} runs: " + (", ".join(sorted(changed)) + " changed" if changed else "equal bits")


def prefix(who: str, gate_form: str) -> str:
    """How many bits before a cut changed with the tokens after it, over several cuts."""
    call = Call(1, 2048, 16, gate_form, 0, False, False, True)
    run, (floats, ids) = _program(who, call)
    other = jax.tree.map(lambda x: x[:, ::-1] if x.shape[1:2] == (call.tokens,) else x, floats)
    o, _ = run(floats, ids)
    changed = 0
    for cut in (1, 63, 64, 65, 1000, 1024, 2047):
        mixed = jax.tree.map(
            lambda x, y, cut=cut: x if x is y else jnp.concatenate([x[:, :cut], y[:, cut:]], 1),
            floats,
            other,
        )
        changed += int(jnp.sum(_bits(run(mixed, ids)[0][:, :cut]) != _bits(o[:, :cut])))
    return f"{changed} outputs before a cut changed"


def lengths(who: str, gate_form: str) -> dict[str, dict[str, float]]:
    """Relative RMS of every output by T."""
    found = {}
    for tokens in LENGTHS:
        call = Call(1, tokens, 4, gate_form, 0, True, True)
        run, arrays = _program(who, call)
        error = gpu.errors(call, gpu.by_name(run(*arrays), call), gpu.compile_oracle(call)(arrays))
        found[str(tokens)] = {name: float(f"{x:.2g}") for name, x in error.items()}
    return found


def _program(who: str, call: Call) -> tuple[Callable, tuple]:
    if who == "fla":
        raise ValueError("--checks: not of fla")
    of = kda_cases.jla if who == "jla" else lambda **x: kda_cases.ours(who, **x)
    fn, _ = of(**gpu.settings(call))
    return jax.jit(fn), gpu.draw(call)


def _bits(x: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(x, {2: jnp.uint16, 4: jnp.uint32}[x.dtype.itemsize])


CHECKS = {f.__name__: f for f in (repeats, prefix, lengths)}
