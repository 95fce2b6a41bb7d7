"""The sweep language, and the runs that a study plans."""

import dataclasses

import pytest

from configs import CONFIGS
from experiments.ablation.plan import plan
from experiments.ablation.study import Study
from experiments.studies import NAMES, load
from experiments.sweep import Point, case, chain, over, product, zipped
from k3jax.cost import flops_per_token, parameter_counts

A, B = over("train.steps", [1, 2]), over("data.seed", [3, 4])


def test_points_combine_as_their_words_say():
    assert (Point("1", ("train.steps=1",)), Point("2", ("train.steps=2",))) == A
    assert [p.label for p in product(A, B)] == ["1, 3", "1, 4", "2, 3", "2, 4"]
    assert product(A, B)[1].assignments == ("train.steps=1", "data.seed=4")
    assert [p.label for p in zipped(A, B)] == ["1, 3", "2, 4"]
    assert [p.label for p in chain(A, case("base"))] == ["1", "2", "base"]


def test_sweeps_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match="two points are called 1"):
        chain(A, over("data.seed", [1]))
    with pytest.raises(ValueError, match="shorter"):
        zipped(A, case("base"))


@pytest.mark.parametrize("name", NAMES)
def test_every_study_can_be_planned(name):
    study = load(name)
    config = CONFIGS["nano"]()
    runs = plan(study, config, ["train.steps=7"], seeds=2)
    assert [run.label for run in runs] == [point.label for point in study.points] * 2
    assert len({run.name for run in runs}) == len(runs)
    by_label = {run.label: run.config for run in runs if run.seed == 0}
    models = {dataclasses.replace(c, name="", train=config.train) for c in by_label.values()}
    assert len(models) == len(study.points)  # every point is another experiment
    reference = by_label[study.reference]
    for run in runs:
        assert (run.config.train.seed, run.config.data.seed) == (run.seed, run.seed)
        counts, wanted = (parameter_counts(c.model) for c in (run.config, reference))
        if study.equal == "parameters":
            assert counts.total == pytest.approx(wanted.total, rel=3e-3)
        if study.equal == "active":
            assert counts.active == pytest.approx(wanted.active, rel=3e-3)
    assert "Lab note" in __import__(study_module(name), fromlist=["STUDY"]).__doc__


def study_module(name):
    return f"experiments.studies.{name}"


def test_equal_flops_change_the_number_of_steps():
    points = over("model.layers", [4, 8])
    study = Study("?", "layers", points, reference="4", equal="flops")
    small, large = plan(study, CONFIGS["nano"](), ["train.steps=500"], seeds=1)
    length = small.config.data.sequence_length
    ratio = flops_per_token(large.config.model, length) / flops_per_token(
        small.config.model, length
    )
    assert small.config.train.steps == 500
    assert large.config.train.steps == round(500 / ratio)
    assert large.flops == pytest.approx(small.flops, rel=5e-3)


def test_a_point_that_the_layers_cannot_realise_is_named():
    with pytest.raises(ValueError, match=r"point 15:1: model.kda_to_full = '15:1': needs at least"):
        plan(load("kda_mla_ratio"), CONFIGS["nano"](), ["model.layers=8"], seeds=1)


def test_a_reference_that_is_no_point_is_refused():
    with pytest.raises(ValueError, match="reference = '3'"):
        Study("?", "steps", A, reference="3")
