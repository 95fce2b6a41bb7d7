"""Flags that several programs have; a process defines each once, hence the functions."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import jax
from absl import flags


@functools.cache
def repeats() -> flags.FlagHolder[int]:
    """How often a benchmark measures."""
    return flags.DEFINE_integer("repeats", 10, "Of each measurement; the median counts.")


def measurements() -> int:
    """The value of `--repeats`."""
    if repeats().value < 1:
        raise ValueError(f"--repeats = {repeats().value}: must be at least 1")
    return repeats().value


@functools.cache
def topology() -> flags.FlagHolder[str | None]:
    """A TPU that need not be there."""
    return flags.DEFINE_string("topology", None, "Generation and shape, such as v5p:4x4x4.")


@functools.cache
def json_file() -> flags.FlagHolder[str | None]:
    """Where a program's figures go besides the screen."""
    return flags.DEFINE_string("json", None, "Also write everything to this file.")


def write_json(found: Any) -> None:
    """Writes `found` where `--json` says, if it does."""
    if path := json_file().value:
        Path(path).write_text(json.dumps(found, indent=1) + "\n")


@functools.cache
def cache_dir() -> flags.FlagHolder[str]:
    """Where corpora and compiled programs are kept."""
    what = "Where tokenised corpora and compiled programs are kept."
    return flags.DEFINE_string("cache_dir", "~/.cache/k3jax", what)


def corpora() -> Path:
    """The cache of tokenised corpora; has jax keep what it compiles beside it."""
    cache = Path(cache_dir().value).expanduser()
    if jax.config.jax_compilation_cache_dir is None:
        jax.config.update("jax_compilation_cache_dir", str(cache / "compiled"))
    return cache / "corpora"
