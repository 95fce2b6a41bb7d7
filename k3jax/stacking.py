"""Which layers are equal, and how they are stacked so that one traced body serves them all.

A decoder is cut into units: the blocks of block attention residuals, else single layers. Runs of
equal unit sequences become one `Segment` whose super-block is traced once and scanned. Kimi K3's 93
layers are three segments: the first block (its first layer is dense), six equal ones, a short last.
"""

from __future__ import annotations

import dataclasses
import functools

import numpy as np

from k3jax.config import MixerKind, ModelConfig


@dataclasses.dataclass(frozen=True)
class LayerKind:
    """What distinguishes one layer's code from another's."""

    mixer: MixerKind
    moe: bool
    starts_block: bool  # the running sum is stored before this layer (block attention residuals)


@dataclasses.dataclass(frozen=True)
class Segment:
    """`repeats` equal super-blocks in a row, from layer `first` on; `pattern` is one of them."""

    pattern: tuple[LayerKind, ...]
    repeats: int
    first: int

    def layer(self, repeat: int, place: int) -> int:
        """The index in the decoder of the layer at `place` of super-block `repeat`."""
        return self.first + repeat * len(self.pattern) + place


def layer_kinds(config: ModelConfig) -> tuple[LayerKind, ...]:
    """The kind of each layer."""
    blocked, size = config.residual.kind == "attn_res_block", config.residual.block_size
    return tuple(
        LayerKind(mixer, config.is_moe(i), blocked and i % size == 0)
        for i, mixer in enumerate(config.mixer_kinds())
    )


def segments(config: ModelConfig) -> tuple[Segment, ...]:
    """The decoder as segments, chosen so that the fewest layers are traced."""
    kinds = layer_kinds(config)
    size = config.residual.block_size if config.residual.kind == "attn_res_block" else 1
    units = tuple(kinds[i : i + size] for i in range(0, len(kinds), size))
    return tuple(
        Segment(sum(units[start : start + period], ()), repeats, start * size)
        for start, period, repeats in _cover(units)
    )


def by_layer(
    config: ModelConfig, stacked: dict[str, np.ndarray]
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """What a decoder's stacked layers have, row by row; and what stands outside of them, as it is.

    `stacked` is keyed by path: `blocks/0/layers/1/mixer/x` has a leading axis, one entry for each
    super-block of segment 0. The first result is keyed by what follows the place, `mixer/x`, with
    arrays `[layers, ...]` of float64: row i is the decoder's layer i, NaN where that has none.
    """
    rows: dict[str, np.ndarray] = {}
    outside: dict[str, np.ndarray] = {}
    parts = segments(config)
    for path, values in stacked.items():
        match path.split("/"):
            case ["blocks", number, "layers", place, *name]:
                empty = np.full((config.layers, *values.shape[1:]), np.nan)
                row = rows.setdefault("/".join(name), empty)
                for repeat, value in enumerate(values):
                    row[parts[int(number)].layer(repeat, int(place))] = value
            case _:
                outside[path] = values
    return rows, outside


def _cover(units: tuple[tuple[LayerKind, ...], ...]) -> list[tuple[int, int, int]]:
    """(start, period, repeats) of consecutive runs of `units` with the least traced layers."""

    @functools.cache
    def best(start: int) -> tuple[int, list[tuple[int, int, int]]]:
        if start == len(units):
            return 0, []
        options = []
        for period in range(1, len(units) - start + 1):
            pattern, repeats = units[start : start + period], 1
            while units[start + repeats * period : start + (repeats + 1) * period] == pattern:
                repeats += 1
            cost, rest = best(start + repeats * period)
            options.append((sum(map(len, pattern)) + cost, [(start, period, repeats), *rest]))
        return min(options, key=lambda option: (option[0], len(option[1])))

    return best(0)[1]


def stored_sources(config: ModelConfig) -> int:
    """How many sources the residual stream must hold beside the running sum."""
    if config.residual.kind == "attn_res_full":
        return 2 * config.layers
    return sum(kind.starts_block for kind in layer_kinds(config))
