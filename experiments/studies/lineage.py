"""What does each step from linear attention to KDA buy? (KLR §5.1, Fig. 4)

    python -m experiments.ablate --study=lineage --config=nano --workdir=runs/recall_256
    python -m experiments.ablate --study=lineage --config=nano --workdir=runs/stack_1024 \
        --set data.sources=task:stack --set data.sequence_length=1024

Two layers of two heads of 128 without full attention, on one task: recall over 256 tokens, or
`task:palindrome` and `task:stack`, and other lengths. In the report KDA and Gated DeltaNet solve
all three tasks at 256 tokens, and part at 1,024 and 2,048; at 1,024 KDA needs about 4,000 steps.

Lab note: one H200, 2026-12-01, both seeds of a rule as one program, three programs at a time, two
to four minutes each; `experiments/reports/lineage` has what was measured so far, at 256 tokens. KDA
has at least 99.98 % of all three tasks with both seeds. So has Gated DeltaNet of stack; of
palindrome it has 99.93 and 99.96 %, and of recall 99.997 % with one seed and 10 % with the other,
which had not begun to recall after 2,500 steps. DeltaNet and linear attention, of which no run is
finished, were at 99.8 % of recall after 330 and 99.9 % after 810 steps: 63 pairs are few for states
of 128 x 128. The length of 1,024 is not run yet.
"""

from experiments.ablation.study import ACCURACY, Study
from experiments.sweep import case

STUDY = Study(
    question="Which rules of the KDA lineage solve a task that asks for exact memory?",
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
