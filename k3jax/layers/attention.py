"""Softmax attention by blocks, in plain JAX: time skips what nobody sees, memory is linear in T.

`attention` is the pure operation: packed documents, grouped heads, values of another width than
keys, and the largest logit of each head. It keeps a running softmax over blocks of keys
(Milakov & Gimelshein, arXiv 1805.02867; Dao et al., arXiv 2205.14135), saves the output and the
log-sum-exp of each query, and recomputes the scores in the backward pass. Blocks without a visible
pair are left out of both passes: those above the diagonal, and documents that ended before.

`attend` is the same on the current mesh, and what layers call.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from k3jax.layers.documents import Documents
from k3jax.layers.linear import island
from k3jax.parallel.context import gather_tokens
from k3jax.parallel.local import local
from k3jax.sharding import SEQUENCE, sequence_axis, spec_of, under_mesh
from pallas_kernels.dispatch import current_platform

BLOCK = 128  # tokens; a block of scores is [B, H, BLOCK, BLOCK]
# A GPU waits for the host at every turn of a loop whose length is not known before.
BLOCK_ON_GPU = 512


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Visibility:
    """Which keys a query sees: those of its own document, not after itself.

    `q_segments, q_index [B, Tq]` and `kv_segments, kv_index [B, Tk]`, all int32. A query sees a key
    iff both have the same positive segment and `kv_index <= q_index`. Segment 0 sees nothing and is
    seen by nothing. Any layout is allowed; blocks are skipped best where both run along the row.
    """

    q_segments: jax.Array
    kv_segments: jax.Array
    q_index: jax.Array
    kv_index: jax.Array


def causal(documents: Documents) -> Visibility:
    """Tokens of a batch see their document up to themselves."""
    ids = documents.segment_ids
    index = jax.lax.broadcasted_iota(jnp.int32, ids.shape, 1)
    return Visibility(ids, ids, index, index)


def attend(
    q: jax.Array,
    memory: tuple[jax.Array, ...],
    seen: Visibility,
    scale: float,
    keys_values: Callable[..., tuple[jax.Array, jax.Array]] = lambda k, v: (k, v),
    weights: tuple[jax.Array, ...] = (),
) -> tuple[jax.Array, jax.Array]:
    """`attention` on each device's rows and heads; the largest logits `[H]` are those of all rows.

    `keys_values(*memory, *weights)` makes k and v of what is kept of each token, `[B, Tk, ...]`, on
    each device. Queries and memory may be split over the context axis: it is the memory that is
    gathered along it, and the gradient of the memory that is summed.
    """
    out_specs, axis = None, None
    if under_mesh():
        axis = sequence_axis(memory[0])
        rows, tokens, heads, _ = spec_of(q)
        out_specs = (spec_of(q), PartitionSpec(rows, tokens, heads))
        split, whole = PartitionSpec(rows, tokens), PartitionSpec(rows, None)
        seen = Visibility(
            jax.sharding.reshard(seen.q_segments, split),
            jax.sharding.reshard(seen.kv_segments, whole),
            jax.sharding.reshard(seen.q_index, split),
            jax.sharding.reshard(seen.kv_index, whole),
        )

    def shard(q: jax.Array, memory: tuple, weights: tuple, seen: Visibility) -> tuple:
        k, v = keys_values(*gather_tokens(memory, axis), *weights)
        o, max_logit = attention(q, k, v, seen, scale=scale)
        return o, max_logit[:, None]

    o, max_logit = local(shard, q, memory, weights, seen, out_specs=out_specs)
    return o, max_logit.max((0, 1), initial=-jnp.inf)


def unsplit_sequence(x: jax.Array) -> jax.Array:
    """`x` gathered over the context axis of the current mesh, where there is one."""
    if not under_mesh():
        return x
    spec = (None if axis == SEQUENCE else axis for axis in spec_of(x))
    return jax.sharding.reshard(x, PartitionSpec(*spec))


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    seen: Visibility,
    *,
    scale: float,
    block: int | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Softmax attention of `q [B, Tq, H, D]` over `k [B, Tk, HK, D]` and `v [B, Tk, HK, V]`.

    HK divides H; query head h reads key head `h // (H / HK)`. Any Tq, Tk >= 0. q, k and v share one
    dtype, in which products are taken (at full precision from float32 on); scores, softmax and
    accumulators are float32, or float64 for float64 inputs.

    Returns `(o, max_logit)`:

    - `o [B, Tq, H, V]` in the accumulator's dtype, zero for a query that sees nothing. It is
      not rounded to bfloat16, because the backward pass reads it, and a rounded one biases the
      gradient of the scores (K3R §2.1.2).
    - `max_logit [B, H]`: the largest `scale * q·k` over visible pairs, -inf where there is none. It
      carries no gradient.

    `block` bounds the tokens of a block of queries or keys, by default as the platform likes it.
    Lengths that it divides need no copy.
    Raises `ValueError` for shapes or dtypes that do not fit.
    """
    _check(q, k, v, seen)
    B, Tq, H, _ = q.shape
    Tk, HK, V = v.shape[1:]
    if 0 in (B, Tq, Tk):
        wide = island(q.dtype)
        return jnp.zeros((B, Tq, H, V), wide), jnp.full((B, H), -jnp.inf, wide)
    if block is None:
        block = BLOCK_ON_GPU if current_platform() == "gpu" else BLOCK
    bq, bk = _block_size(Tq, block), _block_size(Tk, block)
    q = q.reshape(B, Tq, HK, H // HK, -1)
    padded = Visibility(
        _pad(seen.q_segments, bq),
        _pad(seen.kv_segments, bk),
        _pad(seen.q_index, bq),
        _pad(seen.kv_index, bk),
    )
    o, max_logit = _blockwise(scale, (bq, bk), _pad(q, bq), _pad(k, bk), _pad(v, bk), padded)
    return o[:, :Tq].reshape(B, Tq, H, V), max_logit.reshape(B, H)


def _check(q: jax.Array, k: jax.Array, v: jax.Array, seen: Visibility) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim != 4 or not jnp.issubdtype(x.dtype, jnp.floating):
            raise ValueError(f"{name}: {x.dtype}{list(x.shape)}, must be floating [B, T, H, D]")
        if x.dtype != q.dtype:
            raise ValueError(f"{name}: {x.dtype}, must be that of q, {q.dtype}")
    B, Tq, H, D = q.shape
    Tk, HK = k.shape[1:3]
    if k.shape != (B, Tk, HK, D) or HK == 0 or H % HK:
        raise ValueError(
            f"k: {list(k.shape)}, must be [{B}, Tk, a divisor of {H}, {D}] for q {list(q.shape)}"
        )
    if v.shape[:3] != k.shape[:3]:
        raise ValueError(f"v: {list(v.shape)}, must be [{B}, {Tk}, {HK}, V] for k {list(k.shape)}")
    for field in dataclasses.fields(seen):
        x = getattr(seen, field.name)
        shape = (B, Tq if field.name.startswith("q_") else Tk)
        if x.shape != shape or x.dtype != jnp.int32:
            raise ValueError(
                f"{field.name}: {x.dtype}{list(x.shape)}, must be int32{list(shape)} for q and k"
            )


def _block_size(length: int, block: int) -> int:
    """Size of equal blocks of at most `block` tokens that cover `length` with least padding."""
    return math.ceil(length / math.ceil(length / block))


def _pad(x: jax.Array, size: int) -> jax.Array:
    """`x` with zeros after its tokens, up to whole blocks of `size`."""
    return jnp.pad(x, ((0, 0), (0, -x.shape[1] % size), *((0, 0),) * (x.ndim - 2)))


def _block(x: jax.Array, i: jax.Array, size: int, axis: int = 1) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(x, i * size, size, axis)


def _store(x: jax.Array, block: jax.Array, i: jax.Array, axis: int = 1) -> jax.Array:
    start = i * block.shape[axis]
    return jax.lax.dynamic_update_slice_in_dim(x, block.astype(x.dtype), start, axis)


def _dot(subscripts: str, x: jax.Array, y: jax.Array) -> jax.Array:
    """An einsum in the dtype of `y`, accumulated in a float32 island."""
    narrow = jnp.finfo(y.dtype).bits < 32
    return jnp.einsum(
        subscripts,
        x.astype(y.dtype),
        y,
        precision=None if narrow else jax.lax.Precision.HIGHEST,
        preferred_element_type=island(y.dtype),
    )


def _key_blocks(seen: Visibility, sizes: tuple[int, int]) -> tuple[jax.Array, jax.Array]:
    """`[first, last)` block of keys that each block of queries may see, `[Tq / bq]` each.

    Decided from the extremes of segment and index in each block, for all rows together.
    """

    def extremes(segments: jax.Array, index: jax.Array, size: int) -> tuple[jax.Array, ...]:
        ids, at = (x.reshape(x.shape[0], -1, size) for x in (segments, index))
        real, most = ids > 0, jnp.iinfo(jnp.int32).max
        return (
            jnp.where(real, ids, most).min(2),
            ids.max(2),
            jnp.where(real, at, most).min(2),
            jnp.where(real, at, -most).max(2),
        )

    q_low, q_high, _, q_last = extremes(seen.q_segments, seen.q_index, sizes[0])
    k_low, k_high, k_first, _ = extremes(seen.kv_segments, seen.kv_index, sizes[1])
    blocks = k_low.shape[1]

    def of_query_block(block: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        low, high, last = (x[:, None] for x in block)
        some = ((k_low <= high) & (k_high >= low) & (k_first <= last)).any(0)
        first = jnp.argmax(some)
        return first, jnp.where(some.any(), blocks - jnp.argmax(some[::-1]), first)

    # One block of queries at a time: the table of all pairs would be quadratic in T.
    return jax.lax.map(of_query_block, (q_low.T, q_high.T, q_last.T))


def _scores(
    q: jax.Array, k: jax.Array, seen: Visibility, scale: float, i: jax.Array, j: jax.Array
) -> jax.Array:
    """Logits `[B, HK, G, bq, bk]` of one block, -inf where a query does not see a key.

    `q [B, bq, HK, G, D]` and `k [B, bk, HK, D]` are blocks i and j of what `seen` describes.
    """
    q_ids, q_at = (_block(x, i, q.shape[1])[:, :, None] for x in (seen.q_segments, seen.q_index))
    k_ids, k_at = (_block(x, j, k.shape[1])[:, None] for x in (seen.kv_segments, seen.kv_index))
    visible = (q_ids > 0) & (q_ids == k_ids) & (k_at <= q_at)
    return jnp.where(visible[:, None, None], scale * _dot("bqhgd,bkhd->bhgqk", q, k), -jnp.inf)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _blockwise(
    scale: float,
    sizes: tuple[int, int],
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    seen: Visibility,
) -> tuple[jax.Array, jax.Array]:
    """`o [B, Tq, HK, G, V]`, `max_logit [B, HK, G]` of `q [B, Tq, HK, G, D]`, in whole blocks."""
    return _forward(scale, sizes, q, k, v, seen)[0]


def _forward(scale, sizes, q, k, v, seen):
    B, Tq, HK, G, _ = q.shape
    V, (bq, bk), wide = v.shape[-1], sizes, island(q.dtype)
    first, last = _key_blocks(seen, sizes)

    def query_block(i, carry):
        o, lse, max_logit = carry
        q_i = _block(q, i, bq)

        def key_block(j, carry):
            acc, total, peak = carry
            scores = _scores(q_i, _block(k, j, bk), seen, scale, i, j)
            new_peak = jnp.maximum(peak, scores.max(-1))
            anchor = jnp.where(new_peak == -jnp.inf, 0, new_peak)  # -inf - -inf would be NaN
            shrink, p = jnp.exp(peak - anchor), jnp.exp(scores - anchor[..., None])
            update = _dot("bhgqk,bkhv->bhgqv", p, _block(v, j, bk))
            return acc * shrink[..., None] + update, total * shrink + p.sum(-1), new_peak

        none_yet = (
            jnp.zeros((B, HK, G, bq, V), wide),
            jnp.zeros((B, HK, G, bq), wide),
            jnp.full((B, HK, G, bq), -jnp.inf, wide),
        )
        acc, total, peak = jax.lax.fori_loop(first[i], last[i], key_block, none_yet)
        blind = peak == -jnp.inf
        total = jnp.where(blind, 1, total)
        o_i = jnp.moveaxis(acc / total[..., None], 3, 1)
        # A query that sees nothing has lse +inf: its probabilities are then exp(-inf - inf) = 0.
        lse_i = jnp.where(blind, jnp.inf, peak + jnp.log(total))
        return _store(o, o_i, i), _store(lse, lse_i, i, 3), jnp.maximum(max_logit, peak.max(-1))

    carry = (
        jnp.zeros((B, Tq, HK, G, V), wide),
        jnp.zeros((B, HK, G, Tq), wide),
        jnp.full((B, HK, G), -jnp.inf, wide),
    )
    o, lse, max_logit = jax.lax.fori_loop(0, Tq // bq, query_block, carry)
    return (o, max_logit), (q, k, v, seen, o, lse)


def _backward(scale, sizes, saved, cotangents):
    q, k, v, seen, o, lse = saved
    do, _ = cotangents
    do = do.astype(q.dtype)
    (bq, bk), wide = sizes, island(q.dtype)
    first, last = _key_blocks(seen, sizes)

    def query_block(i, carry):
        dq, dk, dv = carry
        q_i, do_i, lse_i = _block(q, i, bq), _block(do, i, bq), _block(lse, i, bq, 3)
        delta = jnp.moveaxis((do_i * _block(o, i, bq)).sum(-1), 1, 3)

        def key_block(j, carry):
            dq_i, dk, dv = carry
            k_j, v_j = _block(k, j, bk), _block(v, j, bk)
            p = jnp.exp(_scores(q_i, k_j, seen, scale, i, j) - lse_i[..., None])
            dp = _dot("bqhgv,bkhv->bhgqk", do_i, v_j)
            ds = scale * p * (dp - delta[..., None])
            dk_j = _block(dk, j, bk) + _dot("bhgqk,bqhgd->bkhd", ds, q_i)
            dv_j = _block(dv, j, bk) + _dot("bhgqk,bqhgv->bkhv", p, do_i)
            dq_i = dq_i + _dot("bhgqk,bkhd->bhgqd", ds, k_j)
            return dq_i, _store(dk, dk_j, j), _store(dv, dv_j, j)

        dq_i = jnp.zeros((*lse_i.shape, q.shape[-1]), wide)
        dq_i, dk, dv = jax.lax.fori_loop(first[i], last[i], key_block, (dq_i, dk, dv))
        return _store(dq, jnp.moveaxis(dq_i, 3, 1), i), dk, dv

    carry = (jnp.zeros_like(q), jnp.zeros(k.shape, wide), jnp.zeros(v.shape, wide))
    dq, dk, dv = jax.lax.fori_loop(0, q.shape[1] // bq, query_block, carry)
    return dq, dk.astype(k.dtype), dv.astype(v.dtype), None


_blockwise.defvjp(_forward, _backward)
