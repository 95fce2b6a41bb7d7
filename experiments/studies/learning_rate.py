"""Which peak learning rate, and how much does it matter?

    python -m experiments.ablate --study=learning_rate --config=nano --workdir=runs/learning_rate

All rates and seeds of a small model are one program. Other settings by `--set`, so that a design
can be given its own best rate before it is compared with another.

Lab note: not run yet beyond a few steps.
"""

from experiments.ablation.study import Study
from experiments.sweep import over

STUDY = Study(
    question="Which peak learning rate gives the lowest loss?",
    axis="learning rate",
    points=over("optimiser.learning_rate", ["1e-3", "2e-3", "4e-3", "8e-3"]),
    reference="4e-3",
)
