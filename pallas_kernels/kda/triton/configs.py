"""Tile sizes, warps and dtypes of a call: a table keyed by its shape, and no tuning at run time."""

import dataclasses
import functools
from typing import Any

from ..spec import Spec
from .launch import Target

_HALF = ("bfloat16", "float16")


def in_half(spec: Spec) -> bool:
    """Whether products have operands of half precision: if q, k and v all are held in it."""
    return all(t in _HALF for t in (spec.q_dtype, spec.k_dtype, spec.v_dtype))


def padded(width: int) -> int:
    """The power of two, at least 16, that a tile of a width takes."""
    return max(16, 1 << (width - 1).bit_length())


@dataclasses.dataclass(frozen=True)
class Tuning:
    """Warps per program and stages of its loads' pipeline."""

    warps: int
    stages: int


@dataclasses.dataclass(frozen=True)
class Config:
    """KP, VP: padded widths. BK: channels that `key_gradients` takes at a time, BK_prepare those
    of `prepare`; BV_keys, BV_values: columns that `key_gradients` and `value_gradients` do.
    columns: those of a program of a scan, which share a unit. dtype: of products' operands, in
    units of powers of two if scaled; pair, solve: of those of pairs and of the inverse; gradient:
    of dV on its way, and of the sums of gradients."""

    KP: int
    VP: int
    BK: int
    BK_prepare: int
    BV_keys: int
    BV_values: int
    columns: int
    dtype: str
    scaled: bool
    pair: str
    solve: str
    gradient: str
    precision: str
    prepare: Tuning
    scan: Tuning
    values: Tuning
    keys: Tuning


@functools.cache
def config_of(spec: Spec, documents: int, target: Target) -> Config:
    """The configuration of a call, whose rows hold so many documents with a state, on a target."""
    KP, VP = padded(spec.key_width), padded(spec.value_width)
    half = in_half(spec)
    size = 2 if half else 4
    # Normalised keys and queries are at most 1, and so is the inverse where beta is: float16 has
    # three bits more for them than bfloat16, and for all else in units (`scan.py`).
    narrow = "float16" if spec.qk_l2norm else "bfloat16"
    small = spec.qk_l2norm and spec.beta_form == "logit"
    large = target.shared > 200 * 1024
    columns = _columns(spec.batch * spec.value_heads * documents, VP, _widest(KP, half, target))
    # Shared memory of a scan: the operands of a chunk for each stage, and two tiles of a program's.
    stages = (target.shared - size * 128 * columns) // (size * 64 * (3 * KP + 64 + columns))
    # A wavefront of AMD's has twice the threads of a warp.
    many = not target.amd and (columns == 128 or KP > 128 or not half)
    deep = half and target.shared > 96 * 1024
    return Config(
        KP=KP,
        VP=VP,
        BK=min(KP, 32 if target.amd or (half and large) else 16),
        BK_prepare=min(KP, 64 if half and large else 32),
        # Triton 3.6 fails to lay out more of them in Blackwell's tensor memory.
        BV_keys=min(columns, 64 if target.capability == "9.0" else 32),
        BV_values=min(columns, 32),
        columns=columns,
        dtype=narrow if half else "float32",
        scaled=half and spec.qk_l2norm,
        pair=narrow if half else "float32",
        solve="float16" if half and small else "float32",
        gradient="bfloat16" if half else "float32",
        precision=target.precision,
        prepare=Tuning(4, 3 if deep else 1),
        scan=Tuning(8 if many else 4, max(1, min(3, stages))),
        values=Tuning(4, 3 if deep else 1),
        keys=Tuning(4, 3 if deep else 1),
    )


# Programs of a scan that fill a card: with fewer it idles, with more the operands of a chunk are
# read more often.
_ENOUGH = 90


def _widest(KP: int, half: bool, target: Target) -> int:
    """Columns of a state that a program's registers hold beside the operands of a chunk."""
    if not half:
        return 16
    if KP > 128:
        return 32
    if target.amd:
        return 64
    return 128 if target.shared > 200 * 1024 else 32


def _columns(heads: int, VP: int, widest: int) -> int:
    """Columns of a scan: as many as leave enough programs, for so many heads of documents."""
    columns = min(VP, widest)
    while columns > 32 and heads * (VP // columns) < _ENOUGH:
        columns //= 2
    return columns


def triton_dtype(name: str) -> Any:
    import triton.language as tl

    return getattr(tl, name)
