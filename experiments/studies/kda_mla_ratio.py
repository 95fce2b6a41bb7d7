"""How many KDA layers for each layer of full attention? (KLR Table 1, 16 layers)

    python -m experiments.ablate --study=kda_mla_ratio --config=mini --workdir=runs/ratio

The Kimi Linear report has validation perplexities of 5.65 at 3:1, 5.66 at 1:1, 5.70 at 7:1, 5.77
without KDA and 5.82 at 15:1.

Lab note: not run yet beyond a few steps.
"""

from experiments.ablation.study import Study
from experiments.sweep import over

STUDY = Study(
    question="Which ratio of KDA to full-attention layers gives the lowest loss at equal size?",
    axis="KDA : MLA",
    points=over("model.kda_to_full", ["0:1", "1:1", "3:1", "7:1", "15:1", "1:0"]),
    reference="3:1",
    base=("model.layers=16",),
    equal="parameters",
)
