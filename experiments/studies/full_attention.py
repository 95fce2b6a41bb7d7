"""Which full attention goes best with KDA? (KLR §4, K3R §2.1.2)

    python -m experiments.ablate --study=full_attention --config=mini --workdir=runs/full_attention

Lab note: not run yet beyond a few steps.
"""

from experiments.ablation.study import Study
from experiments.sweep import case

STUDY = Study(
    question="Which full attention beside KDA gives the lowest loss at equal size?",
    axis="full attention",
    points=(
        *case("MLA", "model.full_attention=mla", "model.mla.output_gate=false"),
        *case("MLA, gated", "model.full_attention=mla", "model.mla.output_gate=true"),
        *case("GQA", "model.full_attention=gqa", "model.gqa.rope=false"),
        *case("GQA, RoPE", "model.full_attention=gqa", "model.gqa.rope=true"),
    ),
    reference="MLA, gated",
    equal="parameters",
)
