"""Muon's direction: matrices orthogonalised where they lie on the mesh.

Muon (Jordan et al., 2024) replaces the momentum M of a matrix by its nearest semi-orthogonal
matrix, approximately, by five Newton-Schulz steps. A parameter `[..., in, out]` holds many
matrices: its leading axes (layers, experts) count them, and under Muon per head (K3R §2.5) each of
the `ParamSpec.heads` blocks of columns is one, with a scale of its own.

No matrix need be gathered for it. Blocks of heads split over tensor and experts split over expert
are whole where they are. Where a mesh axis cuts the matrices, one of these takes their place:

1. The matrices are dealt out over that axis (an all-to-all there and back) if their number divides.
   Equal matrices of several parameters are dealt out together, so that it does, or nearly.
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
import numpy as np

from k3jax.params import ParamSpec
from k3jax.sharding import spec_of, under_mesh

MUON_RMS = 0.2  # root mean square of an update at rate 1, AdamW's typical one
STEPS, COEFFICIENTS = 5, (3.4445, -4.7750, 2.0315)
_EPS = 1e-20  # of the norm: matrices without gradient stay zero


def directions(momenta: list[jax.Array], specs: list[ParamSpec], per_head: bool) -> list[jax.Array]:
    """The updates at rate 1 of parameters `[..., in, out]`, in their dtypes and layouts.

    Each matrix has root mean square `MUON_RMS` if it has full rank: `0.2 sqrt(max(in, out)) O`, by
    the size of the block (Moonlight, arXiv 2502.16982, eq. 4). Products run at jax's default
    precision. Raises `ValueError` where heads do not divide over the mesh axes of the columns.
    """
    heads = [spec.heads if per_head else 1 for spec in specs]
    if not under_mesh():
        return [
            _of_shards(x, heads=(n,), cuts=((), ()))[0] for x, n in zip(momenta, heads, strict=True)
        ]
    found: list[jax.Array] = [*momenta]
    for kind, members in _alike(momenta, specs, heads).items():
        for batch in _batches(members, kind.devices):
            layouts = tuple(spec_of(momenta[i]) for i in batch)
            shards = functools.partial(
                _of_shards, heads=tuple(members[i].heads for i in batch), cuts=kind.cuts
            )
            run = jax.shard_map(shards, in_specs=layouts, out_specs=layouts, check_vma=False)
            for i, out in zip(batch, run(*(momenta[i] for i in batch)), strict=True):
                found[i] = out
    return found


@dataclasses.dataclass(frozen=True)
class _Kind:
    """Matrices of one size and dtype, whose two sides are cut over the mesh axes `cuts`."""

    shape: tuple[int, int]
    dtype: jnp.dtype
    cuts: tuple[tuple[str, ...], tuple[str, ...]]

    @property
    def devices(self) -> int:
        """How many devices have parts of one matrix."""
        return math.prod(map(_size, self.cuts[0] + self.cuts[1]))


@dataclasses.dataclass(frozen=True)
class _Member:
    """A parameter on one device: how many matrices, and heads among its columns."""

    count: int
    heads: int


def _alike(
    momenta: list[jax.Array], specs: list[ParamSpec], heads: list[int]
) -> dict[_Kind, dict[int, _Member]]:
    """The parameters of each kind, by their number."""
    kinds: dict[_Kind, dict[int, _Member]] = {}
    for i, (x, spec, n) in enumerate(zip(momenta, specs, heads, strict=True)):
        layout = spec_of(x)
        rows, columns = _split(layout[-2]), _split(layout[-1])
        held = jax.typeof(x).sharding.shard_shape(x.shape)
        if n > 1:
            parts = math.prod(map(_size, columns))
            if n % parts:
                raise ValueError(f"{spec.hf_name}: {n} heads must divide over {', '.join(columns)}")
            n_here, columns = n // parts, ()
        else:
            n_here = 1
        kind = _Kind((x.shape[-2], x.shape[-1] // n), x.dtype, (rows, columns))
        member = _Member(math.prod(held[:-2]) * n_here, n_here)
        kinds.setdefault(kind, {})[i] = member
    return kinds


def _batches(members: dict[int, _Member], devices: int) -> list[list[int]]:
    """Which parameters are dealt out together: alone where they divide, else one matrix a device.

    A batch is full when one more parameter would be a second round; the last may be small.
    """
    batches: list[list[int]] = []
    rest: list[int] = []
    count = 0
    for i, member in members.items():
        if member.count % devices == 0:
            batches.append([i])
            continue
        if 2 * count >= devices and count + member.count > devices:
            batches.append(rest)
            rest, count = [], 0
        rest.append(i)
        count += member.count
    return batches + ([rest] if rest else [])


def _of_shards(
    *xs: jax.Array, heads: tuple[int, ...], cuts: tuple[tuple[str, ...], tuple[str, ...]]
) -> tuple[jax.Array, ...]:
    """`directions` of this device's shards, whose equal matrices are cut over `cuts`."""
    parts = [_blocks(x, n) for x, n in zip(xs, heads, strict=True)]
    blocks = jnp.concatenate(parts) if len(parts) > 1 else parts[0]
    if not blocks.size:
        return xs
    count, devices = len(blocks), math.prod(map(_size, cuts[0] + cuts[1]))
    if 2 * count >= devices:  # else most devices would idle
        blocks = jnp.pad(blocks, ((0, -count % devices), (0, 0), (0, 0)))
    whole = [blocks.shape[1 + i] * math.prod(map(_size, cuts[i])) for i in (0, 1)]
    plan = _plan(blocks.shape, whole, cuts)
    for move in plan.moves:
        blocks = move.apply(blocks)
    out = newton_schulz(blocks, plan.long, plan.summed) * (MUON_RMS * math.sqrt(max(whole)))
    for move in reversed(plan.moves):
        out = move.undo(out)
    ends = np.cumsum([len(part) for part in parts])
    pieces = jnp.split(out[:count], ends[:-1])
    return tuple(_joined(piece, x, n) for piece, x, n in zip(pieces, xs, heads, strict=True))


def _blocks(x: jax.Array, heads: int) -> jax.Array:
    """`[..., in, heads * D]` as `[N, in, D]`."""
    *lead, height, width = x.shape
    x = x.reshape(math.prod(lead), height, heads, width // heads).swapaxes(1, 2)
    return x.reshape(math.prod(lead) * heads, height, width // heads)


def _joined(blocks: jax.Array, like: jax.Array, heads: int) -> jax.Array:
    """The inverse of `_blocks`, in the shape of `like`."""
    _, height, width = blocks.shape
    return blocks.reshape(-1, heads, height, width).swapaxes(1, 2).reshape(like.shape)


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
