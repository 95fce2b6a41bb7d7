"""How programs begin and end: parsed flags, and errors in one line."""

from __future__ import annotations

import contextlib
import functools
import logging as python_logging
import os
import sys
import traceback
from collections.abc import Callable

import jax
from absl import app, flags, logging

EXPECTED = (ValueError, OSError, MemoryError, ModuleNotFoundError)


def launch(run: Callable[[], int], *also: type[Exception]) -> None:
    """Parses the flags, calls `run` and exits with what it returns, or with 2 for bad input.

    Errors of `EXPECTED` and `also` are bad input.
    """
    sys.stdout.reconfigure(errors="replace")  # a sample may be any text, a terminal may be ASCII
    app.run(functools.partial(main, run, also=also))


def main(
    run: Callable[[], int], arguments: list[str], also: tuple[type[Exception], ...] = ()
) -> int:
    """`run`, whose expected errors become one line; `arguments` are what no flag has taken."""
    verbose = flags.FLAGS["verbosity"].present
    if not verbose:  # libraries log at length the errors that are one line here
        logging.set_verbosity(logging.FATAL)
        logging.get_absl_handler().setFormatter(python_logging.Formatter("%(message)s"))
    python_logging.getLogger("k3jax").setLevel(python_logging.INFO)
    python_logging.getLogger("pallas_kernels").setLevel(python_logging.WARNING)
    try:
        if stray := arguments[1:]:
            raise ValueError(f"{' '.join(stray)}: not understood, each setting needs a --flag")
        return run()
    except BaseException as error:
        together = jax.distributed.is_initialized()
        lost = together and isinstance(error, jax.errors.JaxRuntimeError)
        expected = lost or isinstance(error, (*EXPECTED, *also))
        if not together and (verbose or not expected):
            raise
        line = str(error).splitlines()[0] if lost else str(error)
        where = f"process {jax.process_index()}: stopped, " if lost else ""
        with contextlib.suppress(OSError):  # whoever read the output may be gone too
            if verbose or not expected:
                traceback.print_exc()
            print(f"error: {where}{line}", file=sys.stderr, flush=True)
        if together:  # leaving in good order would mean to wait for the others
            os._exit(2)
        return 2
