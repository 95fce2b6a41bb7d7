"""The decoder on eight devices equals that on one: loss and every gradient, in float64.

Run as a program, this file does the comparison: fake devices must be asked for before jax starts.
"""

import jax
import numpy as np
from flax import nnx

from k3jax.config import (
    FeedForwardConfig,
    KDAConfig,
    MeshConfig,
    MLAConfig,
    ModelConfig,
    MoEConfig,
    ResidualConfig,
)
from k3jax.layers.documents import documents_of
from k3jax.model import Decoder, next_token_loss
from k3jax.params import BalancingState, partition_specs
from k3jax.sharding import activation_spec, make_mesh
from tests.multi_device.eight_devices import run_on_eight_devices

ROWS, TOKENS = 8, 7
K3 = ModelConfig(
    vocab_size=32,
    d_model=16,
    layers=2,
    kda_to_full="1:1",
    kda=KDAConfig(heads=2, key_dim=4, value_dim=4, decay_rank=4),
    mla=MLAConfig(
        heads=2, q_lora_rank=8, kv_lora_rank=6, qk_nope_dim=4, qk_rope_dim=2, value_dim=4
    ),
    residual=ResidualConfig("attn_res_block", block_size=1),
    ffn=FeedForwardConfig(dense_width=8),
    moe=MoEConfig(experts=4, top_k=2, expert_width=8, latent_width=8, bins=16),
    dtype="float64",
)


def loss_and_gradients(mesh: MeshConfig) -> list[np.ndarray]:
    """Of one batch of packed rows with gaps, on the devices of `mesh`."""
    rng = np.random.default_rng(0)
    ids = np.sort(rng.integers(0, 4, (ROWS, TOKENS)), axis=1)
    ids[0] = [1, 0, 1, 2, 0, 0, 3]
    inputs, targets = rng.integers(0, K3.vocab_size, (2, ROWS, TOKENS))
    with jax.set_mesh(make_mesh(mesh)):
        graphdef, *states = nnx.split(Decoder(K3, rngs=None), nnx.Param, BalancingState)

        def draw(shape, spec):
            wide = np.float64 if shape.dtype == np.float32 else shape.dtype
            return jax.device_put(rng.normal(0, 0.4, shape.shape).astype(wide), spec)

        def place(rows):
            return jax.device_put(rows.astype(np.int32), activation_spec(2))

        params, balancing = (jax.tree.map(draw, s, partition_specs(s)) for s in states)

        def loss(params, inputs, targets, ids):
            model = nnx.merge(graphdef, params, balancing)
            hidden, _, _ = model.hidden(inputs, documents=documents_of(ids))
            return next_token_loss(model, hidden, targets, ids > 0)[0]

        out = jax.jit(jax.value_and_grad(loss))(params, *map(place, (inputs, targets, ids)))
        return [np.asarray(leaf) for leaf in jax.tree.leaves(out)]


def main():
    jax.config.update("jax_enable_x64", True)
    one = loss_and_gradients(MeshConfig())
    eight = loss_and_gradients(MeshConfig(data=2, fsdp=2, tensor=2))
    assert {leaf.dtype for leaf in one} == {np.dtype(np.float64)}
    for want, got in zip(one, eight, strict=True):
        error = np.sqrt(np.mean((got - want) ** 2)) / (np.sqrt(np.mean(want**2)) or 1.0)
        assert error < 1e-10, (want.shape, error)
    print(len(jax.devices()), "devices agree")


def test_eight_devices_equal_one():
    run_on_eight_devices("tests.multi_device.test_model_mesh")


if __name__ == "__main__":
    main()
