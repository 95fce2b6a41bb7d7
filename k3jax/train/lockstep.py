"""Several runs as one program: their steps are taken together, all else is each run's own.

A run is a generator that asks for one step at a time. Each round takes the next step of all runs
that are furthest behind, by one call of one compiled program; runs that are ahead, as they may be
after a kill, wait. A place in the program whose run waits or has ended is filled with a copy of
another, so that the program, and with it every bit of the result, does not depend on
interruptions.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterator, Sequence

import jax
import jax.numpy as jnp

from k3jax.sharding import spec_of, under_mesh
from k3jax.train.state import TrainState
from k3jax.train.step import Batch, Metrics

type Turn = tuple[int, TrainState, Batch]  # the number of the step that is asked for
type Steps = Generator[Turn, tuple[TrainState, Metrics], TrainState]
type Step = Callable[[TrainState, Batch], tuple[TrainState, Metrics]]
type StepOfAll = Callable[
    [tuple[TrainState, ...], tuple[Batch, ...]], tuple[list[TrainState], list[Metrics]]
]


def drive(
    runs: Sequence[Steps], step: StepOfAll, before_round: Callable[[], None]
) -> list[TrainState]:
    """Take the steps of all `runs` to their ends; the states that they return.

    `step` takes as many states and batches as there are runs, and may consume the states.
    """
    turns: dict[int, Turn] = {}
    ended: dict[int, TrainState] = {}

    def go_on(number: int, given: tuple[TrainState, Metrics] | None) -> None:
        try:
            turns[number] = next(runs[number]) if given is None else runs[number].send(given)
        except StopIteration as end:
            turns.pop(number, None)
            ended[number] = end.value

    before_round()
    for number in range(len(runs)):
        go_on(number, None)
    while turns:
        behind = min(turn[0] for turn in turns.values())
        active = [number for number, turn in turns.items() if turn[0] == behind]
        states, batches = [], []
        for number in range(len(runs)):
            _, state, batch = turns[number if number in active else active[0]]
            states.append(state if number in active else jax.tree.map(jnp.copy, state))
            batches.append(batch)
        new, metrics = step(tuple(states), tuple(batches))
        before_round()
        for number in active:
            go_on(number, (new[number], metrics[number]))
    return [ended[number] for number in range(len(runs))]


@contextlib.contextmanager
def named(run: str) -> Iterator[None]:
    """Within it an error, which ends all runs of a program, says that it is of `run`.

    An expected one says so in its line, any other one in a note.
    """
    try:
        yield
    except (ValueError, OSError) as error:
        kind = ValueError if isinstance(error, ValueError) else OSError
        raise kind(f"{run}: {error}") from error
    except Exception as error:
        error.add_note(f"in {run}")
        raise


def one_at_a_time(step: Step) -> StepOfAll:
    """`step` for a single run."""

    def of_all(states: tuple[TrainState, ...], batches: tuple[Batch, ...]):
        (state,), (batch,) = states, batches
        new, metrics = step(state, batch)
        return [new], [metrics]

    return of_all


def vmapped(step: Callable[..., tuple[TrainState, Metrics]], each: jax.Array) -> StepOfAll:
    """`step(state, batch, value)` of as many runs as `each` has values, compiled on first call.

    It consumes (donates) the states. Every array must be whole on one device.
    """

    def of_all(states: tuple[TrainState, ...], batches: tuple[Batch, ...]):
        stacked = [jax.tree.map(lambda *x: jnp.stack(x), *parts) for parts in (states, batches)]
        found = jax.vmap(step)(*stacked, each)
        parts = [jax.tree.map(lambda x, i=i: x[i], found) for i in range(len(states))]
        new = [_laid_out_as(old, part[0]) for old, part in zip(states, parts, strict=True)]
        return new, [part[1] for part in parts]

    return jax.jit(of_all, donate_argnums=0)


def _laid_out_as(old: TrainState, new: TrainState) -> TrainState:
    """`new` with the types of `old`, so that the next call is of the same program."""
    if not under_mesh():
        return new
    return jax.tree.map(lambda o, n: jax.sharding.reshard(n, spec_of(o)), old, new)
