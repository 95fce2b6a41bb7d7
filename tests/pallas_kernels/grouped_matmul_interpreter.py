"""Runs the bodies of the grouped matmul's Hopper kernels on a CPU: `mosaic_gpu_interpreter` with
the words that these kernels use and KDA's do not."""

import contextlib
import itertools
import threading

import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.grouped_matmul import gradients
from pallas_kernels.grouped_matmul.mosaic_gpu import pipeline, products
from pallas_kernels.kda.mosaic_gpu import tiles
from tests.pallas_kernels.mosaic_gpu_interpreter import LAX, PL, PLGPU, TILES, _Words, here

PROGRAMS = 3
_lock = threading.Lock()


def _while(condition, body, carry):
    while bool(condition(carry)):
        carry = body(carry)
    return carry


def _draw(counter, drawn, slot):
    with _lock:
        drawn.base[int(slot)] = next(counter)


def _zero_rows(buffer, width, panel, panels, low, high):
    columns = slice(int(panel) * 64, (int(panel) + panels) * 64)
    value = np.array(buffer.read())
    assert value.shape == (64, width)
    row = np.arange(64)
    value[(row < int(low)) | (row >= int(high)), columns] = 0
    buffer.window((slice(None), pl.ds(columns.start, 64 * panels))).write(value[:, columns])


@contextlib.contextmanager
def interpreted():
    """Within it the kernels run here, eagerly, as three programs one after another."""
    counter = [itertools.count()]

    def kernel(body, **settings):
        counter[0] = itertools.count()
        return PLGPU["kernel"](body, **settings)

    words = {
        "plgpu": _Words(plgpu, {**PLGPU, "kernel": kernel}),
        "lax": _Words(
            lax,
            {
                **LAX,
                "while_loop": _while,
                "axis_size": lambda name: PROGRAMS,
                "axis_index": lambda name: here.group if name == "group" else here.program,
            },
        ),
        "pl": _Words(pl, {**PL, "get_global": lambda kind: counter[0]}),
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gradients, "_mappable", lambda product: product)
        for name in ("copy_rows", "read"):
            patch.setattr(tiles, name, TILES[name])
        patch.setattr(pipeline, "draw", _draw)
        patch.setattr(pipeline, "zero_rows", _zero_rows)
        patch.setattr(pipeline, "cores", lambda: PROGRAMS)
        for module in (pipeline, products):
            for name, value in words.items():
                patch.setattr(module, name, value)
        yield
