"""What does each step from linear attention to KDA buy? (KLR §5.1, Fig. 4)

    python -m experiments.ablate --study=lineage --config=nano --workdir=runs/recall_256
    python -m experiments.ablate --study=lineage --config=nano --workdir=runs/stack_1024 \
        --set data.sources=task:stack --set data.sequence_length=1024

Two layers of two heads of 128 without full attention, on one task: recall over 256 tokens, or
`task:palindrome` and `task:stack`, and other lengths. In the report KDA and Gated DeltaNet solve
all three tasks at 256 tokens, and part at 1,024 and 2,048; at 1,024 KDA needs about 4,000 steps.

Lab note: not run yet at this size. In miniature (one head of 32, 32 tokens of 24 symbols, 32 rows
a step, rate 6e-3; a CPU, 2026-11-30) KDA has 99.9 % of recall after 300 steps, 99.2 % of palindrome
and 100 % of four stacks after 400; at a rate of 1e-3 it has 47 % of recall after 300. Linear
attention solves that recall as well: its seven pairs fit in a state of 32 x 32.
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
        "model.dtype=bfloat16",
        "model.unroll=true",
        "data.sources=task:recall",
        "data.sequence_length=256",
        "data.batch_size=128",
        "optimiser.learning_rate=3e-3",
        "train.steps=2500",
        "train.eval_every=500",
        "train.checkpoint_every=1000",
    ),
    metric=ACCURACY,
)
