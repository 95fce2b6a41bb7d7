"""The Hopper kernels without a GPU: what runs on the host, and every kernel as machine code.

tests/gpu holds them to the oracle on a card.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import dispatch
from pallas_kernels.kda import check, mosaic_gpu
from pallas_kernels.kda.mosaic_gpu import pieces, regions
from pallas_kernels.kda.mosaic_gpu.rows import by_rows
from tests.pallas_kernels import aot_gpu
from tests.pallas_kernels.kda_suite import rng, segment_ids
from tests.pallas_kernels.mosaic_gpu_programs import call, programs

DOCUMENTS = ((0, 3), (1, 50), (2, 100), (4, 7), (5, 64), (0, 9), (5, 1), (6, 1), (8, 30))


def spec_of(**options):
    _, (floats, _) = call(T=70)
    static = {"gate_form": "bounded", "beta_form": "logit", "lower_bound": -5.0, "scale": None}
    static |= {"qk_l2norm": True, "max_documents": 1, "return_final_state": True}
    floats = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), floats)
    spec, _ = check(**floats, segment_ids=None, **static)
    return dataclasses.replace(spec, **options)


@pytest.mark.parametrize("asked", [True, False])
def test_regions_cover_each_token_once(asked):
    rows = [np.roll(segment_ids(300, DOCUMENTS), shift) for shift in range(3)]
    rows.append(np.zeros(300, np.int32))
    ids = np.stack(rows)
    slots = 6  # documents 7 and 8 own none
    count = slots + 1 if asked else 1
    chunks = regions.chunk_count(300, count)
    tables = jax.tree.map(np.asarray, regions.tabulate(jnp.asarray(ids), count, chunks))
    for b, row in enumerate(ids):
        live = np.maximum(np.maximum.accumulate(row), 1)
        seen = np.zeros(300, int)
        used = 0
        for r in range(count):
            begin, n, first, tokens = tables.spans[b, :, r]
            assert begin == used and n == max(1, -(-tokens // 64))
            used += n
            # A region holds one document, save where none has states of its own.
            documents = set(np.minimum(live[first : first + tokens], count)) if asked else set()
            assert documents <= {r + 1}
            for i in range(n):
                start, size, entry, leave, whole = tables.chunks[b, :, begin + i]
                assert start == first + 64 * i and size == np.clip(tokens - 64 * i, 0, 64)
                seen[start : start + size] += 1
                place = np.arange(size) + 64 * (begin + i)
                np.testing.assert_array_equal(tables.places[b, start : start + size], place)
                np.testing.assert_array_equal(tables.sources[b, place], start + np.arange(size))
                own = row[start : start + size]
                of_one = size == 64 and (own == own[0]).all() and own[0] == entry == leave
                assert whole == of_one
                keeps = np.zeros(64)
                keeps[:size] = -(own > 0).astype(int)
                np.testing.assert_array_equal(tables.keeps[b].reshape(-1, 64)[begin + i], keeps)
                if size:
                    assert leave == live[start + size - 1]
                    assert entry == live[start if i == 0 else start - 1]
                    labels = np.where(row > 0, live, -live)[start : start + size]
                    np.testing.assert_array_equal(tables.labels[b, place], labels)
        assert (seen == 1).all()
        assert (tables.chunks[b, 1, used:] == -1).all()


@pytest.mark.parametrize("packed", [True, False])
def test_places_and_back(packed):
    spec = spec_of(packed=packed, max_documents=8, value_heads=2)
    c = mosaic_gpu.describe(spec)
    ids = jnp.asarray(segment_ids(70, ((1, 20), (2, 45)))[None])
    tables = regions.tabulate(ids, c.regions, c.chunks) if packed else regions.empty(c)
    x = jnp.asarray(rng("places").normal(size=(2, 70)))
    placed = regions.by_place(c, tables, x)
    assert placed.shape == (2, c.length)
    np.testing.assert_array_equal(regions.by_token(c, tables, placed), x)


class Device:
    """What `refuses` asks of a device."""

    def __init__(self, kind, capability=None):
        self.device_kind = kind
        if capability:
            self.compute_capability = capability


@pytest.mark.parametrize(
    ("device", "taken"),
    [
        (Device("NVIDIA H200"), True),  # ahead of time only the kind is known
        (Device("NVIDIA H200", "9.0"), True),
        (Device("NVIDIA GH200 480GB", "9.0"), True),
        (Device("NVIDIA A100-SXM4-80GB"), False),
        (Device("NVIDIA A100-SXM4-80GB", "8.0"), False),
        (Device("NVIDIA B200", "10.0"), False),
        (Device("AMD Instinct MI300X", "gfx942"), False),
        (Device("cpu"), False),
    ],
)
def test_hopper_takes_it_and_others_get_triton(device, taken, monkeypatch):
    monkeypatch.setattr(jax, "local_devices", lambda: [device])
    monkeypatch.setattr(dispatch, "current_platform", lambda: "gpu")
    reason = mosaic_gpu.refuses(spec_of(), "gpu")
    assert reason is None if taken else device.device_kind in reason
    assert (dispatch.choose("kda", spec_of(), None) is mosaic_gpu) == taken


def test_refusals_name_the_argument(monkeypatch):
    assert "platform is cpu" in mosaic_gpu.refuses(spec_of(), "cpu")
    monkeypatch.setattr(jax, "local_devices", lambda: [Device("NVIDIA H200", "9.0")])
    for change, words in (
        ({"q_dtype": "float32"}, "q is float32"),
        ({"gate_dtype": "float16"}, "gate is float16"),
        ({"gate_width": 0}, "gate is None"),
        ({"key_width": 256}, "K = 256"),
        ({"value_width": 129}, "V = 129"),
        ({"dtype": "float64"}, "float64"),
    ):
        assert words in mosaic_gpu.refuses(spec_of(**change), "gpu")


@pytest.mark.parametrize(
    ("rows", "chunks", "width", "expected"),
    [
        (8, 128, 128, 5),  # 8192 tokens of 8 heads
        (8, 127, 128, 5),
        (4, 1024, 128, 9),
        (1, 1024, 64, 16),
        (16, 1024, 128, 3),
        (32, 1024, 128, 1),
        (96, 128, 128, 1),  # as many rows as fill the card
        (8, 64, 128, 1),  # short ones
        (8, 1, 128, 1),
    ],
)
def test_pieces_follow_from_shapes(rows, chunks, width, expected):
    count = pieces.count(rows, chunks, width)
    assert count == expected
    most = -(-chunks // count)
    assert most * (count - 1) < chunks <= most * count
    assert 2 * rows * (width // 64) * (count - 1) <= pieces.PROGRAMS


@pytest.mark.parametrize("gradient", [False, True])
def test_a_call_with_and_without_gradient_is_traced(gradient):
    function, (floats, ids) = call(T=70, gradient=gradient, gate_form="softplus")
    out = jax.eval_shape(function, floats, ids)
    o, state = out[0] if gradient else out
    assert o.shape == floats["v"].shape and state.shape == floats["initial_state"].shape


def test_rows_are_folded_under_vmap():
    """What `by_rows` hands on is one call with more rows, or one call after another."""
    batches = []

    @by_rows
    def scaled(c, options, shared, rows):
        batches.append(c.batch)
        return rows["x"] * shared + jnp.arange(c.batch) * 0, rows["x"].reshape(c.batch, 1)

    c = mosaic_gpu.describe(spec_of(batch=2))
    x = jnp.arange(6.0).reshape(3, 2)

    def run(shared, x):
        return scaled(c, (), shared, {"x": x})

    out, column = jax.vmap(run, (None, 0))(2.0, x)
    np.testing.assert_array_equal(out, 2 * x)
    assert column.shape == (3, 2, 1) and batches[-1] == 6
    out, _ = jax.vmap(run)(jnp.arange(3.0), x)
    np.testing.assert_array_equal(out, np.arange(3)[:, None] * x)
    assert batches[-1] == 2


@pytest.fixture(scope="module")
def compiled():
    return aot_gpu.reports("tests.pallas_kernels.mosaic_gpu_programs", tuple(programs()))


# `gradients` holds 128 registers a thread, and ptxas does not fit all variants into them; packed
# rows of `prepare` keep a few values through their loop over chunks. These are figures to bring
# down: NOTES.md says what they cost.
SPILLS = {
    "kda_gradients_bounded": 256,
    "kda_gradients_exact": 448,
    "kda_prepare_bounded": 48,
    "kda_prepare_exact": 96,
}


@pytest.mark.full
@pytest.mark.parametrize("name", programs())
def test_machine_code(compiled, name):
    kernels = compiled[name]
    count = 2 if "forward" in name else 6 if "cut" in name else 4
    assert len(kernels) == count, kernels
    for report in kernels:
        assert not report["serialised"], report
        assert report["registers"], report
        assert report["spilled"] <= SPILLS.get(report["kernel"], 0), report
