"""The smallest run of the programs that train: settings over `nano`, and something to read."""

import random
from pathlib import Path

SETTINGS = [
    "model.d_model=16",
    "model.layers=1",
    "model.kda_to_full=1:0",
    "model.kda.heads=2",
    "model.kda.key_dim=8",
    "model.kda.value_dim=8",
    "model.moe.experts=4",
    "model.moe.first_k_dense=0",
    "data.sequence_length=32",
    "data.batch_size=4",
    "train.micro_batches=2",
    "train.log_every=1",
    "train.eval_every=8",
    "train.eval_batches=2",
    "train.checkpoint_every=3",
    "train.sample_tokens=8",
]


def write_corpus(folder: Path) -> Path:
    """Two hundred files of short lines in `folder / "text"`; returns `folder`."""
    words = random.Random(0)
    (folder / "text").mkdir()
    for i in range(200):
        lines = (f"{words.choice('abcdef')}{words.randrange(30)} = {i};" for _ in range(20))
        (folder / "text" / f"{i}.txt").write_text("\n".join(lines))
    return folder
