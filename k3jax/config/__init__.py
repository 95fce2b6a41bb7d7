"""Every setting of an experiment, as frozen dataclasses.

A configuration is data: it holds sizes, names and rates, builds nothing and imports nothing of
this project, so that cost models, flags, checkpoints and tests can all read it. Each class checks
its own values on construction; a wrong one raises `ValueError` with one line that names the
setting, its value and what is allowed.
"""

from k3jax.config.experiment import (
    DataConfig,
    ExperimentConfig,
    MeshConfig,
    OptimiserConfig,
    OptimiserRule,
    Schedule,
    Stage,
    TrainConfig,
)
from k3jax.config.model import (
    Activation,
    Balancing,
    DType,
    FeedForwardConfig,
    FullAttention,
    GateForm,
    GQAConfig,
    KDAConfig,
    MixerKind,
    MixerRule,
    MLAConfig,
    ModelConfig,
    MoEConfig,
    OutputGate,
    Remat,
    Residual,
    ResidualConfig,
    Transport,
    parse_ratio,
)

__all__ = [
    "Activation",
    "Balancing",
    "DType",
    "DataConfig",
    "ExperimentConfig",
    "FeedForwardConfig",
    "FullAttention",
    "GQAConfig",
    "GateForm",
    "KDAConfig",
    "MLAConfig",
    "MeshConfig",
    "MixerKind",
    "MixerRule",
    "MoEConfig",
    "ModelConfig",
    "OptimiserConfig",
    "OptimiserRule",
    "OutputGate",
    "Remat",
    "Residual",
    "ResidualConfig",
    "Schedule",
    "Stage",
    "TrainConfig",
    "Transport",
    "parse_ratio",
]
