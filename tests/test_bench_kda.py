"""The benchmark of KDA: its calls, its floor, its refusals, and one run of the TPU backend."""

import json

import jax
import numpy as np
import pytest
from absl import flags
from absl.testing import flagsaver

from experiments import bench_kda
from experiments.bench import kda_cases
from experiments.bench.kda_cases import WIDTH, Call
from pallas_kernels import dispatch
from pallas_kernels.kda import cost
from pallas_kernels.tpu_schedule import worker

NAMES = ", ".join(dispatch.names("kda"))
CALL = {"batch": 2, "tokens": 192, "heads": 3, "gate_form": "bounded", "states": False}


def test_documents_fill_the_row():
    call = Call(**CALL, documents=25, gradients=False)
    ids = kda_cases.segment_ids(call)
    assert ids.shape == (2, 192) and ids.dtype == np.int32
    for row in ids:
        assert row[0] == 1 and row[-1] == 25 and set(np.diff(row)) == {0, 1}
    assert not np.array_equal(ids[0], ids[1])
    assert np.array_equal(ids, kda_cases.segment_ids(call))
    whole = Call(**CALL, documents=192, gradients=False)
    assert (kda_cases.segment_ids(whole) == np.arange(1, 193)).all()
    assert kda_cases.segment_ids(Call(**CALL, documents=0, gradients=False)) is None


def test_the_floor_is_the_arguments_once():
    call = Call(**CALL, documents=0, gradients=False)
    spec = kda_cases.spec_of(call)
    assert (spec.batch, spec.tokens, spec.heads, spec.key_width) == (2, 192, 3, WIDTH)
    assert cost.forward(spec).bytes_accessed == call.token_heads * (5 * WIDTH + 1) * 2


@pytest.mark.parametrize("gate_form", ["bounded", "softplus", "log_decay"])
@pytest.mark.parametrize(("documents", "states"), [(0, False), (0, True), (5, True)])
def test_a_call_has_the_shapes_of_its_arguments(gate_form, documents, states):
    settings = {**CALL, "gate_form": gate_form, "documents": documents, "states": states}
    fn, args = kda_cases.ours("chunked", gradients=False, **settings)
    o, final = jax.eval_shape(fn, *args)
    assert o.shape == (2, 192, 3 * WIDTH) and o.dtype == "bfloat16"
    if states:
        assert final.shape == (2, documents or 1, 3, WIDTH, WIDTH)
    fn, args = kda_cases.ours("chunked", gradients=True, **settings)
    results, gradients = jax.eval_shape(fn, *args)
    assert results == args[-1] == (o, final)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), gradients) == jax.tree.map(
        lambda x: (x.shape, x.dtype), args[0]
    )


@pytest.fixture
def program(capsys):
    """A function that runs the program with flags; returns exit code, output and errors."""
    flags.FLAGS.mark_as_parsed()

    def run(**values):
        with flagsaver.flagsaver(**{"implementation": "chunked", **values}):
            return bench_kda.main(["bench_kda"]), *capsys.readouterr()

    return run


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"shape": ["1,2"]}, "--shape = '1,2': must be B,T,H, such as 1,8192,32"),
        ({"shape": ["1,0,2"]}, "--shape = 1,0,2: must be B,T,H, each at least 1"),
        ({"documents": 9000}, "--documents = 9000: not in 0 (no packing) .. T = 8192"),
        ({"pass": ["sideways"]}, "--pass = sideways: must be of forward, backward"),
        ({"implementation": "fast"}, f"--implementation = 'fast': must be one of {NAMES}"),
        ({"topology": "v9"}, "topology: 'v9' does not begin with one of v5e, v5p, v6e, tpu7x"),
    ],
)
def test_bad_flags_are_one_line(program, values, message):
    code, _, errors = program(**values)
    assert code == 2 and errors == f"error: {message}\n"


@pytest.mark.full
@pytest.mark.skipif(worker.missing() is not None, reason=f"{worker.missing()}")
def test_the_tpu_backend(program, tmp_path):
    out = tmp_path / "out.json"
    code, printed, errors = program(shape=["1,64,2"], documents=3, states=True, json=str(out))
    assert code == 0, errors
    found = json.loads(out.read_text())
    forward, backward = (row for row in found["rows"] if row["who"] == "chunked")
    assert forward["ms"] < backward["ms"] and backward["hbm_ratio"] > 0 < forward["hbm_ratio"]
    for row, result in zip(found["rows"], found["reports"], strict=True):
        assert row["ms"] == pytest.approx(sum(op["ms"] for op in result["ops"]))
    assert printed.count("\nchunked") == 2
