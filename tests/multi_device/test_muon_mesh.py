"""Muon on eight devices: the update of one device, and no matrix gathered on the way.

Run as a program, this file does the comparison: fake devices must be asked for before jax starts.
"""

import re

import jax
import numpy as np
from flax import nnx
from jax.nn import initializers

from k3jax.config import MeshConfig, OptimiserConfig
from k3jax.optim import make_optimiser, update
from k3jax.params import ParamSpec, declare, partition_specs
from k3jax.sharding import make_mesh
from tests.multi_device.eight_devices import run_on_eight_devices

CONFIG = OptimiserConfig(learning_rate=0.1, warmup_fraction=0)
STEPS = 10
SPECS = {  # shape, logical axes, heads
    "experts": ((2, 4, 16, 24), ("layers", "experts", "latent", "mlp"), 1),
    "heads": ((3, 16, 24), ("layers", "embed", "heads"), 4),
    "tall": ((3, 24, 16), ("layers", "heads", "embed"), 1),
    "tall_too": ((1, 2, 24, 16), ("layers", None, "heads", "embed"), 1),
    "wide": ((1, 16, 48), ("layers", "embed", "mlp"), 1),
    "square": ((16, 16), ("embed", None), 1),
    "odd": ((1, 24, 10), ("layers", "mlp", None), 1),
    "stuck": ((1, 16, 18), ("layers", "embed", None), 1),  # 18 columns cannot take over 8 cuts
    "table": ((24, 16), ("vocab", "embed"), 0),
}
MESHES = [
    MeshConfig(fsdp=8),
    MeshConfig(fsdp=2, expert=2, tensor=2),
    MeshConfig(fsdp=4, tensor=2),
]


class Parts(nnx.Module):
    def __init__(self):
        for name, (shape, axes, heads) in SPECS.items():
            rule = {"rule": "muon" if heads else "adamw", "decay": True, "heads": heads or 1}
            setattr(self, name, declare(ParamSpec(shape, axes, initializers.ones, **rule), None))


def run(mesh: MeshConfig, params: dict, grads: dict) -> tuple[list[np.ndarray], str]:
    """The parameters after `STEPS` steps, and the program of one of them."""
    state = nnx.state(Parts())
    optimiser = make_optimiser(CONFIG, STEPS, state)
    with jax.set_mesh(make_mesh(mesh)):

        def placed(values):
            leaves = [values[name] for name in state]
            tree = jax.tree.unflatten(jax.tree.structure(state), leaves)
            return jax.tree.map(jax.device_put, tree, partition_specs(state))

        params = placed(params)
        opt_state = jax.jit(optimiser.init)(params)
        step = jax.jit(lambda *args: update(optimiser, *args))
        compiled = step.lower(placed(grads[0]), opt_state, params).compile()
        for grad in grads:
            params, opt_state = compiled(placed(grad), opt_state, params)
        assert [leaf.sharding.spec for leaf in jax.tree.leaves(params)] == jax.tree.leaves(
            partition_specs(state)
        )
        return [np.asarray(leaf) for leaf in jax.tree.leaves(params)], compiled.as_text()


def moved(program: str, operation: str) -> list[int]:
    """Elements of each result of `operation` in a compiled program."""
    results = re.findall(rf"= (.*?) {operation}(?:-start)?\(", program)
    sizes = [re.findall(r"f64\[([\d,]*)\]", result) for result in results]
    return [sum(int(np.prod([int(n) for n in s.split(",") if n])) for s in r) for r in sizes]


def main():
    jax.config.update("jax_enable_x64", True)
    rng = np.random.default_rng()

    def draw():
        return {name: rng.normal(size=shape) for name, (shape, _, _) in SPECS.items()}

    params, grads = draw(), [draw() for _ in range(STEPS)]
    one, _ = run(MeshConfig(), params, grads)
    for mesh in MESHES:
        many, program = run(mesh, params, grads)
        for name, want, got in zip(sorted(SPECS), one, many, strict=True):
            error = np.sqrt(np.mean((got - want) ** 2) / np.mean(want**2))
            assert error < 1e-10, (mesh, name, error)
        stuck = [16 * 18] if mesh.fsdp > 2 else []
        assert moved(program, "all-gather") == stuck, mesh
        # Gram matrices of single matrices; the tall ones are dealt out, five over eight devices.
        assert "all-to-all" in program and max(moved(program, "all-reduce")) <= 16 * 16, mesh
    print(len(jax.devices()), "devices agree")


def test_eight_devices_equal_one():
    run_on_eight_devices("tests.multi_device.test_muon_mesh")


if __name__ == "__main__":
    main()
