"""The training loop: batches in, steps out, and everything that happens between them."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from tqdm import tqdm

from k3jax.config import ExperimentConfig
from k3jax.cost import flops_per_token
from k3jax.data.baseline import baseline_bits_per_byte
from k3jax.data.pipeline import (
    TrainIterator,
    load_corpus,
    make_train_iterator,
    validation_batches,
    validation_by_pool,
)
from k3jax.data.tasks import PREFIX
from k3jax.data.tokenizer import check_vocab
from k3jax.flags import differences, to_json
from k3jax.layers.balancing import update_balancing
from k3jax.model import Decoder
from k3jax.optim import learning_rate, make_optimiser
from k3jax.sharding import BATCH, SEQUENCE, make_mesh
from k3jax.train.checkpoint import Checkpoints
from k3jax.train.hosts import StopVote, leading, placed, require_equal, share_of_rows
from k3jax.train.lockstep import Steps, drive, named, one_at_a_time, vmapped
from k3jax.train.metrics import MetricsLog, Stopwatch
from k3jax.train.probes import Record, discard_after, make_probes, record_path, write_record
from k3jax.train.report import make_sampler, plot, plot_probes
from k3jax.train.signals import StopSignal
from k3jax.train.state import Blueprint, TrainState, blueprint
from k3jax.train.step import decoder_loss, make_evaluation, make_step
from k3jax.train.validation import check_drops, validation
from k3jax.train.workdir import occupy, record_config

PROMPT = 64  # tokens of held-out text that the final sample goes on from
TEMPERATURE = 0.8

log = logging.getLogger("k3jax")


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a call of `train` ended: at `step`, by a signal (`stopped_by`) or with all done."""

    state: TrainState
    step: int
    stopped_by: int | None


def train(config: ExperimentConfig, workdir: Path, cache_dir: Path) -> Outcome:
    """Run `config` in `workdir` to its last step, from the newest intact checkpoint there.

    Tokenised corpora are kept in `cache_dir`. Raises `ValueError` or `OSError`, with one line, for
    what cannot be run, resumed or written.
    """
    return train_together([config], [workdir], cache_dir)[0]


def train_together(
    configs: Sequence[ExperimentConfig], workdirs: Sequence[Path], cache_dir: Path
) -> list[Outcome]:
    """As `train`, of several runs whose steps are one program (`k3jax.train.lockstep`).

    They may differ in `name`, seeds and peak rate (`alike`); each has a directory of its own, and
    what it leaves there is what it would leave alone, up to the rounding of another program. More
    than one need a mesh of one device.
    """
    first = configs[0]
    if len(configs) > 1:
        _require_one_program(configs)
    with contextlib.ExitStack() as stack:
        for config, workdir in zip(configs, workdirs, strict=True):
            stack.enter_context(occupy(workdir, config))
        stack.enter_context(jax.set_mesh(make_mesh(first.mesh)))
        stop = stack.enter_context(StopSignal())
        require_equal("settings", "".join(map(to_json, configs)))
        share = share_of_rows(jax.sharding.get_mesh())
        shards = {"process_index": share[0], "process_count": share[1]}
        corpus = load_corpus(first.data, cache_dir)
        require_equal("data.sources", corpus.digest)
        iterators = [make_train_iterator(config.data, cache_dir, **shards) for config in configs]

        @functools.lru_cache(maxsize=1)
        def held_out(stage: int) -> dict[str, list[dict[str, np.ndarray]]]:
            rows = first.data.during(first.data.schedule()[stage])
            return validation_by_pool(rows, cache_dir, first.train.eval_batches, **shards)

        held_out(0)  # what is wrong with the data shows now
        check_vocab(corpus.tokenizer, first.model.vocab_size)
        spare = first.model.vocab_size - corpus.tokenizer.vocab_size
        token_bytes = np.pad(corpus.tokenizer.token_bytes, (0, spare))
        plan = decoder_blueprint(first)
        evaluate = make_evaluation(decoder_loss(plan.graphdef, gapless=True), token_bytes)
        if len(configs) == 1:
            step_of_all = one_at_a_time(decoder_step(first, plan, token_bytes))
            heard = stop
        else:
            peaks = jnp.array([config.optimiser.learning_rate for config in configs])
            step_of_all = vmapped(
                lambda state, batch, peak: decoder_step(first, plan, token_bytes, peak)(
                    state, batch
                ),
                peaks,
            )
            heard = StopSignal()  # as of the last round, so that all stop in one
        vote = StopVote(heard)

        def before_round() -> None:
            heard.received = stop.received

        def validate(state: TrainState, stage: int) -> dict[str, float]:
            return validation(first, evaluate, state, held_out(stage), share)

        probe = make_probes(first.model, plan.graphdef) if first.train.probe_every else None
        with contextlib.ExitStack() as files:
            runs: list[Steps] = []
            for config, workdir, data in zip(configs, workdirs, iterators, strict=True):
                checkpoints = files.enter_context(Checkpoints(workdir / "checkpoints", config))
                state = checkpoints.restore(plan.abstract(), data)
                if state is None:
                    state = plan.create(config.train.seed)
                start = int(state.step)
                if start > config.train.steps:
                    raise ValueError(
                        f"train.steps = {config.train.steps}: {workdir} is at step {start}"
                    )
                metrics = None
                if leading():
                    record_config(workdir, config)
                    discard_after(workdir, start)
                    record = MetricsLog(workdir, start, config.train.tensorboard)
                    metrics = files.enter_context(record)
                log.info("%s from step %d of %d", config.name, start, config.train.steps)
                loop = _Loop(
                    config, workdir, share, data, metrics, checkpoints, vote, probe,
                    alone=len(configs) == 1, leads=not runs,
                )  # fmt: skip
                runs.append(loop.steps(state, validate))
            states = drive(runs, step_of_all, before_round)
        before_round()
        if not vote.now():
            for config, workdir, state in zip(configs, workdirs, states, strict=True):
                _report(config, workdir, cache_dir, state)
            before_round()
            vote.now()  # a signal that came meanwhile is for whoever called
        return [Outcome(state, int(state.step), vote.signal) for state in states]


def alike(config: ExperimentConfig) -> ExperimentConfig:
    """`config` without what runs of one program may differ in."""
    return dataclasses.replace(
        config,
        name="",
        data=dataclasses.replace(config.data, seed=0),
        optimiser=dataclasses.replace(config.optimiser, learning_rate=1.0),
        train=dataclasses.replace(config.train, seed=0),
    )


def _require_one_program(configs: Sequence[ExperimentConfig]) -> None:
    """Raises `ValueError` where runs of `configs` cannot be one program."""
    first = configs[0]
    for other in configs[1:]:
        if changed := differences(alike(first), alike(other)):
            raise ValueError(
                f"{changed[0]}: must be equal, as runs of one program may differ in name, seeds "
                "and learning rate alone"
            )
    for axis, size in dataclasses.asdict(first.mesh).items():
        if size > 1:
            raise ValueError(f"mesh.{axis} = {size}: must be 1 where several runs are one program")


def decoder_blueprint(config: ExperimentConfig) -> Blueprint:
    """The blueprint of the decoder of `config`."""
    return blueprint(
        lambda rngs: Decoder(config.model, rngs=rngs), config.optimiser, config.train.steps
    )


def decoder_step(
    config: ExperimentConfig,
    plan: Blueprint,
    token_bytes: np.ndarray,
    peak: jax.Array | None = None,
) -> Callable[..., tuple[TrainState, dict[str, jax.Array]]]:
    """The training step of `config`, whose blueprint is `plan`; see `make_step`.

    `peak` takes the place of the optimiser's `learning_rate` and may be traced.
    """
    optimiser = plan.optimiser
    if peak is not None:
        optimiser = make_optimiser(config.optimiser, config.train.steps, plan.params, peak)
    return make_step(
        decoder_loss(plan.graphdef, gapless=True),
        functools.partial(update_balancing, config=config.model.moe),
        optimiser,
        learning_rate(config.optimiser, config.train.steps, peak),
        token_bytes,
        config.optimiser.qk_clip,
    )


@dataclasses.dataclass
class _Loop:
    """The steps of one call, and what falls due between them."""

    config: ExperimentConfig
    workdir: Path
    share: tuple[int, int]
    data: TrainIterator
    metrics: MetricsLog | None  # of the first process
    checkpoints: Checkpoints
    vote: StopVote
    probe: Callable[[TrainState, dict[str, jax.Array]], Record] | None
    alone: bool = True  # no other runs in its program
    leads: bool = True  # among those: it shows progress, and profiles

    def __post_init__(self) -> None:
        self._watch = Stopwatch()
        self._pending: tuple[int, dict[str, jax.Array]] | None = None
        self._profiling = False
        self._dropped = 0.0
        self._stages = self.config.data.schedule()
        self._flops_per_token = [
            flops_per_token(self.config.model, stage.sequence_length) for stage in self._stages
        ]

    def steps(
        self, state: TrainState, validate: Callable[[TrainState, int], dict[str, float]]
    ) -> Steps:
        """Asks for steps; the state after the last one, or after the one where a signal came."""
        train, start = self.config.train, int(state.step)
        borders = {stage.start for stage in self._stages[1:]}
        self._bar = tqdm(
            total=train.steps, initial=start, unit="step", dynamic_ncols=True,
            disable=self.metrics is None or not self.leads,
        )  # fmt: skip
        self._watch.start(start)
        with self._bar, contextlib.nullcontext() if self.alone else named(self.config.name):
            for step in range(start + 1, train.steps + 1):
                if step == start + 1 and self.vote.now():
                    break  # nothing to save, and compilation may take minutes
                self._profile(step, start)
                batch = self._place(next(self.data))
                self._measure(step, state, batch)
                state, metrics = yield step, state, batch
                self._settle()  # the step before; this one runs meanwhile
                self._pending = step, metrics
                last, stopped = step == train.steps, self.vote.take()
                if step == start + 1 or step - 1 in borders:
                    self._settle()
                    self._watch.start(step)  # compilation is no part of tokens/s
                due = train.eval_every and step % train.eval_every == 0
                if last or due or step in borders:
                    self._settle()
                    self._validate(step, validate(state, self.config.data.stage_of(step)))
                if last or stopped or step % train.checkpoint_every == 0:
                    self._settle()
                    self.checkpoints.save(state, self.data)
                    self._watch.start(step)
                if stopped:
                    break
        self._stop_profile()
        return state

    def _measure(self, step: int, state: TrainState, batch: dict[str, jax.Array]) -> None:
        """Probe the model that `step` starts from, on its batch, where that is due."""
        train = self.config.train
        if self.probe is None or (step % train.probe_every and step != train.steps):
            return
        self._settle()
        record = self.probe(state, batch)
        if self.metrics is not None:
            write_record(record_path(self.workdir, step), record)
        self._watch.start(step - 1)

    def _settle(self) -> None:
        """Wait for the pending step, and put its metrics on record where they are due."""
        if self._pending is None:
            return
        (step, metrics), self._pending = self._pending, None
        figures = {name: value.item() for name, value in jax.device_get(metrics).items()}
        self._bar.set_postfix_str(f"{figures['bits_per_byte']:.3f} bits/byte", refresh=False)
        self._bar.update()
        if "dropped_routes" in figures:  # since the last line
            self._dropped += figures["dropped_routes"]
            figures["dropped_routes"] = self._dropped
        fatal = self._dropped and not self.config.model.moe.allow_drops
        if step % self.config.train.log_every and step != self.config.train.steps and not fatal:
            return
        number = self.config.data.stage_of(step)
        record = self._place_of(step) | figures
        if rate := self._watch.rate(step):
            speed = rate * self._stages[number].tokens
            record["tokens_per_second"] = speed
            record["model_flops_per_second"] = speed * self._flops_per_token[number]
        self._write(step, record)
        dropped, self._dropped = self._dropped, 0.0
        check_drops(self.config.model.moe, dropped, f"step {step}")

    def _place_of(self, step: int) -> dict[str, float]:
        """What every record begins with: tokens so far, and the stage where there are several."""
        data = self.config.data
        place: dict[str, float] = {"tokens": data.tokens_after(step)}
        if len(self._stages) > 1:
            number = data.stage_of(step)
            length = self._stages[number].sequence_length
            place |= {"stage": number + 1, "sequence_length": length}
        return place

    def _validate(self, step: int, figures: dict[str, float]) -> None:
        self._write(step, self._place_of(step) | figures)
        if self.metrics is not None:
            bits, accuracy, *_ = figures.values()
            name = "" if self.alone else f"{self.config.name}, "
            tqdm.write(
                f"{name}step {step}: validation {bits:.3f} bits per byte, "
                f"{accuracy:.1%} of tokens right"
            )
        self._watch.start(step)

    def _write(self, step: int, record: dict[str, float]) -> None:
        if self.metrics is not None:
            self.metrics.write(step, record)

    def _place(self, batch: dict[str, np.ndarray]) -> dict[str, jax.Array]:
        """`[rows, T]` of this process to `[micro-batches, rows / micro-batches, T]` on the mesh.

        Neighbouring rows go to different micro-batches, however many processes share the rows.
        """
        parts = self.config.train.micro_batches
        split = {name: x.reshape(-1, parts, x.shape[1]).swapaxes(0, 1) for name, x in batch.items()}
        return placed(split, PartitionSpec(None, BATCH, SEQUENCE), self.share)

    def _profile(self, step: int, start: int) -> None:
        """Begin and end the profiler's window, or what is left of it, before `step` runs."""
        first = max(self.config.train.profile_start, 1)
        end = first + self.config.train.profile_steps
        if self.leads and step == max(first, start + 1) and step < end:
            jax.profiler.start_trace(self.workdir / "profile")
            self._profiling = True
        elif step == end:
            self._stop_profile()

    def _stop_profile(self) -> None:
        if self._profiling:
            self._profiling = False
            jax.profiler.stop_trace()


def _report(
    config: ExperimentConfig,
    workdir: Path,
    cache_dir: Path,
    state: TrainState,
) -> None:
    """The plot and the sample, for whoever looks at `workdir` afterwards."""
    data = config.data.during(config.data.schedule()[config.data.stage_of(config.train.steps)])
    baseline = None
    has_task = any(name.startswith(PREFIX) for name in config.data.sources)
    if leading() and config.data.tokenizer == "bytes" and not has_task:
        held_out = validation_batches(data, cache_dir, config.train.eval_batches)
        baseline = baseline_bits_per_byte(config.data, cache_dir, held_out)
        print(f"two-byte contexts: {baseline:.3f} bits per byte on the same held-out text")
    if leading():
        print(f"loss curve: {plot(workdir, baseline)}")
        if figures := plot_probes(workdir):
            print(f"probes: {', '.join(map(str, figures))}")
    if count := config.train.sample_tokens:
        tokenizer = load_corpus(config.data, cache_dir).tokenizer
        # One token at a time is no balanced load: sampling has room for any.
        moe = dataclasses.replace(config.model.moe, buffer_factor=0.0)
        roomy = dataclasses.replace(config, model=dataclasses.replace(config.model, moe=moe))
        sample = make_sampler(decoder_blueprint(roomy), tokenizer.vocab_size, TEMPERATURE)
        rows = int(np.prod([getattr(config.mesh, axis) for axis in BATCH]))
        one_row = dataclasses.replace(data, batch_size=1)
        (first,) = validation_batches(one_row, cache_dir, 1)
        real = first["segment_ids"][0, :PROMPT] > 0  # padding may end a row
        prompt = np.tile(first["inputs"][0, :PROMPT][real], (rows, 1))
        drawn = sample(state, prompt, count, state.rng)
        if not leading():
            return
        text = f"{tokenizer.decode(prompt[0])}▌{tokenizer.decode(drawn)}\n"
        (workdir / "sample.txt").write_text(text, "utf-8")
        print(f"sample, after held-out text up to ▌:\n{text}")
