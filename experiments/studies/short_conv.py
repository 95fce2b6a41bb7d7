"""Are the short convolutions on q, k and v needed, and how wide? (KLR Table 1)

    python -m experiments.ablate --study=short_conv --config=mini --workdir=runs/short_conv

The Kimi Linear report has validation perplexities of 5.65 with them (4 taps) and 5.70 without.

Lab note: not run yet beyond a few steps.
"""

from experiments.ablation.study import Study
from experiments.sweep import over

STUDY = Study(
    question="How many taps should the short convolutions have?",
    axis="taps",
    points=over("model.kda.conv_width", [0, 2, 4, 8]),
    reference="4",
)
