"""How many KDA layers for each layer of full attention? (KLR Table 1, 16 layers)

    python -m experiments.ablate --study=kda_mla_ratio --config=mini --workdir=runs/ratio
    python -m experiments.ablate --study=kda_mla_ratio --config=nano --workdir=runs/ratio_nano

The Kimi Linear report has validation perplexities of 5.65 at 3:1, 5.66 at 1:1, 5.70 at 7:1, 5.77
without KDA and 5.82 at 15:1. One row in ten (`nano`: every other) is of associative recall; at
`mini` in documents of many lengths, at `nano` of 42 tokens out of 24 symbols.

Residuals are plain and feed-forward layers dense at both sizes, so that the mixers are what a run
is about. At `mini` that is 20.6M parameters in 16 layers of width 256, and 60.3M tokens a run; at
`nano` 0.63M in 16 layers of width 64, which two CPU cores can make twelve runs of in half an hour.

Lab note: `nano`, whole, two cores of an AMD EPYC that had other work beside it, 2026-12-01: 21 min
47 s (16 min 55 s of CPU), in `experiments/reports/kda_mla_ratio_nano`. Without KDA the text takes
3.35 bits per byte, with any of it 2.58 to 2.64: at this size and length, without positions, MLA
alone learns little in 500 steps. The orderings of 1:1 to 1:0 are not resolved. `mini` is not run
whole yet: on an H200 one step of 3:1 took 194 ms, of which 115 were the gradient of the embedding,
since mended; 15:1 and 1:0 have not been timed. Twelve runs are about a quarter of an hour if the
rest stays as it was.
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
