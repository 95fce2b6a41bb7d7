"""A record of probes on eight devices equals that on one, in float64.

Run as a program, this file does the comparison: fake devices must be asked for before jax starts.
"""

import dataclasses

import jax
import numpy as np
import pytest

from k3jax.config import MeshConfig, ResidualConfig
from k3jax.params import partition_specs
from k3jax.sharding import BATCH, SEQUENCE, make_mesh
from k3jax.train.probes import Record, make_probes
from tests.multi_device.eight_devices import run_on_eight_devices
from tests.train.test_probes import MODEL, VOCAB, state_of

MICRO, ROWS, TOKENS = 2, 4, 8
CONFIG = dataclasses.replace(
    MODEL,
    vocab_size=VOCAB + 1,  # even
    layers=2,
    full_attention="mla",
    residual=ResidualConfig("attn_res_block", block_size=1),
)
MESHES = [MeshConfig(data=2, context=2, tensor=2), MeshConfig(fsdp=2, expert=2, context=2)]


def record_on(mesh: MeshConfig, seed: int, batch: dict[str, np.ndarray]) -> Record:
    with jax.set_mesh(make_mesh(mesh)):
        graphdef, state = state_of(CONFIG, seed)
        params, balancing = (
            jax.tree.map(jax.sharding.reshard, part, partition_specs(part))
            for part in (state.params, state.balancing)
        )
        spec = jax.P(None, BATCH, SEQUENCE)
        placed = {name: jax.device_put(x, spec) for name, x in batch.items()}
        state = dataclasses.replace(state, params=params, balancing=balancing)
        return make_probes(CONFIG, graphdef)(state, placed)


def main():
    jax.config.update("jax_enable_x64", True)
    seed = int(np.random.default_rng().integers(1 << 30))
    rng, shape = np.random.default_rng(seed), (MICRO, ROWS, TOKENS)
    ids = np.sort(rng.integers(0, 4, shape), axis=2).astype(np.int32)
    ids[0, 0] = [0, 0, 0, 0, 0, 0, 2, 2]  # one shard of padding alone
    ids[1, 1] = 0
    inputs, targets = rng.integers(0, VOCAB - 1, (2, *shape), dtype=np.int32)
    weights = (ids > 0).astype(np.float64)
    batch = {"inputs": inputs, "targets": targets, "weights": weights, "segment_ids": ids}
    one = record_on(MeshConfig(), seed, batch)
    for mesh in MESHES:
        many = record_on(mesh, seed, batch)
        assert one.keys() == many.keys()
        for name, want in one.items():
            if want.dtype.kind == "U":
                assert (want == many[name]).all(), name
                continue
            there = np.isfinite(want)
            assert there.any() and (there == np.isfinite(many[name])).all(), (name, seed)
            error, got = many[name][there] - want[there], want[there]
            assert np.linalg.norm(error) <= 1e-6 * np.linalg.norm(got), (name, mesh, seed)
    print(len(jax.devices()), "devices agree")


@pytest.mark.full
def test_eight_devices_equal_one():
    run_on_eight_devices("tests.multi_device.test_probes_mesh")


if __name__ == "__main__":
    main()
