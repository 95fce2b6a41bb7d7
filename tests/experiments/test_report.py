"""What a study claims: intervals, verdicts, and reports that do not depend on interruptions."""

import dataclasses
import json
import os
import signal
import threading
import time

import numpy as np
import pytest
from scipy import stats

from configs import CONFIGS
from experiments.ablation import report as reports
from experiments.ablation import runner
from experiments.ablation.plan import flops_after, plan
from experiments.ablation.report import by_label, report
from experiments.ablation.statistics import paired, residual, verdict
from experiments.ablation.study import ACCURACY, BITS, Study
from experiments.sweep import chain, over
from k3jax.train.workdir import record_config

STUDY = Study("Which?", "steps", over("train.steps", [10, 20, 30]), reference="20")


def test_two_points_are_compared_as_the_paired_t_test_does():
    noise = np.random.default_rng()
    seed = noise.normal(scale=10, size=5)
    one, other = (seed + noise.normal(size=5) for _ in range(2))
    found = paired(dict(enumerate(one)), dict(enumerate(other)), spread_of(one, other))
    wanted = stats.ttest_rel(one, other).confidence_interval(0.95)
    assert found.mean == pytest.approx(np.mean(one - other))
    assert found.mean - found.half == pytest.approx(wanted.low)
    assert found.mean + found.half == pytest.approx(wanted.high)


def spread_of(*rows):
    return residual({str(i): dict(enumerate(row)) for i, row in enumerate(rows)})


def test_the_residual_is_what_points_and_seeds_leave():
    noise = np.random.default_rng()
    table = noise.normal(size=(4, 3))
    left = table - table.mean(0) - table.mean(1, keepdims=True) + table.mean()
    found = spread_of(*table)
    assert found.freedom == 6
    assert found.deviation == pytest.approx(np.sqrt((left**2).sum() / 6))
    moved = table + noise.normal(size=(4, 1)) + noise.normal(size=(1, 3))
    assert spread_of(*moved).deviation == pytest.approx(found.deviation)


def test_a_run_that_is_missing_costs_one_degree_of_freedom():
    table = np.random.default_rng().normal(size=(4, 3))
    figures = {str(i): dict(enumerate(row)) for i, row in enumerate(table)}
    del figures["2"][1]
    # Yates: the value whose residual is zero takes the place of one that is missing.
    total = sum(sum(row.values()) for row in figures.values())
    point, seed = sum(figures["2"].values()), sum(r[1] for r in figures.values() if 1 in r)
    table[2, 1] = (4 * point + 3 * seed - total) / (3 * 2)
    left = table - table.mean(0) - table.mean(1, keepdims=True) + table.mean()
    found = residual(figures)
    assert found.freedom == 5
    assert found.deviation == pytest.approx(np.sqrt((left**2).sum() / 5))


def test_an_interval_covers_the_truth_as_often_as_it_says():
    noise, inside = np.random.default_rng(0), 0
    for _ in range(1000):
        table = noise.normal(size=(1, 2)) + noise.normal(scale=0.1, size=(6, 2))
        rows = [dict(enumerate(row)) for row in table]
        found = paired(rows[0], rows[3], spread_of(*table))
        inside += abs(found.mean) < found.half
    assert 0.935 < inside / 1000 < 0.965


def test_one_seed_decides_nothing():
    spread = residual({"a": {0: 1.0}, "b": {0: 2.0}})
    found = paired({0: 1.0}, {0: 2.0}, spread)
    assert not found.decided and str(found) == "-1.0000 (no interval)"
    assert paired({0: 1.0}, {1: 1.0}, spread) is None
    assert not residual({"a": {0: 1.0, 1: 1.5}, "b": {0: 2.0}}).freedom
    assert not residual({}).freedom


FIGURES = {
    "plain": {0: 1.0, 1: 2.0, 2: 3.0},
    "good": {0: 0.9, 1: 1.89, 2: 2.91},
    "bad": {0: 1.1, 1: 2.11, 2: 3.09},
    "alike": {0: 1.004, 1: 2.0, 2: 2.99},
}


def test_a_verdict_says_what_the_numbers_support():
    text = verdict(FIGURES, "plain", BITS)
    assert "better than plain: good (-0.1000 ± " in text
    assert "worse than plain: bad (+0.1000 ± " in text
    assert "not told apart from it: alike." in text
    assert "6 degrees of freedom); 3 comparisons were made." in text
    higher = verdict(FIGURES, "plain", ACCURACY)
    assert "better than plain: bad" in higher and "worse than plain: good" in higher
    # One point whose seeds disagree leaves all of them in doubt.
    wild = verdict(FIGURES | {"wild": {0: 0.5, 1: 2.5, 2: 3.1}}, "plain", BITS)
    assert "not told apart from it: good, bad, alike, wild." in wild


def test_a_verdict_from_one_seed_claims_nothing():
    text = verdict({"plain": {0: 1.0}, "good": {0: 0.1}}, "plain", BITS)
    assert "better than plain: none; worse than plain: none; not told apart from it: good" in text
    assert "Too few runs for intervals." in text


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
    assert "Not in loss.png" not in text


def test_a_report_says_whose_curve_is_missing(tmp_path):
    runs = plan(STUDY, CONFIGS["nano"](), [], seeds=2)
    finished(tmp_path, runs, lambda run: 1.0)
    (tmp_path / "runs" / "10-seed1" / "metrics.jsonl").unlink()
    short = tmp_path / "runs" / "30-seed0" / "metrics.jsonl"
    short.write_text("".join(short.read_text().splitlines(keepends=True)[:5]))
    text = report("steps", STUDY, runs, runner.results(runs, tmp_path), tmp_path)
    missing = "Not in loss.png, as metrics.jsonl is not there or ends early: "
    assert f"\n{missing}30 (seed 0), 10 (seed 1).\n" in text


def test_runs_without_the_deciding_metric_are_left_out(tmp_path):
    assert by_label(STUDY, BITS, [{"label": "10", "seed": 0}]) == {}
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
    parts = [runs[:2], runs[2:]]
    assert runner.spread(parts, tmp_path, ["-c", note, str(tmp_path)], 2) == 128 + 9
    both = (tmp_path / "--only=10-seed0,20-seed0", tmp_path / "--only=30-seed0")
    assert {path.read_text() for path in both} == {"5", "7"}
    with pytest.raises(ValueError, match="--devices = 3: CUDA_VISIBLE_DEVICES lists 2"):
        runner.spread(parts, tmp_path, [], 3)


def test_a_signal_reaches_all_processes(tmp_path):
    runs = plan(STUDY, CONFIGS["nano"](), [], seeds=1)
    wait = "import pathlib, sys, time; pathlib.Path(*sys.argv[1:3]).touch(); time.sleep(60)"

    def ask():
        while len(list(tmp_path.iterdir())) < 2:
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGTERM)

    asking = threading.Thread(target=ask, daemon=True)  # else it would outlive a failure
    asking.start()
    began = time.perf_counter()
    command = ["-c", wait, str(tmp_path)]
    code = runner.spread([[run] for run in runs], tmp_path, command, 2)
    asking.join(10)
    assert code == 128 + signal.SIGTERM and time.perf_counter() - began < 30
    assert len(list(tmp_path.iterdir())) == 2  # the third never began


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


def test_runs_that_differ_in_seed_and_rate_are_one_program():
    axis = chain(over("optimiser.learning_rate", [1e-3, 2e-3]), over("train.steps", [30]))
    study = dataclasses.replace(STUDY, points=axis, reference="30")
    runs = plan(study, CONFIGS["nano"](), [], seeds=2)
    found = [[run.name for run in part] for part in runner.groups(runs, 0)]
    rates = [f"0.00{rate}-seed{seed}" for seed in (0, 1) for rate in (1, 2)]
    assert found == [rates, ["30-seed0", "30-seed1"]]
    assert [len(part) for part in runner.groups(runs, 3)] == [3, 2, 1]
    assert [len(part) for part in runner.groups(runs, 1)] == [1] * 6
    large = plan(study, CONFIGS["mini"](), [], seeds=2)
    assert [len(part) for part in runner.groups(large, 0)] == [1] * 6
    spread = plan(study, CONFIGS["nano"](), ["mesh.data=2"], seeds=2)
    assert [len(part) for part in runner.groups(spread, 0)] == [1] * 6


def test_runs_of_one_program_leave_no_device_idle():
    study = dataclasses.replace(
        STUDY, points=over("optimiser.learning_rate", [1e-3, 2e-3]), reference="0.001"
    )
    runs = plan(study, CONFIGS["nano"](), [], seeds=4)

    def sizes(most, devices):
        return [len(part) for part in runner.groups(runs, most, devices)]

    assert sizes(0, 1) == [8]
    assert sizes(0, 3) == [3, 3, 2]
    assert sizes(0, 4) == sizes(2, 3) == [2] * 4
    assert sizes(0, 20) == [1] * 8


def test_a_study_killed_in_a_run_goes_on_and_skips_what_is_finished(tmp_path, monkeypatch):
    runs = plan(STUDY, CONFIGS["nano"](), [], seeds=2)
    trained = []

    @dataclasses.dataclass
    class Outcome:
        stopped_by: int | None

    def train_together(configs, folders, cache):
        trained.append([config.name for config in configs])
        if len(trained) == 2:
            return [Outcome(15)] * len(configs)
        for folder in folders:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "metrics.jsonl").write_text(json.dumps({"step": 1, BITS.name: 1.0}) + "\n")
        return [Outcome(None)] * len(configs)

    def go_on():
        parts = runner.unfinished(runner.groups(runs, 0), tmp_path)
        return [runner.make(part, tmp_path, tmp_path) for part in parts]

    monkeypatch.setattr(runner, "train_together", train_together)
    assert go_on() == [None, 15, None]
    assert len(runner.results(runs, tmp_path)) == 4
    assert go_on() == [None] and go_on() == []
    (tmp_path / "runs" / "10-seed1" / runner.RESULT).unlink()
    assert go_on() == [None]  # alone, as 10-seed0 has a result
    names = [[f"{label}-seed0", f"{label}-seed1"] for label in ("10", "20", "30", "20")]
    assert trained == [*names, ["10-seed1"]]


def test_data_of_several_pools_are_judged_pool_by_pool(tmp_path):
    study = dataclasses.replace(STUDY, points=over("train.steps", [10, 20]))
    settings = ["data.sources=python:stdlib,task:recall", "data.weights=9,1"]
    runs = plan(study, CONFIGS["nano"](), settings, seeds=3)
    finished(tmp_path, runs, lambda run: 1.0)
    for run in runs:
        path = tmp_path / "runs" / run.name / runner.RESULT
        good = run.label == "10"
        more = {"validation_text_bits_per_byte": 2.0 - good + 0.01 * run.seed}
        more |= {"validation_recall_accuracy": 0.5 - 0.2 * good}
        path.write_text(json.dumps(json.loads(path.read_text()) | more))
    text = report("steps", study, runs, runner.results(runs, tmp_path), tmp_path)
    assert "By validation_text_bits_per_byte over 3 seeds, better than 20: 10 (-1.0000" in text
    assert "By validation_recall_accuracy over 3 seeds, better than 20: none; worse" in text
    assert (
        "| 1.0100 (sd 0.0100) | -1.0000 ± 0.0000 | 0.3000 (sd 0.0000) | -0.2000 ± 0.0000 |" in text
    )
    assert "data: python:stdlib, task:recall, by weights 9, 1." in text
    header = (tmp_path / "results.csv").read_text().splitlines()[0]
    assert "validation_text_bits_per_byte,validation_recall_accuracy" in header


def test_a_result_of_other_settings_is_refused(tmp_path):
    runs = plan(STUDY, CONFIGS["nano"](), [], seeds=1)
    finished(tmp_path, runs, lambda run: 1.0)
    record_config(tmp_path / "runs" / runs[0].name, runs[0].config)
    assert len(runner.results(runs, tmp_path)) == 3
    other = plan(STUDY, CONFIGS["nano"](), ["data.batch_size=8"], seeds=1)
    record_config(tmp_path / "runs" / runs[0].name, other[0].config)
    with pytest.raises(ValueError, match=r"of 10-seed0; data\.batch_size: 8, now 16"):
        runner.results(runs, tmp_path)


def test_a_result_that_is_damaged_or_of_another_run_is_refused(tmp_path):
    runs = plan(STUDY, CONFIGS["nano"](), [], seeds=2)
    finished(tmp_path, runs, lambda run: 1.0)
    one, other = (tmp_path / "runs" / f"10-seed{seed}" / runner.RESULT for seed in (0, 1))
    text = one.read_text()
    one.write_text(other.read_text())
    with pytest.raises(ValueError, match=r"10-seed0/result\.json: is of '10' with seed 1, not of"):
        runner.results(runs, tmp_path)
    for damaged in (text[:20], "[]", "{}"):
        one.write_text(damaged)
        with pytest.raises(ValueError, match=r"10-seed0/result\.json: damaged, "):
            runner.results(runs, tmp_path)
    one.write_text(text)
    runner.claim(tmp_path, "steps", STUDY, runs)
    claimed = (tmp_path / runner.STUDY).read_text()
    (tmp_path / runner.STUDY).write_text(claimed.replace("batch_size", "bath_size"))
    with pytest.raises(ValueError, match=r"study\.json: 10-seed0: data\.bath_size: unknown"):
        runner.claim(tmp_path, "steps", STUDY, runs)


def test_a_curve_ends_where_all_of_its_runs_have_a_figure(tmp_path, monkeypatch):
    runs = plan(STUDY, CONFIGS["nano"](), [], seeds=3)
    drawn = {}

    class Axes:
        def plot(self, x, y, label, **_):
            drawn.setdefault(label, []).append((list(x), list(y)))

        def __getattr__(self, name):
            return lambda *_, **__: None

    class Figure:
        def __init__(self, **_): ...
        def subplots(self, *_, **__):
            return Axes(), Axes()

        def savefig(self, *_, **__): ...

    monkeypatch.setattr(reports, "Figure", Figure)
    for run, bits in zip(runs[::3], ([4, 3, 2], [2, 1, None], [9]), strict=True):  # of 10 steps
        folder = tmp_path / "runs" / run.name
        folder.mkdir(parents=True)
        lines = [{"step": s + 1, "tokens": 0, "bits_per_byte": b} for s, b in enumerate(bits)]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert reports._curves(STUDY, runs, tmp_path) == [("10", 0), ("10", 1)]
    tokens = runs[0].config.data.tokens_after
    assert list(drawn) == ["10"]
    assert drawn["10"][0] == ([tokens(1), tokens(2)], [3, 2])
