"""Does the saturating SiTU cost anything against SwiGLU? (K3R eq. 12)

    python -m experiments.ablate --study=activation --config=mini --workdir=runs/activation

Lab note: not run yet beyond a few steps.
"""

from experiments.ablation.study import Study
from experiments.sweep import over

STUDY = Study(
    question="Which activation gives the lower loss?",
    axis="activation",
    points=over("model.ffn.activation", ["swiglu", "situ"]),
    reference="situ",
)
