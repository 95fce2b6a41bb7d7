"""How many KDA layers for each layer of full attention? (KLR Table 1, 16 layers)

    python -m experiments.ablate --study=kda_mla_ratio --config=mini --workdir=runs/ratio
    python -m experiments.ablate --study=kda_mla_ratio --config=nano --workdir=runs/ratio_nano

The Kimi Linear report has validation perplexities of 5.65 at 3:1, 5.66 at 1:1, 5.70 at 7:1, 5.77
without KDA and 5.82 at 15:1. One row in ten (`nano`: every other) is of associative recall; at
`mini` in documents of many lengths, at `nano` of 24 symbols.

At `mini` a run is 45M parameters and 66M tokens. At `nano` the mixers are all that is left of the
model: 16 layers of width 64 over plain residuals and dense feed-forward layers, which is to let two
CPU cores make twelve runs in half an hour.

Lab note: not run whole yet. At `nano`, with recall of all 256 symbols in four rows of ten, both
seeds of 0:1 had 3.40 bits per byte of text after 200 steps and had not begun to recall (0.6 %).
"""

from experiments.ablation.study import Study
from experiments.sweep import over

_NANO = (
    "model.d_model=64",
    "model.kda.heads=1",
    "model.kda.decay_rank=16",
    "model.mla.heads=1",
    "model.mla.q_lora_rank=32",
    "model.mla.kv_lora_rank=32",
    "model.residual.kind=plain",
    "model.moe.experts=0",
    "model.ffn.dense_width=128",
    "data.sequence_length=128",
    "data.batch_size=4",
    "data.sources=python:stdlib,task:recall:symbols=24:length=42",  # three documents a row
    "data.weights=1,1",
    "train.steps=500",
    "train.eval_every=250",
    "train.eval_batches=64",
    "train.checkpoint_every=100",
)
_MINI = (
    "model.d_model=256",
    "model.kda.heads=2",
    "model.kda.decay_rank=64",
    "model.mla.heads=2",
    "model.residual.kind=plain",
    "model.moe.experts=0",
    "model.ffn.dense_width=1216",
    "model.unroll=true",
    "data.sources=python:site-packages,task:recall:shortest=32:length=512",
    "data.weights=9,1",
    "train.steps=920",
    "train.eval_every=0",
    "train.eval_batches=32",
    "train.checkpoint_every=920",
)

STUDY = Study(
    question="Which ratio of KDA to full-attention layers gives the lowest loss at equal size?",
    axis="KDA : MLA",
    points=over("model.kda_to_full", ["0:1", "1:1", "3:1", "7:1", "15:1", "1:0"]),
    reference="3:1",
    base=("model.layers=16",),
    budgets={"nano": _NANO, "mini": _MINI},
    equal="parameters",
)
