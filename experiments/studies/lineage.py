"""What does each step from linear attention to KDA buy? (KLR §5.1, Fig. 4)

    python -m experiments.ablate --study=lineage --config=nano --workdir=runs/lineage

Two layers of two heads of 128 without full attention, on recall over 256 tokens; other tasks and
lengths by `--set data.sources=task:palindrome --set data.sequence_length=1024`. In the report KDA
and Gated DeltaNet solve all three tasks at 256 tokens, and part at 1,024 and 2,048.

Lab note: not run yet beyond a few steps.
"""

from experiments.ablation.study import ACCURACY, Study
from experiments.sweep import case

STUDY = Study(
    question="Which rules of the KDA lineage can recall what a key was paired with?",
    axis="rule",
    points=(
        *case("linear attention", "model.kda.rule=linear"),
        *case("DeltaNet", "model.kda.rule=delta"),
        *case("Gated DeltaNet", "model.kda.rule=gated_delta"),
        *case("KDA", "model.kda.rule=kda"),
    ),
    reference="KDA",
    base=(
        "model.layers=2",
        "model.kda_to_full=1:0",
        "model.d_model=256",
        "model.kda.heads=2",
        "model.kda.key_dim=128",
        "model.kda.value_dim=128",
        "model.residual.kind=plain",
        "model.moe.experts=0",
        "data.sources=task:recall",
        "data.sequence_length=256",
        "data.batch_size=64",
        "optimiser.learning_rate=1e-3",
    ),
    metric=ACCURACY,
)
