"""The program that measures the grouped matmul: its cases, its table, bad flags in one line."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl import flags
from absl.testing import flagsaver

from experiments import bench_experts
from experiments.bench import experts
from experiments.program import main
from pallas_kernels import dispatch

EXAMPLE = "65536,3584,3072,112"
NAMES = ", ".join((*dispatch.names("grouped_matmul"), *experts.PEERS))


@pytest.mark.parametrize("spread", experts.SPREADS)
def test_sizes_sum_to_the_rows(spread):
    sizes = experts.Call(1003, 8, 8, 7, spread).sizes()
    assert sizes.dtype == np.int32 and sizes.sum() == 1003 and len(sizes) == 7
    assert (sizes.max() - sizes.min() <= 1) == (spread == "even")


def test_ways_to_route_agree():
    scores = jax.random.uniform(jax.random.key(0), (50, 24))
    scores = scores.at[:, 3].set(scores[:, 7])  # ties go to the lower number
    chosen = experts.top_k(scores, 5)
    np.testing.assert_array_equal(experts.top_k_by_maxima(scores, 5), chosen)
    want = experts.order_by_argsorts(chosen, 24)
    for got, expected in zip(experts.order_by_keys(chosen, 24), want, strict=True):
        np.testing.assert_array_equal(got, expected)
    assert want[2].sum() == 250
    with pytest.raises(ValueError, match="indices: 250 routes to 16777217 experts do not fit"):
        experts.order_by_keys(chosen, (1 << 24) + 1)


def test_an_error_is_seen():
    call = experts.Call(60, 16, 8, 3, "zipf")
    rows, weights, cotangent, sizes = experts.draw(call, 1)
    product = experts.product_of("blocked", 3)
    out, pull = jax.vjp(lambda r, w: product(r, w, sizes), rows, weights)
    d_rows, d_weights = pull(cotangent)
    arrays = (rows, weights, cotangent)
    errors = experts.errors_of(call, arrays, (out, d_rows, d_weights))
    assert max(errors.values()) < experts.TOLERANCE
    last = jnp.flatnonzero(sizes)[-1]
    for part, found in {
        "out": (out.at[-1].multiply(1.5), d_rows, d_weights),
        "d_rows": (out, d_rows.at[0].set(0), d_weights),
        "d_weights": (out, d_rows, d_weights.at[last].multiply(1.1)),
    }.items():
        errors = experts.errors_of(call, arrays, found)
        assert [name for name, e in errors.items() if e > experts.TOLERANCE] == [part]


@pytest.fixture
def program(capsys):
    """A function that runs the program with flags; returns exit code, output and errors."""
    flags.FLAGS.mark_as_parsed()

    def run(**values):
        with flagsaver.flagsaver(**values):
            return main(bench_experts.run, ["bench_experts"]), *capsys.readouterr()

    return run


def test_a_table(program, tmp_path):
    out = tmp_path / "out.json"
    values = {"product": ["60,16,8,3"], "spread": ["zipf"], "repeats": 1, "routing": False}
    code, printed, errors = program(**values, who=["blocked", "jla"], json=str(out))
    assert code == 0, errors
    ours, peer = json.loads(out.read_text())["rows"]
    assert ours["both_ms"] > 0 and max(ours["errors"].values()) < experts.TOLERANCE
    assert "said" in peer and printed.count("| jla |") == 2


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"product": ["1,2,3"]},
            "--product = '1,2,3': must be N,K,M,G, such as 65536,3584,3072,112",
        ),
        (
            {"product": ["1,2,3,0"]},
            "--product = '1,2,3,0': must be N,K,M,G, such as 65536,3584,3072,112",
        ),
        ({"spread": ["odd"]}, "--spread = odd: must be of even, zipf"),
        ({"who": ["me"]}, f"--who = 'me': must be one of {NAMES}"),
        ({"repeats": 0}, "--repeats = 0: must be at least 1"),
    ],
)
def test_bad_flags_are_one_line(program, values, message):
    code, _, errors = program(**values)
    assert code == 2 and errors == f"error: {message}\n"
