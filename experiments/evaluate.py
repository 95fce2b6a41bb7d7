"""Ask a trained model: loss by position and document length, accuracy on tasks at any length.

    python -m experiments.evaluate --workdir=runs/nano --suite=perplexity
    python -m experiments.evaluate --workdir=runs/recall --suite=recall,needle --lengths=1,2,4,8
    python -m experiments.evaluate --workdir=runs/nano --suite=probes

A suite is `perplexity` (held-out text of the run) or a task of `k3jax.data.tasks`, with options as
in `data.sources`: `recall:pairs=16`. Lengths are multiples of the rows that the run trained on, in
the latest of its stages. The newest intact checkpoint is taken, on the mesh that `--set
mesh.data=4` and the like describe; `evaluation/SUITE.json` and `.png` are written in the workdir.

`probes` looks inside: expert load, decays, norms and the rest of `k3jax.train.probes`, of
held-out text, as `evaluation/probes.npz` and figures in `evaluation/probes`. What the run put on
record itself (`train.probe_every`) is drawn anew in `probes`. Bad input ends in one line and exit
code 2.
"""

from __future__ import annotations

import json
from pathlib import Path

from absl import flags

from experiments.options import cache_dir, corpora
from experiments.program import launch
from k3jax.data.tasks import PREFIX
from k3jax.evals import figures, suites
from k3jax.flags import define_workdir
from k3jax.train.probe_figures import draw
from k3jax.train.probes import write_record
from k3jax.train.report import plot_probes
from k3jax.train.restored import Restored, restored

cache_dir()
SUITES = flags.DEFINE_list("suite", ["perplexity"], "perplexity, probes, or tasks; see above.")
LENGTHS = flags.DEFINE_list("lengths", ["1", "2", "4", "8"], "Of tasks, in rows of the training.")
ROWS = flags.DEFINE_integer("rows", 64, "Rows per length of a task.")


def run() -> int:
    if not flags.FLAGS.workdir:
        raise ValueError("--workdir: missing, must name the directory of a run")
    if not all(text.isdecimal() and int(text) > 0 for text in LENGTHS.value):
        raise ValueError(f"--lengths = {','.join(LENGTHS.value)}: must be positive whole numbers")
    if not SUITES.value:
        raise ValueError("--suite: empty, must name perplexity, probes or tasks")
    if not LENGTHS.value:
        raise ValueError("--lengths: empty, must be positive whole numbers")
    if ROWS.value < 1:
        raise ValueError(f"--rows = {ROWS.value}: must be at least 1")
    workdir, cache = Path(flags.FLAGS.workdir), corpora()
    with restored(workdir, cache, flags.FLAGS.set) as model:
        for suite in SUITES.value:
            if suite == "probes":
                for path in look_inside(model, cache, workdir):
                    print(f"{suite}: {path}")
                continue
            found = evaluate(model, cache, suite, [int(text) for text in LENGTHS.value], ROWS.value)
            path = workdir / "evaluation" / f"{suite.replace(':', '-')}.json"
            path.parent.mkdir(exist_ok=True)
            path.write_text(json.dumps({"step": model.step, **found}, indent=1) + "\n")
            figures.draw(found, path.with_suffix(".png"), f"{workdir.name}, step {model.step}")
            print(f"{suite}: {figures.summary(found)}: {path}")
    return 0


def look_inside(model: Restored, cache: Path, workdir: Path) -> list[Path]:
    """Measures `model` on held-out rows; the figures of that, and of what training recorded."""
    record, path = model.probe(model.held_out(cache)), workdir / "evaluation" / "probes.npz"
    write_record(path, record)
    folder = path.with_suffix("")
    folder.mkdir(exist_ok=True)
    title = f"{workdir.name}, held-out rows"
    return [*draw([(model.step, record)], folder, title), *plot_probes(workdir)]


def evaluate(
    model: Restored, cache: Path, suite: str, multiples: list[int], rows: int
) -> dict[str, object]:
    """What `suite` finds, at `multiples` of the training's row length."""
    if suite == "perplexity":
        return suites.perplexity(model.score, model.held_out(cache), model.token_bytes)
    data = model.data
    lengths = [multiple * data.sequence_length for multiple in multiples]
    return suites.task(model.score, PREFIX + suite, model.tokenizer, lengths, rows, data.batch_size)


if __name__ == "__main__":
    define_workdir()
    launch(run)
