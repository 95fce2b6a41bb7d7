"""Muon's direction: matrices orthogonalised where they lie on the mesh.

Muon (Jordan et al., 2024) replaces the momentum M of a matrix by its nearest semi-orthogonal
matrix, approximately, by five Newton-Schulz steps. A parameter `[..., in, out]` holds many
matrices: its leading axes (layers, experts) count them, and under Muon per head (K3R §2.5) each of
the `ParamSpec.heads` blocks of columns is one, with a scale of its own.

No matrix need be gathered for it. Blocks of heads split over tensor and experts split over expert
are whole where they are. Where a mesh axis cuts the matrices, one of these takes their place:

1. The matrices are dealt out over that axis (an all-to-all there and back) if their number divides.
2. Otherwise the cut moves to the longer side (an all-to-all there and back), or stays there. The
   iteration needs no more of X than the Gram matrix of its shorter side, summed over the devices:
   one all-reduce of shorter x shorter a step.
3. A shorter side whose cut cannot move, as the longer side does not divide, is gathered.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp

from k3jax.params import ParamSpec
from k3jax.sharding import spec_of, under_mesh

MUON_RMS = 0.2  # root mean square of an update at rate 1, AdamW's typical one
STEPS, COEFFICIENTS = 5, (3.4445, -4.7750, 2.0315)
_EPS = 1e-20  # of the norm: matrices without gradient stay zero


def direction(momentum: jax.Array, spec: ParamSpec, per_head: bool) -> jax.Array:
    """The update at rate 1 of a parameter of `spec`, `[..., in, out]`, in its dtype and layout.

    Each matrix has root mean square `MUON_RMS` if it has full rank: `0.2 sqrt(max(in, out)) O`, by
    the size of the block (Moonlight, arXiv 2502.16982, eq. 4). Products run at jax's default
    precision. Raises `ValueError` where heads do not divide over the mesh axes of the columns.
    """
    heads = spec.heads if per_head else 1
    if not under_mesh():
        return _of_shard(momentum, heads, (), ())
    layout = spec_of(momentum)
    rows, columns = _split(layout[-2]), _split(layout[-1])
    if heads > 1:
        if heads % math.prod(map(_size, columns)):
            raise ValueError(f"{spec.hf_name}: {heads} heads must divide over {', '.join(columns)}")
        heads, columns = heads // math.prod(map(_size, columns)), ()
    shard = functools.partial(_of_shard, heads=heads, rows=rows, columns=columns)
    return jax.shard_map(shard, in_specs=layout, out_specs=layout, check_vma=False)(momentum)


def _of_shard(
    x: jax.Array, heads: int, rows: tuple[str, ...], columns: tuple[str, ...]
) -> jax.Array:
    """`direction` of this device's shard, whose matrices are cut over `rows` and `columns`."""
    if not x.size:
        return x
    *lead, height, width = x.shape
    blocks = x.reshape(-1, height, heads, width // heads).swapaxes(1, 2)
    blocks = blocks.reshape(-1, height, width // heads)
    cuts = rows, columns
    whole = [blocks.shape[1 + i] * math.prod(map(_size, cuts[i])) for i in (0, 1)]
    plan = _plan(blocks.shape, whole, cuts)
    for move in plan.moves:
        blocks = move.apply(blocks)
    out = newton_schulz(blocks, plan.long, plan.summed) * (MUON_RMS * math.sqrt(max(whole)))
    for move in reversed(plan.moves):
        out = move.undo(out)
    out = out.reshape(-1, heads, height, width // heads).swapaxes(1, 2)
    return out.reshape(*lead, height, width)


def newton_schulz(x: jax.Array, long: int, summed: tuple[str, ...] = ()) -> jax.Array:
    """Nearly orthogonal matrices of the row and column spaces of `x [N, in, out]`.

    `long`, 1 or 2, is the longer side, of which each device of the mesh axes `summed` has a part.
    """
    gram = "nri,nrj->nij" if long == 1 else "nic,njc->nij"
    apply = "nri,nij->nrj" if long == 1 else "nij,njc->nic"
    a, b, c = COEFFICIENTS

    def total(part: jax.Array) -> jax.Array:
        return jax.lax.psum(part, summed) if summed else part

    x = x / (jnp.sqrt(total(jnp.sum(x * x, (1, 2), keepdims=True))) + _EPS)

    def step(_: int, x: jax.Array) -> jax.Array:
        s = total(jnp.einsum(gram, x, x))
        s = b * s + c * (s @ s)
        return a * x + jnp.einsum(apply, *((x, s) if long == 1 else (s, x)))

    return jax.lax.fori_loop(0, STEPS, step, x)


@dataclasses.dataclass(frozen=True)
class _Move:
    """Mesh axis `axis` lets go of dimension `old` and cuts `new` instead; None gathers."""

    axis: str
    old: int
    new: int | None

    def apply(self, x: jax.Array) -> jax.Array:
        if self.new is None:
            return jax.lax.all_gather(x, self.axis, axis=self.old, tiled=True)
        return jax.lax.all_to_all(x, self.axis, self.new, self.old, tiled=True)

    def undo(self, x: jax.Array) -> jax.Array:
        if self.new is None:
            size = x.shape[self.old] // _size(self.axis)
            start = jax.lax.axis_index(self.axis) * size
            return jax.lax.dynamic_slice_in_dim(x, start, size, self.old)
        return jax.lax.all_to_all(x, self.axis, self.old, self.new, tiled=True)


@dataclasses.dataclass(frozen=True)
class _Plan:
    """`moves` in order; then `long` is the longer side (1 or 2), cut over `summed`."""

    moves: tuple[_Move, ...]
    long: int
    summed: tuple[str, ...]


def _plan(
    shard: tuple[int, ...], whole: list[int], cuts: tuple[tuple[str, ...], tuple[str, ...]]
) -> _Plan:
    """For a shard `[N, in, out]` of matrices of size `whole` whose sides are cut over `cuts`."""
    held = list(shard)
    if whole[0] == whole[1]:  # either serves: the one that is cut need not move
        long = 1 if len(cuts[0]) > len(cuts[1]) else 2
    else:
        long = 1 if whole[0] > whole[1] else 2
    moves, summed = [], []
    for side in (1, 2):
        for axis in reversed(cuts[side - 1]):  # the innermost cut is joined first
            size = _size(axis)
            if held[0] % size == 0:
                new: int | None = 0
            elif side == long:
                summed.append(axis)
                continue
            else:
                new = long if held[long] % size == 0 else None
                if new is not None:
                    summed.append(axis)
            moves.append(_Move(axis, side, new))
            held[side] *= size
            if new is not None:
                held[new] //= size
    return _Plan(tuple(moves), long, tuple(summed))


def _split(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """The mesh axes of one entry of a `PartitionSpec` that have more than one device."""
    axes = entry if isinstance(entry, tuple) else () if entry is None else (entry,)
    return tuple(axis for axis in axes if _size(axis) > 1)


def _size(axis: str) -> int:
    return jax.sharding.get_abstract_mesh().shape[axis]
