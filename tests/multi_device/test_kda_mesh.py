"""The TPU kernels (in interpret mode) on eight devices, heads and rows apart, equal `recurrent`.

Run as a program, this file does the comparison: fake devices must be asked for before jax starts.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from k3jax.parallel.local import local
from pallas_kernels.kda import kda
from pallas_kernels.kda.tolerances import TOLERANCES, relative_rms
from tests.multi_device.eight_devices import run_on_eight_devices

B, T, H, HV, D, N = 4, 70, 4, 8, 8, 3
OPTIONS = {
    "gate_form": "bounded", "beta_form": "logit", "max_documents": N, "return_final_state": True,
}  # fmt: skip


def loss(x, call):
    o, state = call(x)
    return (o * jnp.cos(o)).sum() + (state**2).sum()


def main():
    r = np.random.default_rng(0)
    shapes = {
        "q": (B, T, H, D), "k": (B, T, H, D), "v": (B, T, HV, D), "gate": (B, T, HV, D),
        "beta": (B, T, HV), "initial_state": (B, N, HV, D, D), "a_log": (HV,), "dt_bias": (HV, D),
    }  # fmt: skip
    x = {n: jnp.float32(r.normal(size=s)) for n, s in shapes.items()}
    ids = jnp.int32(np.sort(r.integers(0, N + 1, (B, T)), axis=1))
    whole = P("data", None, "heads")
    specs = dict.fromkeys(x, whole) | {"a_log": P("heads"), "dt_bias": P("heads")}

    def kernel(x, ids):
        return kda(**x, segment_ids=ids, **OPTIONS, implementation="mosaic_tpu")

    def reference(x):
        return kda(**x, segment_ids=ids, **OPTIONS, implementation="recurrent")

    expected = jax.jit(jax.grad(loss), static_argnums=1)(x, reference)
    with jax.set_mesh(jax.make_mesh((2, 4), ("data", "heads"))):
        placed = {n: jax.reshard(y, specs[n]) for n, y in x.items()}
        rows = jax.reshard(ids, P("data"))

        def mapped(x):
            return local(kernel, x, rows, out_specs=(whole, whole))

        grads = jax.jit(jax.grad(loss), static_argnums=1)(placed, mapped)
    for n, y in grads.items():
        assert relative_rms(y, expected[n]) < TOLERANCES["float32"]["d" + n], n
    print("8 devices agree")


@pytest.mark.full
def test_heads_and_rows_over_eight_devices():
    run_on_eight_devices("tests.multi_device.test_kda_mesh")


if __name__ == "__main__":
    main()
