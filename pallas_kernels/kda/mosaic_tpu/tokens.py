"""Reading and writing the tokens of a visit, inside a kernel."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp

from . import marks as masks
from .activate import Raw
from .launch import Now
from .plan import Plan
from .tiles import CHUNK, cut, heads, iota


def read_raw(refs: SimpleNamespace) -> Raw:
    """What goes into the activations."""
    rows = {n: getattr(refs, n)[...] if hasattr(refs, n) else None for n in ("a", "dt_bias")}
    return Raw(refs.q[...], refs.k[...], refs.gate[...], refs.beta[...], **rows)


def read_marks(plan: Plan, refs: SimpleNamespace) -> masks.Marks | None:
    return masks.read(plan, refs.marks[...]) if plan.masked else None


def read_values(plan: Plan, x: jax.Array, marks: masks.Marks | None) -> jax.Array:
    """Values, or the cotangent of o, as pairs `[n, C, 2V]` in float32; zero at padding."""
    x = cut(x.astype(jnp.float32), plan.value_width, plan.chunks)
    return x if marks is None else jnp.where(marks.alive, x, 0.0)


def put(plan: Plan, ref, x: jax.Array, now: Now) -> None:
    """Writes pairs `[n, C, 2W]` to a block `[chunks * C, heads * W]`."""
    size, width = plan.heads // 2, x.shape[-1]
    for n in range(x.shape[0]):
        rows = slice(CHUNK * (n // size), CHUNK * (n // size + 1))
        lanes = slice(width * (n % size), width * (n % size + 1))
        _merge(ref, rows, lanes, x[n], now)


def put_keys(plan: Plan, ref, x: jax.Array, now: Now) -> None:
    """Writes gradients of value heads' queries or keys, pairs `[n, C, 2K]`, summed over the heads
    that share one, to a block `[chunks * C, heads / repeat * K]`."""
    if plan.repeat == 1:
        return put(plan, ref, x, now)
    x, K = heads(x), plan.key_width
    for c in range(plan.chunks):
        for h in range(plan.heads // plan.repeat):
            first = plan.heads * c + plan.repeat * h
            total = jnp.sum(x[first : first + plan.repeat], axis=0)
            rows, lanes = slice(CHUNK * c, CHUNK * (c + 1)), slice(K * h, K * (h + 1))
            _merge(ref, rows, lanes, total, now)


def put_beta(plan: Plan, ref, columns: jax.Array, slope: jax.Array, now: Now) -> None:
    """Writes the heads' columns `[2n, C, 1]` times `slope [chunks * C, heads]` to its block."""
    lane = iota((CHUNK, plan.heads), 1)
    for c in range(plan.chunks):
        block = jnp.zeros((CHUNK, plan.heads), jnp.float32)
        for h in range(plan.heads):
            block = jnp.where(lane == h, columns[plan.heads * c + h], block)
        rows = slice(CHUNK * c, CHUNK * (c + 1))
        _merge(ref, rows, slice(None), block * slope[rows], now)


def _merge(ref, rows: slice, lanes: slice, x: jax.Array, now: Now) -> None:
    """A later visit of a step adds to what the earlier ones wrote: a token is alive in one only."""
    x = x.astype(ref.dtype)
    if now.fresh is not True:
        x += jnp.where(now.fresh, jnp.zeros_like(x), ref[rows, lanes])
    ref[rows, lanes] = x


def add_rows(plan: Plan, ref, x: jax.Array) -> None:
    """Adds sums over tokens, pairs `[n, 1, 2K]`, to a row of channels `[1, heads * K]`."""
    size, width = plan.heads // 2, x.shape[-1]
    for n in range(x.shape[0]):
        ref[:, width * (n % size) : width * (n % size + 1)] += x[n]
