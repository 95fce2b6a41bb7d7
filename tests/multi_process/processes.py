"""Runs of `experiments.train` as several processes of this machine, over loopback."""

from __future__ import annotations

import dataclasses
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

from k3jax.train.metrics import read_metrics

SETTINGS = [
    "model.vocab_size=258",  # divides over two devices
    "model.d_model=16",
    "model.layers=1",
    "model.kda_to_full=0:1",
    "model.mla.heads=2",
    "model.moe.experts=0",
    "model.residual.kind=plain",
    "model.ffn.dense_width=16",
    "data.sequence_length=32",
    "data.batch_size=8",
    "train.micro_batches=2",
    "train.log_every=1",
    "train.eval_every=0",
    "train.eval_batches=1",
    "train.checkpoint_every=5",
    "train.sample_tokens=0",
]


@dataclasses.dataclass
class Job:
    """The processes of one run, each with `devices` CPU devices; ends with its context."""

    home: Path
    workdir: Path
    count: int
    devices: int
    settings: tuple[str, ...]
    last: tuple[str, ...] = ()  # of the last process alone

    def __enter__(self) -> Job:
        flags = f"--xla_force_host_platform_device_count={self.devices}"
        env = os.environ | {
            "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flags}",
            "JAX_PLATFORMS": "cpu",
            "JAX_DISABLE_MOST_OPTIMIZATIONS": "true",
        }
        command = [sys.executable, "-m", "experiments.train", "--config=nano"]
        command += [f"--workdir={self.workdir}", f"--cache_dir={self.home / 'cache'}"]
        chosen = [*SETTINGS, f"data.sources={self.home / 'text'}", *self.settings]
        command += [f"--set={setting}" for setting in chosen]
        place = [f"--coordinator=127.0.0.1:{_free_port()}", f"--processes={self.count}"]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        self.processes = [
            subprocess.Popen(
                [
                    *command,
                    *([*place, f"--process={i}"] if self.count > 1 else []),
                    *(f"--set={s}" for s in self.last if i == self.count - 1),
                ],
                env=env,
                **pipes,
            )
            for i in range(self.count)
        ]
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
            process.wait()

    def wait_for_step(self, step: int) -> None:
        """Until `step` is on record, or a process has ended."""
        while all(process.poll() is None for process in self.processes):
            if any(record["step"] >= step for record in read_metrics(self.workdir)):
                return
            time.sleep(0.05)

    def finish(self) -> tuple[list[int], list[str]]:
        """Exit codes and outputs, in the order of the processes."""
        outputs = [process.communicate(timeout=240)[0] for process in self.processes]
        return [process.returncode for process in self.processes], outputs


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]
