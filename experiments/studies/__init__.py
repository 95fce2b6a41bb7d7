"""Studies, one a file: its docstring is the lab note (question, command, hardware, result)."""

import importlib

from experiments.ablation.study import Study

NAMES = (
    "kda_mla_ratio",
    "lineage",
    "decay_gate",
    "output_gate",
    "short_conv",
    "full_attention",
    "residual",
    "latent_width",
    "activation",
    "balancing",
    "optimiser",
    "learning_rate",
)


def load(name: str) -> Study:
    """The study of the module called `name`, one of `NAMES`."""
    return importlib.import_module(f"{__name__}.{name}").STUDY
