"""The benchmark of KDA: its calls, its floor, its refusals, and one run of the TPU backend."""

import json

import jax
import numpy as np
import pytest
from absl import flags
from absl.testing import flagsaver

from experiments import bench_kda
from experiments.bench import gpu, gpu_checks, kda_cases
from experiments.bench.kda_cases import WIDTH, Call
from experiments.program import main
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
        with flagsaver.flagsaver(**{"implementation": ["chunked"], **values}):
            return main(bench_kda.run, ["bench_kda"]), *capsys.readouterr()

    return run


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"shape": ["1,2"]}, "--shape = '1,2': must be B,T,H, such as 1,8192,32"),
        ({"shape": ["1,0,2"]}, "--shape = 1,0,2: must be B,T,H, each at least 1"),
        ({"documents": 9000}, "--documents = 9000: not in 0 (no packing) .. T = 8192"),
        ({"pass": ["sideways"]}, "--pass = sideways: must be of forward, backward"),
        ({"implementation": ["fast"]}, f"--implementation = 'fast': must be one of {NAMES}"),
        (
            {"implementation": ["chunked", "triton"]},
            "--implementation = chunked,triton: one at a time with --backend=tpu",
        ),
        ({"peers": ["jla"]}, "--peers and --checks: need --backend=gpu"),
        ({"backend": "gpu", "peers": ["x"]}, "--peers = x: must be of jla, fla"),
        (
            {"backend": "gpu", "checks": ["luck"]},
            "--checks = luck: must be of repeats, prefix, lengths",
        ),
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


def test_the_table_of_a_gpu():
    calls = gpu.table("softplus", ["forward", "backward"])
    assert len(calls) == len(set(calls)) == 14
    assert all(call.gate_form == "softplus" and call.final and not call.states for call in calls)
    packed = next(call for call in calls if call.lengths)
    ids = kda_cases.segment_ids(packed)
    assert ids.shape == (1, 8192)
    np.testing.assert_array_equal(np.bincount(ids[0])[1:], packed.lengths)
    with pytest.raises(ValueError, match=r"lengths = \(1, 2\): must be 2 that sum to 4"):
        Call(1, 4, 1, "bounded", 2, False, False, True, (1, 2))


def test_the_gpu_backend(program, tmp_path, monkeypatch):
    """On a CPU, by an implementation that runs there; one that does not says why."""
    monkeypatch.setattr(gpu, "GROUPS", 2)
    monkeypatch.setattr(gpu, "SECONDS", 0.0)
    out = tmp_path / "out.json"
    code, printed, errors = program(
        backend="gpu", shape=["2,20,3"], documents=2, json=str(out), peers=["jla"],
        implementation=["recurrent", "mosaic_gpu"],
    )  # fmt: skip
    assert code == 0, errors
    rows = json.loads(out.read_text())["rows"]
    ours = [row for row in rows if row["who"] == "recurrent"]
    refused = [row for row in rows if row["who"] == "mosaic_gpu"]
    assert [row["call"]["gradients"] for row in ours] == [False, True]
    names = {"o", "final_state"}
    assert set(ours[0]["errors"]) == names
    assert set(ours[1]["errors"]) == names | {f"d{n}" for n in gpu.NAMES[:-1]}
    for row in ours:
        assert row["low"] <= row["ms"] <= row["high"] and row["bytes"] > 0
        # In float32 within: outputs are rounded to bfloat16.
        assert all(error < 4e-3 for error in row["errors"].values()), row["errors"]
    assert all("platform is cpu" in row["refused"] for row in refused)
    assert printed.count("| 2, 20, 3 in 2 |") == len(rows)


def test_errors_are_of_the_heads_compared(monkeypatch):
    """An output that is wrong in one of them is seen, whichever output it is."""
    monkeypatch.setattr(gpu, "COMPARED", 2 * 2 * 20)
    call = Call(2, 20, 3, "bounded", 0, True, True)
    arrays = gpu.draw(call)
    expected = gpu.compile_oracle(call)(arrays)
    assert gpu.compared(call) == 2
    fn, _ = kda_cases.ours("recurrent", **gpu.settings(call))
    actual = gpu.by_name(jax.jit(fn)(*arrays), call)
    right = gpu.errors(call, actual, expected)
    assert set(right) == set(expected) == {"o", "final_state", *gpu.GRADIENTS}
    assert max(right.values()) < 4e-3
    for name, x in actual.items():
        wrong = gpu.errors(call, actual | {name: 1.1 * x}, expected)
        assert wrong[name] > 0.05, name


def test_properties_that_hold_on_a_gpu(monkeypatch):
    monkeypatch.setattr(gpu_checks, "RUNS", 2)
    monkeypatch.setattr(gpu_checks, "REPEATED", (1, 20, 2))
    monkeypatch.setattr(gpu_checks, "LENGTHS", (20,))
    assert gpu_checks.repeats("recurrent", "bounded") == "2 runs: equal bits"
    assert max(gpu_checks.lengths("recurrent", "bounded")["20"].values()) < 4e-3
