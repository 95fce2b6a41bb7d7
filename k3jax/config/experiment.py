"""Settings of an experiment around its model: data, optimiser, training loop, mesh."""

from __future__ import annotations

import dataclasses
import re
from typing import Literal

from k3jax.config.checks import choices, positive, require
from k3jax.config.model import ModelConfig

Schedule = Literal["cosine", "wsd"]
OptimiserRule = Literal["adamw", "muon"]


@dataclasses.dataclass(frozen=True)
class Stage:
    """A stretch of training, after `start` steps, with rows and batches of one size."""

    start: int
    sequence_length: int
    batch_size: int

    @property
    def tokens(self) -> int:
        """Tokens of one step."""
        return self.sequence_length * self.batch_size


def parse_stage(text: str) -> Stage:
    """`"20000:65536x128"`: after 20000 steps, 128 rows of 65536 tokens a step."""
    found = re.fullmatch(r"\s*(\d+):(\d+)x(\d+)\s*", text)
    numbers = [int(part) for part in found.groups()] if found else [0]
    require(
        min(numbers) > 0,
        "data.stages",
        text,
        "must read steps:lengthxrows, like 20000:65536x128, all positive",
    )
    return Stage(*numbers)


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """Where tokens come from and how they are packed into rows.

    A source is `python:stdlib` (the source code of the running Python's standard library),
    `python:site-packages` (that of the installed packages), a text file, a folder of text files, or
    a `.jsonl` file whose `jsonl_field` holds the text; or a task, `task:recall:pairs=32`
    (`k3jax.data.tasks`).

    Training begins with `batch_size` rows of `sequence_length` tokens a step; `stages` say after
    how many steps that changes, and to what (`parse_stage`). The learning rate knows steps alone.
    """

    sources: tuple[str, ...] = ("python:stdlib",)
    weights: tuple[float, ...] = ()  # one per source; empty: in proportion to their tokens
    tokenizer: str = (
        "bytes"  # or symbols:N, a Hugging Face tokenizer.json, its folder, a .tiktoken file
    )
    jsonl_field: str = "text"
    sequence_length: int = 256
    batch_size: int = 8  # rows per optimiser step, over all micro-batches
    stages: tuple[str, ...] = ()  # longer rows, later: "steps:lengthxrows" each
    validation_fraction: float = 0.05  # of documents, chosen by the hash of their text
    seed: int = 0

    def __post_init__(self) -> None:
        positive(self, "data", "sequence_length", "batch_size")
        require(
            len(self.sources) > 0, "data.sources", self.sources, "must name at least one source"
        )
        require(
            len(self.weights) in (0, len(self.sources)),
            "data.weights",
            self.weights,
            f"must be empty or have one entry for each of the {len(self.sources)} sources",
        )
        require(
            not self.weights or all(w > 0 for w in self.weights),
            "data.weights",
            self.weights,
            "must be positive",
        )
        require(
            0 < self.validation_fraction < 1,
            "data.validation_fraction",
            self.validation_fraction,
            "must lie between 0 and 1",
        )
        starts = [stage.start for stage in self.schedule()]
        require(
            starts == sorted(set(starts)), "data.stages", self.stages, "must be in rising order"
        )

    def schedule(self) -> tuple[Stage, ...]:
        """All stages in order; the first begins at step 0."""
        first = Stage(0, self.sequence_length, self.batch_size)
        return (first, *map(parse_stage, self.stages))

    def stage_of(self, step: int) -> int:
        """The number, from 0, of the stage in which step `step` (from 1) is taken."""
        return max(i for i, stage in enumerate(self.schedule()) if stage.start < max(step, 1))

    def tokens_after(self, steps: int) -> int:
        """How many tokens `steps` steps have taken, padding included."""
        stages = self.schedule()
        ends = [*(stage.start for stage in stages[1:]), steps]
        return sum(
            max(min(end, steps) - stage.start, 0) * stage.tokens
            for stage, end in zip(stages, ends, strict=True)
        )

    def during(self, stage: Stage) -> DataConfig:
        """The same data in rows and batches of `stage` alone."""
        return dataclasses.replace(
            self, sequence_length=stage.sequence_length, batch_size=stage.batch_size, stages=()
        )


@dataclasses.dataclass(frozen=True)
class OptimiserConfig:
    """AdamW everywhere (`adamw`), or Muon for matrices and AdamW for the rest (`muon`)."""

    kind: OptimiserRule = "muon"
    learning_rate: float = 2e-3
    schedule: Schedule = "cosine"
    warmup_fraction: float = 0.01  # of all steps
    decay_fraction: float = 0.2  # of all steps, the last stretch of wsd
    final_fraction: float = 0.1  # of the peak rate, at the last step
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    muon_momentum: float = 0.95
    muon_per_head: bool = True  # one matrix per head of Q, K, V, gates and latents (K3R §2.5)
    qk_clip: float = 100.0  # largest attention logit, kept by scaling weights back; 0: no limit
    clip_norm: float = 1.0  # global gradient norm; 0 turns clipping off

    def __post_init__(self) -> None:
        choices(self, "optimiser", kind=OptimiserRule, schedule=Schedule)
        require(
            self.learning_rate > 0, "optimiser.learning_rate", self.learning_rate, "must be > 0"
        )
        for name in ("warmup_fraction", "decay_fraction", "final_fraction"):
            value = getattr(self, name)
            require(0 <= value <= 1, f"optimiser.{name}", value, "must lie in [0, 1]")
        for name in ("beta1", "beta2", "muon_momentum"):
            value = getattr(self, name)
            require(0 <= value < 1, f"optimiser.{name}", value, "must lie in [0, 1)")
        for name in ("weight_decay", "clip_norm", "qk_clip"):
            value = getattr(self, name)
            require(value >= 0, f"optimiser.{name}", value, "must not be negative")
        require(self.eps > 0, "optimiser.eps", self.eps, "must be > 0")


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """The loop: how long, how often, and what to keep."""

    steps: int = 300
    micro_batches: int = 1  # gradient accumulation
    seed: int = 0
    log_every: int = 10
    eval_every: int = 100  # 0: only after the last step
    eval_batches: int = 8
    probe_every: int = 0  # steps whose insides are measured, and the last; 0: none
    checkpoint_every: int = 100
    keep: int = 3  # newest checkpoints kept
    keep_every: int = 0  # steps whose checkpoints are kept for good; 0: none
    sample_tokens: int = 200  # generated after the last step; 0: none
    tensorboard: bool = False
    profile_start: int = 0  # first step of the profiler's window
    profile_steps: int = 0  # its length; 0: no profile

    def __post_init__(self) -> None:
        positive(
            self,
            "train",
            "steps",
            "micro_batches",
            "log_every",
            "eval_batches",
            "checkpoint_every",
            "keep",
        )
        for name in (
            "eval_every",
            "probe_every",
            "keep_every",
            "sample_tokens",
            "profile_start",
            "profile_steps",
        ):
            value = getattr(self, name)
            require(value >= 0, f"train.{name}", value, "must not be negative")
        require(self.steps < 2**31, "train.steps", self.steps, "must be below 2^31")
        require(0 <= self.seed < 2**32, "train.seed", self.seed, "must be in [0, 2^32)")


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """Devices along each mesh axis; their product is the number of devices used."""

    data: int = 1
    fsdp: int = 1
    expert: int = 1
    context: int = 1
    tensor: int = 1

    def __post_init__(self) -> None:
        positive(self, "mesh", *(field.name for field in dataclasses.fields(self)))


@dataclasses.dataclass(frozen=True)
class ExperimentConfig:
    """One experiment: all that decides its numbers."""

    name: str = "nano"
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    optimiser: OptimiserConfig = OptimiserConfig()
    train: TrainConfig = TrainConfig()
    mesh: MeshConfig = MeshConfig()

    def __post_init__(self) -> None:
        experts, owners = self.model.moe.experts, self.mesh.expert
        require(
            experts % owners == 0,
            "mesh.expert",
            owners,
            f"must divide moe.experts = {experts}",
        )
        first, *later = self.data.schedule()
        parts, rows = self.train.micro_batches, first.batch_size
        require(
            rows % parts == 0, "train.micro_batches", parts, f"must divide data.batch_size = {rows}"
        )
        self._fits_mesh("data.batch_size", first.batch_size, "data.sequence_length", first)
        for text, stage in zip(self.data.stages, later, strict=True):
            rows = stage.batch_size
            require(
                rows % parts == 0,
                "data.stages",
                text,
                f"its {rows} rows must divide by train.micro_batches = {parts}",
            )
            self._fits_mesh("data.stages", text, "data.stages", stage)

    def _fits_mesh(self, rows_name: str, value: int | str, length_name: str, stage: Stage) -> None:
        rows, length = stage.batch_size // self.train.micro_batches, stage.sequence_length
        shards = self.mesh.data * self.mesh.fsdp * self.mesh.expert
        require(
            rows % shards == 0,
            rows_name,
            value,
            f"the {rows} rows of a micro-batch must divide by the {shards} of "
            "mesh.data x mesh.fsdp x mesh.expert",
        )
        require(
            length % self.mesh.context == 0,
            length_name,
            length,
            f"must divide by mesh.context = {self.mesh.context}",
        )
