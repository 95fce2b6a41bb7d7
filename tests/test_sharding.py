"""Meshes that do not divide a model, and what a device holds of one that they do."""

import dataclasses

import jax
import pytest

from configs import CONFIGS
from k3jax.config import MeshConfig
from k3jax.flags import override
from k3jax.model import Decoder
from k3jax.sharding import Rules, abstract_mesh
from k3jax.train.describe import describe
from k3jax.train.loop import decoder_blueprint
from k3jax.train.state import bytes_per_device

SIZES = ["model.vocab_size=258", "data.batch_size=12", "data.sequence_length=96"]
CONFIG = override(CONFIGS["nano"](), SIZES)


@pytest.mark.parametrize(
    ("mesh", "settings", "message"),
    [
        (
            {"fsdp": 3},
            [],
            "mesh.fsdp = 3: does not divide axis 'embed' of blocks/0/layers/0/ffn/down, ",
        ),
        (
            {"tensor": 2},
            ["model.vocab_size=257"],
            "mesh.tensor = 2: does not divide axis 'vocab' of",
        ),
        (
            {"expert": 3},
            [],
            "mesh.expert = 3: does not divide axis 'experts' of blocks/0/layers/1/",
        ),
        (
            {"tensor": 2},
            ["model.mla.heads=3", "model.mla.qk_nope_dim=16", "model.mla.value_dim=32"],
            "mesh.tensor = 2: does not divide the 3 heads of blocks/0/layers/3/mixer",
        ),
        (
            {"tensor": 2},
            ["model.full_attention=gqa", "model.gqa.kv_heads=1"],
            "mesh.tensor = 2: does not divide the 1 kv_heads of blocks/0/layers/3/mixer",
        ),
    ],
)
def test_a_mesh_that_does_not_divide_the_model_is_told_in_one_line(mesh, settings, message):
    config = override(CONFIG, settings)
    with (
        jax.sharding.use_abstract_mesh(abstract_mesh(MeshConfig(**mesh))),
        pytest.raises(ValueError, match=message) as caught,
    ):
        Decoder(config.model, rngs=None)
    assert "\n" not in str(caught.value)


def test_two_axes_over_one_mesh_axis_are_refused():
    with pytest.raises(ValueError, match="two of them map to one mesh axis"):
        Rules(mlp="fsdp").spec(("embed", "mlp"))


def test_a_dry_run_tells_what_each_device_holds():
    mesh = MeshConfig(fsdp=2, context=3, tensor=2)
    config = dataclasses.replace(CONFIG, mesh=mesh)
    lines = describe(config).splitlines()
    (row,) = [line.split() for line in lines if line.startswith("embedding ")]
    assert row[-4:] == ["132,096", "tensor,", "fsdp", "33,024"]
    (query,) = [line.split() for line in lines if line.startswith("residual/query")]
    assert query[-1] == "512"
    with jax.sharding.use_abstract_mesh(abstract_mesh(mesh)):
        state = decoder_blueprint(config).abstract()
    learned, optimiser = map(bytes_per_device, ((state.params, state.balancing), state.opt_state))
    summary = f"of 12: {learned:,} of parameters, {optimiser:,} of optimiser state"
    assert sum(summary in line for line in lines) == 1
    whole = bytes_per_device(decoder_blueprint(config).abstract().params)
    assert whole / 4 < learned < whole / 2  # gains and vectors are whole everywhere
