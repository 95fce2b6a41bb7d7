"""AdamW, Muon, or Muon on each head? (K3R §2.5)

    python -m experiments.ablate --study=optimiser --config=mini --workdir=runs/optimiser

Each at its own best rate would be fairer: `--set optimiser.learning_rate=...` runs the study at
another one.

Lab note: not run yet beyond a few steps.
"""

from experiments.ablation.study import Study
from experiments.sweep import case

STUDY = Study(
    question="Which optimiser gives the lowest loss at one learning rate?",
    axis="optimiser",
    points=(
        *case("AdamW", "optimiser.kind=adamw"),
        *case("Muon", "optimiser.kind=muon", "optimiser.muon_per_head=false"),
        *case("Muon per head", "optimiser.kind=muon", "optimiser.muon_per_head=true"),
    ),
    reference="Muon per head",
)
