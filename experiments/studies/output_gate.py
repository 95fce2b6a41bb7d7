"""Which output gate should a KDA layer have, and of which rank? (KLR Table 1, K3R eq. 6)

    python -m experiments.ablate --study=output_gate --config=mini --workdir=runs/output_gate

The Kimi Linear report has validation perplexities of 5.65 with a sigmoid gate of low rank, 5.67
without a gate and 5.81 with swish; K3 has a sigmoid of full rank.

Lab note: not run yet beyond a few steps.
"""

from experiments.ablation.study import Study
from experiments.sweep import case, chain, product

_FORMS = chain(
    case("sigmoid", "model.kda.output_gate=sigmoid"), case("swish", "model.kda.output_gate=swish")
)
_RANKS = chain(
    case("full rank", "model.kda.output_gate_rank=0"),
    case("low rank", "model.kda.output_gate_rank=32"),
)

STUDY = Study(
    question="Which output gate of the KDA layer gives the lowest loss at equal size?",
    axis="output gate",
    points=chain(case("none", "model.kda.output_gate=none"), product(_FORMS, _RANKS)),
    reference="sigmoid, full rank",
    equal="parameters",
)
