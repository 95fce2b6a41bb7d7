"""The mixture of experts and its balancing on eight devices equal those on one.

Run as a program, this file does the comparison: fake devices must be asked for before jax starts.
"""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from k3jax.config import MeshConfig, ModelConfig, MoEConfig
from k3jax.layers.balancing import update_balancing
from k3jax.layers.latent_moe import LatentMoE
from k3jax.layers.stats import reduce_stats
from k3jax.params import BalancingState, partition_specs
from k3jax.sharding import activation_spec, make_mesh
from tests.multi_device.eight_devices import run_on_eight_devices

ROWS, TOKENS, D = 8, 6, 16
MESHES = [
    (MeshConfig(data=2, fsdp=4), "histogram"),
    (MeshConfig(data=2, expert=2, tensor=2), "quantile"),
    (MeshConfig(fsdp=2, expert=2, context=2), "histogram"),
]


def moe_step(config, layout=None):
    """Outputs, gradients, balancing state and counts after one step of two micro-batches."""
    graphdef, state = nnx.split(LatentMoE(config, rngs=None))
    rng = np.random.default_rng(0)

    def place(value, spec):
        return jnp.asarray(value) if layout is None else jax.sharding.reshard(value, spec)

    def draw(shape, spec):
        return place(jnp.asarray(rng.normal(0, 0.3, shape.shape), shape.dtype), spec)

    state = jax.tree.map(draw, state, partition_specs(state))
    params, balancing = nnx.split_state(state, nnx.Param, BalancingState)
    x = rng.normal(size=(2, ROWS, TOKENS, D)).astype(np.float32)
    ids = rng.integers(0, 2, (2, ROWS, TOKENS)).astype(np.int32)

    def loss(params, x, ids):
        layer = nnx.merge(graphdef, params, balancing)
        y, _, stats = layer(x, documents=SimpleNamespace(real=ids > 0))
        return jnp.sum(jnp.square(y)), (y, stats)

    @jax.jit
    def step(parts):
        outs = [jax.grad(loss, argnums=(0, 1), has_aux=True)(params, *part) for part in parts]
        stats = jax.tree.map(lambda *leaves: jnp.stack(leaves), *(stats for _, (_, stats) in outs))
        stats = reduce_stats(stats)
        new = update_balancing(balancing, stats, config.moe)
        counts = stats["router"]["load"], stats["router"]["tokens"], stats["dropped_routes"]
        return [(grads, y) for grads, (y, _) in outs], new, counts

    parts = [
        (
            place(jnp.asarray(x[i]), activation_spec(3)),
            place(jnp.asarray(ids[i]), activation_spec(2)),
        )
        for i in range(2)
    ]
    return step(parts)


def main():
    for mesh, rule in MESHES:
        moe = MoEConfig(experts=4, top_k=2, expert_width=8, latent_width=8, balancing=rule, bins=64)
        config = ModelConfig(d_model=D, moe=moe)
        one = moe_step(config)
        with jax.set_mesh(make_mesh(mesh)):
            eight = moe_step(config, mesh)
        for want, got in zip(jax.tree.leaves(one), jax.tree.leaves(eight), strict=True):
            want, got = np.asarray(want, np.float64), np.asarray(got, np.float64)
            error = np.sqrt(np.mean((got - want) ** 2)) / (np.sqrt(np.mean(want**2)) or 1.0)
            assert error < 1e-5, (mesh, rule, want.shape, error)
    print(len(jax.devices()), "devices agree")


def test_eight_devices_equal_one():
    run_on_eight_devices("tests.multi_device.test_latent_moe_mesh")


if __name__ == "__main__":
    main()
