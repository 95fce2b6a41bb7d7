"""What a study claims: intervals, verdicts, and reports that do not depend on interruptions."""

import dataclasses
import json

import numpy as np
import pytest
from scipy import stats

from configs import CONFIGS
from experiments.ablation import runner
from experiments.ablation.plan import flops_after, plan
from experiments.ablation.report import by_label, report
from experiments.ablation.statistics import estimate, paired, verdict
from experiments.ablation.study import ACCURACY, BITS, Study
from experiments.sweep import over

STUDY = Study("Which?", "steps", over("train.steps", [10, 20, 30]), reference="20")


def test_intervals_are_students():
    values = np.random.default_rng().normal(size=5)
    found = estimate(values.tolist())
    low, high = stats.t.interval(0.95, 4, loc=values.mean(), scale=stats.sem(values))
    assert (found.mean, found.count) == (pytest.approx(values.mean()), 5)
    assert found.mean - found.half == pytest.approx(low)
    assert found.mean + found.half == pytest.approx(high)


def test_one_value_decides_nothing():
    assert not estimate([3.0]).decided
    assert str(estimate([3.0])) == "3.0000 (one seed)"
    assert paired({0: 1.0}, {1: 1.0}) is None


def test_pairs_take_out_what_seeds_share():
    noise = np.random.default_rng().normal(scale=10, size=6)
    reference = dict(enumerate(noise))
    better = {seed: value - 0.1 - 1e-3 * seed for seed, value in reference.items()}
    assert paired(better, reference).decided
    assert not (estimate([*better.values()]).half < 0.1)


FIGURES = {
    "plain": {0: 1.0, 1: 2.0, 2: 3.0},
    "good": {0: 0.9, 1: 1.89, 2: 2.91},
    "bad": {0: 1.1, 1: 2.11, 2: 3.09},
    "alike": {0: 0.5, 1: 2.5, 2: 3.1},
}


def test_a_verdict_says_what_the_numbers_support():
    text = verdict(FIGURES, "plain", BITS)
    assert "better than plain: good (-0.1000 ± " in text
    assert "worse than plain: bad (+0.1000 ± " in text
    assert "not told apart from it: alike." in text
    assert "3 comparisons" in text
    higher = verdict(FIGURES, "plain", ACCURACY)
    assert "better than plain: bad" in higher and "worse than plain: good" in higher


def test_a_verdict_from_one_seed_claims_nothing():
    text = verdict({"plain": {0: 1.0}, "good": {0: 0.1}}, "plain", BITS)
    assert "better than plain: none; worse than plain: none; not told apart from it: good" in text


def finished(workdir, runs, figure):
    for run in runs:
        folder = workdir / "runs" / run.name
        folder.mkdir(parents=True)
        records = [
            {"step": s, "tokens": s * 4096, "bits_per_byte": 8 / s, "tokens_per_second": 5.0}
            for s in range(1, run.config.train.steps)
        ]
        last = {"step": run.config.train.steps, "tokens": 1, BITS.name: figure(run)}
        (folder / "metrics.jsonl").write_text(
            "".join(json.dumps(record) + "\n" for record in [*records, last])
        )
        text = json.dumps(runner.result(run, folder))
        (folder / runner.RESULT).write_text(text)


def test_a_report_is_the_same_whenever_it_is_written(tmp_path):
    runs = plan(STUDY, CONFIGS["nano"](), [], seeds=2)
    finished(tmp_path, runs, lambda run: 30 / run.config.train.steps + run.seed)
    names = ("report.md", "results.csv", "loss.png", "axis.png")

    def write():
        text = report("steps", STUDY, runs, runner.results(runs, tmp_path), tmp_path)
        return text, [(tmp_path / name).read_bytes() for name in names]

    assert write() == write()
    text = (tmp_path / "report.md").read_text()
    assert "better than 20: 30 (-0.5000 ± 0.0000); worse than 20: 10 (+1.5000 ± 0.0000)" in text
    assert "| 30 | 1,400,228 | 924,964 | 30 |" in text
    assert "- 10: train.steps: 20, now 10" in text
    header, *rows = (tmp_path / "results.csv").read_text().splitlines()
    assert header.startswith("label,seed,parameters,active_parameters,flops,step")
    assert "per_second" not in header and len(rows) == 6


def test_a_report_of_a_study_that_has_begun(tmp_path):
    runs = plan(STUDY, CONFIGS["nano"](), [], seeds=2)
    finished(tmp_path, runs[:1], lambda run: 1.0)
    text = report("steps", STUDY, runs, runner.results(runs, tmp_path), tmp_path)
    assert "1 of 6 runs are finished" in text and "no verdict yet" in text


def test_runs_without_the_deciding_metric_are_left_out(tmp_path):
    assert by_label(STUDY, [{"label": "10", "seed": 0}]) == {}
    runs = plan(STUDY, CONFIGS["nano"](), [], seeds=1)
    finished(tmp_path, runs, lambda run: 1.0 if run.label == "20" else None)
    text = report("steps", STUDY, runs, runner.results(runs, tmp_path), tmp_path)
    assert f"Left out, as {BITS.name} is not finite or not there: 10 (seed 0), 30 (seed 0)." in text


def test_a_folder_belongs_to_one_study(tmp_path):
    runs = plan(STUDY, CONFIGS["nano"](), [], seeds=1)
    runner.claim(tmp_path, "steps", STUDY, runs)
    more = plan(STUDY, CONFIGS["nano"](), [], seeds=2)
    runner.claim(tmp_path, "steps", STUDY, more)
    runner.claim(tmp_path, "steps", STUDY, runs)
    assert len(json.loads((tmp_path / runner.STUDY).read_text())["runs"]) == 6
    with pytest.raises(ValueError, match="holds the study 'steps', not 'other'"):
        runner.claim(tmp_path, "other", STUDY, runs)
    changed = plan(STUDY, CONFIGS["nano"](), ["model.d_model=64"], seeds=1)
    with pytest.raises(ValueError, match=r"of 10-seed0; model\.d_model: 128, now 64$"):
        runner.claim(tmp_path, "steps", STUDY, changed)
    elsewhere = ["mesh.expert=2", "model.moe.buffer_factor=4", "model.moe.transport=ring"]
    runner.claim(tmp_path, "steps", STUDY, plan(STUDY, CONFIGS["nano"](), elsewhere, seeds=1))


def test_processes_that_claim_a_study_anew_write_nothing(tmp_path):
    runs = plan(STUDY, CONFIGS["nano"](), [], seeds=1)
    runner.claim(tmp_path, "steps", STUDY, runs)
    before = (tmp_path / runner.STUDY).stat().st_mtime_ns
    runner.claim(tmp_path, "steps", STUDY, runs[:1])
    assert (tmp_path / runner.STUDY).stat().st_mtime_ns == before
    (tmp_path / runner.STUDY).write_text("{}")
    with pytest.raises(ValueError, match=r"study\.json: damaged"):
        runner.claim(tmp_path, "steps", STUDY, runs)


def test_processes_get_the_devices_that_there_are(tmp_path, monkeypatch):
    runs = plan(STUDY, CONFIGS["nano"](), [], seeds=1)
    note = "import os, pathlib, sys; pathlib.Path(sys.argv[1], sys.argv[2]).write_text("
    note += "os.environ['CUDA_VISIBLE_DEVICES']); os.kill(os.getpid(), 9 * ('20' in sys.argv[2]))"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    assert runner.spread(runs, tmp_path, ["-c", note, str(tmp_path)], 2) == 128 + 9
    found = {(tmp_path / f"--only={run.name}").read_text() for run in runs}
    assert found == {"5", "7"}
    with pytest.raises(ValueError, match="--devices = 3: CUDA_VISIBLE_DEVICES lists 2"):
        runner.spread(runs, tmp_path, [], 3)


def test_flops_are_those_of_all_stages(tmp_path):
    settings = ["data.batch_size=8", "data.stages=15:512x4", "train.steps=20"]
    study = dataclasses.replace(
        STUDY, points=over("model.d_model", [128, 256]), reference="128", equal="flops"
    )
    small, large = plan(study, CONFIGS["nano"](), settings, seeds=1)
    once = plan(study, CONFIGS["nano"](), settings[:1], seeds=1)[0]
    assert flops_after(small.config, 15) == flops_after(once.config, 15)
    longer = flops_after(small.config, 16) - flops_after(small.config, 15)
    assert longer > flops_after(small.config, 1)  # the same tokens, more attention
    assert small.flops == pytest.approx(15 * flops_after(small.config, 1) + 5 * longer)
    steps = large.config.train.steps
    errors = [abs(flops_after(large.config, s) - small.flops) for s in range(1, 40)]
    assert errors[steps - 1] == min(errors)
    finished(tmp_path, [small, large], lambda run: 1.0)
    text = report("stages", study, [small, large], runner.results([small], tmp_path), tmp_path)
    assert "rows of 256 tokens, 8 a step, then 15:512x4" in text


def test_a_study_killed_in_a_run_goes_on_and_skips_what_is_finished(tmp_path, monkeypatch):
    runs = plan(STUDY, CONFIGS["nano"](), [], seeds=1)
    trained = []

    @dataclasses.dataclass
    class Outcome:
        stopped_by: int | None

    def train(config, folder, cache):
        trained.append(config.name)
        folder.mkdir(parents=True, exist_ok=True)
        if len(trained) == 2:
            return Outcome(15)
        (folder / "metrics.jsonl").write_text(json.dumps({"step": 1, BITS.name: 1.0}) + "\n")
        return Outcome(None)

    monkeypatch.setattr(runner, "train", train)
    assert [runner.make(run, tmp_path, tmp_path) for run in runs] == [None, 15, None]
    assert len(runner.results(runs, tmp_path)) == 2
    assert [runner.make(run, tmp_path, tmp_path) for run in runs] == [None, None, None]
    assert trained == ["10-seed0", "20-seed0", "30-seed0", "20-seed0"]
