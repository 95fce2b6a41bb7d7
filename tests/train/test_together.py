"""Runs trained as one program: each is what it would have been alone, whatever interrupts them."""

import os
import signal

import numpy as np
import pytest

from configs import CONFIGS
from k3jax.flags import override
from k3jax.train import loop
from k3jax.train.hosts import StopVote
from k3jax.train.lockstep import drive, named
from k3jax.train.metrics import read_metrics
from k3jax.train.state import blueprint
from tests.tiny import SETTINGS, write_corpus
from tests.train.stub import VOCAB, Stub, stub_loss, stub_rebalance

STEPS = 12
OWN = [
    ["name=a"],
    ["name=b", "train.seed=1", "data.seed=1"],
    ["name=c", "train.seed=1", "data.seed=1", "optimiser.learning_rate=2e-2"],
]
# One step by two compiled programs: float32 sums in another order, which training amplifies.
# Measured on a CPU: 2e-7 of the stub after 12 steps, 3e-6 of a whole decoder after 6.
SAME = 1e-5


@pytest.fixture
def stubbed(monkeypatch):
    """The loop around a model that compiles in a second."""
    monkeypatch.setattr(
        loop, "decoder_blueprint", lambda c: blueprint(Stub, c.optimiser, c.train.steps)
    )
    monkeypatch.setattr(loop, "decoder_loss", lambda graphdef, gapless: stub_loss(graphdef))
    monkeypatch.setattr(
        loop, "update_balancing", lambda state, stats, config: stub_rebalance(state, stats)
    )


def members(*more):
    """Configurations for the stub's vocabulary, on two tasks."""
    settings = [
        *SETTINGS, f"train.steps={STEPS}", "train.sample_tokens=0", "train.eval_every=4",
        "train.checkpoint_every=6", "data.tokenizer=symbols:11", f"model.vocab_size={VOCAB}",
        "data.sources=task:recall,task:palindrome", "data.weights=3,1", *more,
    ]  # fmt: skip
    return [override(override(CONFIGS["nano"](), settings), own) for own in OWN]


def figures(folder):
    """All that a run measured, without times."""
    return [
        {name: value for name, value in record.items() if "per_second" not in name}
        for record in read_metrics(folder)
    ]


def train(folder, configs):
    folders = [folder / config.name for config in configs]
    found = loop.train_together(configs, folders, folder / "cache")
    return [outcome.stopped_by or outcome.step for outcome in found]


def agree(alone, together):
    assert [record.keys() for record in alone] == [record.keys() for record in together]
    for one, other in zip(alone, together, strict=True):
        for name, value in one.items():
            assert other[name] == pytest.approx(value, rel=SAME, abs=SAME), (one["step"], name)


def test_runs_of_one_program_are_what_they_would_have_been_alone(stubbed, tmp_path, monkeypatch):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    assert train(whole, members()) == [STEPS] * 3
    found = {name: figures(whole / name) for name in "abc"}
    for config in members()[::2]:  # b is c but for its rate
        train(tmp_path / "alone", [config])
        alone = figures(tmp_path / "alone" / config.name)
        assert len(alone) == STEPS + 3
        agree(alone, found[config.name])
    rates = [found[name][2]["learning_rate"] for name in "bc"]
    assert rates[1] / rates[0] == pytest.approx(5, rel=1e-6)
    assert len({found[name][-2]["loss"] for name in "abc"}) == 3
    last = found["a"][-1]
    shares = [last[f"validation_{task}_accuracy"] for task in ("recall", "palindrome")]
    assert min(shares) <= last["validation_accuracy"] <= max(shares)

    # Killed while a is saved at step 6, and b and c are not; stopped in another step; gone on.
    save, taken = loop.Checkpoints.save, StopVote.take

    def killed(self, state, data):
        if self.directory.parts[-2] == "b" and int(state.step) == 6:
            raise OSError("gone")
        save(self, state, data)

    with monkeypatch.context() as patch, pytest.raises(OSError, match=r"^b: gone$"):
        patch.setattr(loop.Checkpoints, "save", killed)
        train(broken, members())

    calls = []

    def asked(vote):
        calls.append(1)
        vote._stop.received = 15 if len(calls) > 13 else None
        return taken(vote)

    with monkeypatch.context() as patch:
        patch.setattr(StopVote, "take", asked)
        assert train(broken, members()) == [15] * 3
    train(broken, members())
    assert {name: figures(broken / name) for name in "abc"} == found

    def interrupted(*_):
        os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch:  # a signal while reports are made is not forgotten
        patch.setattr(loop, "_report", interrupted)
        assert train(broken, members()) == [signal.SIGTERM] * 3


def test_an_error_says_which_run_it_is_of():
    with pytest.raises(ValueError, match=r"^b: no room$") as found, named("b"):
        raise UnicodeError("no room")
    assert str(found.value.__cause__) == "no room"
    with pytest.raises(ZeroDivisionError) as found, named("b"):
        _ = 1 / 0
    assert found.value.__notes__ == ["in b"]


def test_runs_of_one_program_differ_in_seeds_and_rates_alone(tmp_path):
    first, second, _ = members()
    message = (
        r"^model\.d_model: 16, now 24: must be equal, as runs of one program may differ in name"
    )
    with pytest.raises(ValueError, match=message):
        train(tmp_path, [first, override(second, ["model.d_model=24"])])
    with pytest.raises(ValueError, match=r"^mesh\.expert = 2: must be 1 where several runs are"):
        train(tmp_path, members("mesh.expert=2"))


def test_rounds_take_those_that_are_behind():
    asked, rounds = [], []

    def steps(start):
        state = np.zeros(()) + start
        for number in range(start + 1, 6):
            state, _ = yield number, state, {}
        return state

    def step(states, batches):
        asked.append([float(state) for state in states])
        return [state + 1 for state in states], [{} for _ in states]

    found = drive([steps(0), steps(2), steps(5)], step, lambda: rounds.append(1))
    assert [float(state) for state in found] == [5, 5, 5]
    assert asked == [[n] * 3 for n in range(5)] and len(rounds) == 6
    assert drive([steps(5)], step, lambda: None) == [5]


@pytest.mark.full
@pytest.mark.usefixtures("quick")
def test_a_whole_decoder_is_what_it_would_have_been_alone(tmp_path):
    """Every mixer, attention residuals, experts, Muon and QK clip, in stages."""
    write_corpus(tmp_path)
    base = override(
        CONFIGS["nano"](),
        ["model.d_model=32", "model.layers=2", "model.kda_to_full=1:1",
         "model.residual.block_size=1", "data.sequence_length=32", "data.batch_size=4",
         "train.steps=6", "train.sample_tokens=0", "data.stages=3:64x2",
         "optimiser.qk_clip=0.5", "train.log_every=1", f"data.sources={tmp_path / 'text'}"],
    )  # fmt: skip
    configs = [override(base, own) for own in OWN]
    train(tmp_path / "together", configs)
    for config in configs[2:]:  # one with a seed and a rate of its own
        train(tmp_path / "alone", [config])
        agree(*(figures(tmp_path / where / config.name) for where in ("alone", "together")))
