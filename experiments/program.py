"""What the programs that train share: their caches, and errors that end in one line."""

from __future__ import annotations

import contextlib
import functools
import logging as python_logging
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import jax
from absl import app, flags, logging

CACHE = flags.DEFINE_string(
    "cache_dir", "~/.cache/k3jax", "Where tokenised corpora and compiled programs are kept."
)


def corpora() -> Path:
    """The cache of tokenised corpora; has jax keep what it compiles beside it."""
    cache = Path(CACHE.value).expanduser()
    if jax.config.jax_compilation_cache_dir is None:
        jax.config.update("jax_compilation_cache_dir", str(cache / "compiled"))
    return cache / "corpora"


def launch(run: Callable[[], int]) -> None:
    """Parses the flags, calls `run` and exits with what it returns, or with 2 for bad input."""
    sys.stdout.reconfigure(errors="replace")  # a sample may be any text, a terminal may be ASCII
    app.run(functools.partial(main, run))


def main(run: Callable[[], int], arguments: list[str]) -> int:
    """`run`, whose expected errors become one line; `arguments` are what no flag has taken."""
    verbose = flags.FLAGS["verbosity"].present
    if not verbose:  # libraries log at length the errors that are one line here
        logging.set_verbosity(logging.FATAL)
        logging.get_absl_handler().setFormatter(python_logging.Formatter("%(message)s"))
    python_logging.getLogger("k3jax").setLevel(python_logging.INFO)
    python_logging.getLogger("pallas_kernels").setLevel(python_logging.WARNING)
    try:
        if stray := arguments[1:]:
            raise ValueError(f"{' '.join(stray)}: not understood, each setting needs its own --set")
        return run()
    except BaseException as error:
        together = jax.distributed.is_initialized()
        lost = together and isinstance(error, jax.errors.JaxRuntimeError)
        expected = lost or isinstance(error, ValueError | OSError | MemoryError)
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
