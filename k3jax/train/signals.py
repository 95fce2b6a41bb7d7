"""Leaving in good order: a signal asks the loop to stop, and the loop decides when."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType


class StopSignal:
    """Within its context SIGTERM, and the first SIGINT, only set `received`.

    A second SIGINT interrupts as usual.
    """

    def __init__(self) -> None:
        self.received: int | None = None

    def __enter__(self) -> StopSignal:
        self._before = {
            number: signal.signal(number, self._note) for number in (signal.SIGTERM, signal.SIGINT)
        }
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = number
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, self._before[signal.SIGINT])
