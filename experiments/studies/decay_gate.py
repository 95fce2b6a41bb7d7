"""Does the bounded decay gate of K3 cost anything against Kimi Linear's softplus? (K3R §2.1.1)

    python -m experiments.ablate --study=decay_gate --config=mini --workdir=runs/decay_gate

Lab note: not run yet beyond a few steps.
"""

from experiments.ablation.study import Study
from experiments.sweep import over

STUDY = Study(
    question="Which form of the decay gate gives the lower loss?",
    axis="decay gate",
    points=over("model.kda.gate_form", ["softplus", "bounded"]),
    reference="bounded",
)
