"""Many processes as one run: how they join, what each is given, how they agree, which one writes.

Every process runs the same program on its own devices of one mesh. The first writes records and
plots; all of them write their shards of a checkpoint. What only one of them can know, that a signal
came or which checkpoint is intact, they settle by the largest number any of them holds, reduced on
the devices like everything else.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from k3jax.layers.documents import check_gapless
from k3jax.sharding import BATCH
from k3jax.train.signals import StopSignal

_NONE = np.iinfo(np.int32).min  # of a process that has nothing to say


def join(
    coordinator: str | None = None, processes: int | None = None, process: int | None = None
) -> None:
    """Make this process one of a run's; to be called before jax sees a device.

    Without arguments jax finds out from SLURM, Open MPI, GKE or a Cloud TPU pod who the others are.
    Otherwise all three are needed: `host:port` of the first process, how many there are, and the
    number of this one. Raises `ValueError` with one line where that fails.
    """
    given = [value is not None for value in (coordinator, processes, process)]
    if any(given) and not all(given):
        raise ValueError("--coordinator, --processes, --process: give all three, or none of them")
    if processes is not None and process is not None and not 0 <= process < processes:
        raise ValueError(f"--process = {process}: must be in [0, {processes})")
    if coordinator is not None and not re.fullmatch(r".+:\d+", coordinator):
        raise ValueError(f"--coordinator = {coordinator!r}: must read host:port")
    # jax would catch SIGTERM itself, for a service that is not used here.
    jax.config.update("jax_enable_preemption_service", False)
    try:
        jax.distributed.initialize(coordinator, processes, process)
    except (RuntimeError, ValueError) as error:
        whom = coordinator or "the processes of this job"
        reason = str(error).strip().splitlines()[0]
        raise ValueError(f"--coordinator: cannot join {whom}: {reason}") from error
    if not leading():
        logging.getLogger("k3jax").setLevel(logging.WARNING)


def leading() -> bool:
    """Whether this process is the one that writes."""
    return jax.process_index() == 0


def share_of_rows(mesh: Mesh) -> tuple[int, int]:
    """`(index, count)`: of `count` equal parts of a batch's rows, this process needs part `index`.

    Processes whose devices split tokens or weights but not rows need the same part. Raises
    `ValueError` for a mesh that leaves devices out, or whose processes do not hold whole parts.
    """
    if jax.process_count() == 1:
        return 0, 1
    if mesh.size != jax.device_count():
        raise ValueError(
            f"mesh.*: {mesh.size} devices, must be all {jax.device_count()} of the "
            f"{jax.process_count()} processes"
        )
    rows = int(np.prod([mesh.shape[axis] for axis in BATCH]))
    held = NamedSharding(mesh, PartitionSpec(BATCH)).addressable_devices_indices_map((rows,))
    mine = sorted({place for at in held.values() if at for place in range(rows)[at[0]]})
    first, size = mine[0], len(mine)
    if rows % size or first % size or mine != list(range(first, first + size)):
        raise ValueError(
            f"mesh.data, mesh.fsdp, mesh.expert: of {rows} parts of a batch process "
            f"{jax.process_index()} holds {mine}, must be neighbours that divide it"
        )
    return first // size, rows // size


def placed(
    batch: dict[str, np.ndarray], spec: PartitionSpec, share: tuple[int, int]
) -> dict[str, jax.Array]:
    """Batches of which this process has part `share` of the rows, as arrays laid out by `spec`.

    Raises `ValueError` for padding that is not at the ends of rows: programs count on that.
    """
    check_gapless(batch["segment_ids"])
    sharding = NamedSharding(jax.sharding.get_mesh(), spec)
    axis, (index, count) = tuple(spec).index(BATCH), share

    def one(x: np.ndarray) -> jax.Array:
        first = index * x.shape[axis]
        shape = (*x.shape[:axis], x.shape[axis] * count, *x.shape[axis + 1 :])

        def read(at: Any) -> np.ndarray:
            start, stop, _ = at[axis].indices(shape[axis])
            return x[(*at[:axis], slice(start - first, stop - first), *at[axis + 1 :])]

        return jax.make_array_from_callback(shape, sharding, read)

    return {name: one(x) for name, x in batch.items()}


def largest(values: np.ndarray | int) -> jax.Array:
    """The largest of all processes' int32 `values`, entry by entry; returns before it is known."""
    here, mesh = np.asarray(values, np.int32), jax.sharding.get_mesh()
    sharding = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    shape = (mesh.size, *here.shape)
    return _largest(jax.make_array_from_callback(shape, sharding, lambda _: here[None]))


@jax.jit
def _largest(stacked: jax.Array) -> jax.Array:
    return jnp.max(stacked, axis=0)


def first_says(fn: Callable[[], int]) -> int:
    """What `fn` returns in the first process, which alone calls it."""
    if jax.process_count() == 1:
        return fn()
    return int(largest(fn() if leading() else _NONE))


def anywhere(condition: bool) -> bool:
    """Whether `condition` holds in any process."""
    return condition if jax.process_count() == 1 else bool(largest(int(condition)))


def require_equal(what: str, text: str) -> None:
    """Raises `ValueError`, in every process, unless `text` is the same in all of them."""
    if jax.process_count() == 1:
        return
    digest = np.frombuffer(hashlib.sha256(text.encode()).digest(), np.int32) >> 1  # negatable
    high, low = np.asarray(largest(np.stack([digest, -digest])))
    if not np.array_equal(high, -low):
        raise ValueError(f"{what}: not the same in all {jax.process_count()} processes")


class StopVote:
    """Whether to stop, so that all processes do so after the same step.

    Each step votes, and knows the outcome of the vote before, whose collective has ended by then.
    """

    def __init__(self, stop: StopSignal):
        self._stop = stop
        self._pending: jax.Array | None = None
        self.signal: int | None = None  # agreed on

    def take(self) -> bool:
        """Vote; returns whether it is agreed to stop now."""
        if jax.process_count() == 1:
            self.signal = self._stop.received
            return self.signal is not None
        before, self._pending = self._pending, largest(self._stop.received or 0)
        if before is not None and self.signal is None:
            self.signal = int(before) or None
        return self.signal is not None

    def now(self) -> bool:
        """As `take`, with the outcome of this very vote."""
        self.take()
        return self.take()
