"""Checkpoints: written in the background, whole or not at all, and checked before they are used.

orbax writes a step into a temporary directory and renames it when all is there. Just before the
rename a record joins it, `record.json`: the configuration and the SHA-256 of every file. A step
directory that does not agree with its record is put aside with a line saying so, and the one before
it is used.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import json
import logging
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from orbax.checkpoint import v1 as ocp

from k3jax.config import ExperimentConfig, TrainConfig
from k3jax.data.tokens import file_digest
from k3jax.flags import differences, from_json, to_json
from k3jax.train.hosts import anywhere, first_says, leading
from k3jax.train.state import TrainState
from k3jax.train.workdir import changed_for_life

log = logging.getLogger("k3jax")

RECORD = "record.json"
PART = ".orbax-checkpoint-tmp"  # orbax's suffix of a directory that is still being written
DAMAGED = ".damaged"
# orbax's list of what a checkpoint has, with times added at the end
MANIFEST = "_CHECKPOINT_METADATA"
_NO_STEP = -1


class Checkpoints:
    """The checkpoints of one run, in `directory`; leaving the context waits for writes.

    Keeps the newest `train.keep`, and for good those at multiples of `train.keep_every`.
    """

    def __init__(self, directory: Path, config: ExperimentConfig):
        self.directory, self._config = directory.absolute(), config  # orbax asks for absolute paths
        self._writing: tuple[int, Any] | None = None
        first_says(self._prepare)
        options = ocp.Context()
        # A closure, since orbax copies its options deeply, and a bound method with its object.
        options.async_options.post_finalization_callback = lambda: self._seal()
        self._orbax = ocp.training.Checkpointer(
            self.directory,
            context=options,
            preservation_policy=_preservation(config.train),
            cleanup_tmp_directories=True,
        )

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self.wait()
        finally:
            if kind is None or jax.process_count() == 1:  # else it would wait for the others
                with contextlib.suppress(Exception):  # raises a failed write's error once more
                    self._orbax.close()

    def _prepare(self) -> int:
        """Make the directory, and put aside what orbax would take for steps and is none."""
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OSError(f"{self.directory}: cannot be used: {error.strerror}") from error
        for path in sorted(self.directory.iterdir()):
            if PART in path.name:
                log.warning("checkpoint %s skipped: half-written", path.name.partition(".")[0])
            elif path.name.isdecimal() and path.name != str(int(path.name)):
                log.warning("checkpoint %s skipped: not the name of a step", path.name)
                _put_aside(path)
        return 0

    def steps(self) -> list[int]:
        """The steps that have a finished checkpoint, ascending."""
        return sorted(int(path.name) for path in self.directory.iterdir() if path.name.isdecimal())

    def save(self, state: TrainState, data: Any) -> None:
        """Begin to write `state` and the position of `data`, an iterator that orbax can save.

        Returns as soon as the arrays are copied off the device. Raises `OSError` with one line if
        the write before this one failed; nothing can be saved after that.
        """
        self.wait()
        step = int(state.step)
        try:
            response = self._orbax.save_checkpointables_async(
                step, {"state": _named(state), "data": data}, force=True
            )
        except Exception as error:
            raise self._failure(step, error) from error
        self._writing = (step, response)

    def wait(self) -> None:
        """Return when nothing is being written; raises `OSError` with one line if that failed."""
        if self._writing is None:
            return
        (step, response), self._writing = self._writing, None
        try:
            response.result()
        except Exception as error:
            raise self._failure(step, error) from error

    def restore(self, abstract: TrainState, data: Any) -> TrainState | None:
        """The newest intact checkpoint, in the shapes and layout of `abstract`; None without one.

        Moves `data` to the saved position. Damaged checkpoints are renamed, with a line each.
        Raises `ValueError` for an intact checkpoint of another configuration.
        """
        while (step := first_says(self._newest)) > _NO_STEP:
            path, problem = self.directory / str(step), ""
            self._orbax.reload()
            self._refuse_other(path, step, abstract)
            try:
                leaves = self._load(step, state=_named(abstract))
            except Exception as error:
                problem = _first_line(error)
            if not anywhere(bool(problem)):
                self._load(step, data=data)
                return _unnamed(abstract, leaves)
            if leading():
                self._skip(step, problem or "not readable in another process")
        return None

    def _newest(self) -> int:
        """The newest step whose files are intact; those that are not are put aside."""
        for step in reversed(self.steps()):
            problem = _damage(self.directory / str(step))
            if problem is None:
                return step
            self._skip(step, problem)
        return _NO_STEP

    def _skip(self, step: int, problem: str) -> None:
        log.warning("checkpoint %d skipped: %s", step, problem)
        _put_aside(self.directory / str(step))

    def _load(self, step: int, **item: Any) -> Any:
        (name,) = item
        try:
            return self._orbax.load_checkpointables(step, item)[name]
        except Exception as error:
            cause: BaseException = error
            while cause.__cause__ is not None:  # orbax wraps what went wrong in its own terms
                cause = cause.__cause__
            raise cause from None

    def _refuse_other(self, path: Path, step: int, abstract: TrainState) -> None:
        saved = self._orbax.checkpointables_metadata(step).metadata["state"]
        was = {name: _describe(leaf) for name, leaf in saved.items()}
        now = {name: _describe(leaf) for name, leaf in _named(abstract).items()}
        leaves = [
            f"{name}: {was.get(name, 'absent')}, now {now.get(name, 'absent')}"
            for name in sorted(was | now)
            if was.get(name) != now.get(name)
        ]
        config = from_json(ExperimentConfig, json.loads((path / RECORD).read_text())["config"])
        settings = changed_for_life(config, self._config)
        if not leaves and not settings:
            return
        settings += differences(config.optimiser, self._config.optimiser, "optimiser.")
        differing = "; ".join(_some(lines) for lines in (settings, leaves) if lines)
        raise ValueError(f"checkpoint {path} is of another configuration: {differing}")

    def _seal(self) -> None:
        """Add the record to the step directory that orbax is about to rename."""
        if not leading():
            return
        # orbax writes its manifest in one more thread, which it waits for after this callback only.
        self._orbax._manager._checkpointer._metadata_store.wait_until_finished()
        for part in filter(Path.is_dir, self.directory.glob(f"[0-9]*{PART}*")):
            record = {
                "step": int(part.name.partition(".")[0]),
                "config": to_json(self._config),
                "items": _items(part),
                "files": _digests(part),
            }
            record["digest"] = _sha256(json.dumps(record).encode())
            (part / RECORD).write_text(json.dumps(record))

    def _failure(self, step: int, error: Exception) -> OSError:
        full = getattr(error, "errno", None) == errno.ENOSPC or "No space left" in str(error)
        reason = "no space left on the disk" if full else _first_line(error)
        intact = ", ".join(map(str, self.steps())) or "none"
        return OSError(
            f"checkpoint {step} not written to {self.directory}: {reason}; intact ones: {intact}"
        )


def _preservation(config: TrainConfig) -> Any:
    policies = ocp.training.preservation_policies
    kept = [policies.LatestN(config.keep)]
    if config.keep_every:
        kept.append(policies.EveryNSteps(config.keep_every))
    return policies.AnyPreservationPolicy(kept)


def _named(state: TrainState) -> dict[str, Any]:
    """The leaves of `state` by path, `params/embedding/value`; the key as its raw numbers."""
    state = dataclasses.replace(state, rng=_raw_key(state.rng))
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(state)
    }


def _unnamed(abstract: TrainState, leaves: dict[str, Any]) -> TrainState:
    order = [leaves[name] for name in _named(abstract)]
    state = jax.tree.unflatten(jax.tree.structure(abstract), order)
    return dataclasses.replace(state, rng=jax.random.wrap_key_data(state.rng))


def _raw_key(key: Any) -> Any:
    if not isinstance(key, jax.ShapeDtypeStruct):
        return jax.random.key_data(key)
    raw = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(key.shape, key.dtype))
    return jax.ShapeDtypeStruct(raw.shape, raw.dtype, sharding=key.sharding)


def _damage(path: Path) -> str | None:
    """What is wrong with a finished checkpoint's files, or None."""
    try:
        record = json.loads((path / RECORD).read_bytes())
        digest = record.pop("digest")
        if digest != _sha256(json.dumps(record).encode()):
            return f"{RECORD} is damaged"
        if record["step"] != int(path.name):
            return f"it is that of step {record['step']}"
        if _items(path) != record["items"]:
            return f"{MANIFEST} is damaged"
        for name, expected in record["files"].items():
            if not (path / name).is_file():
                return f"{name} is missing"
            if file_digest(path / name) != expected:
                return f"{name} is damaged"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"damaged or missing: {_first_line(error)}"
    return None


def _items(path: Path) -> dict[str, str]:
    """What orbax notes about the parts of a checkpoint; the times beside it change later."""
    return json.loads((path / MANIFEST).read_bytes())["item_handlers"]


def _digests(directory: Path) -> dict[str, str]:
    """The digest of each file in the folders of `directory`."""
    files = sorted(path for path in directory.glob("*/**/*") if path.is_file())
    return {str(path.relative_to(directory)): file_digest(path) for path in files}


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _put_aside(path: Path) -> None:
    aside = path.with_name(path.name + DAMAGED)
    if aside.is_dir() and not aside.is_symlink():
        shutil.rmtree(aside)
    else:
        aside.unlink(missing_ok=True)
    path.rename(aside)


def _describe(leaf: Any) -> str:
    return f"{jnp.dtype(leaf.dtype).name}{list(leaf.shape)}"


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]


def _some(lines: list[str], most: int = 8) -> str:
    more = f"; and {len(lines) - most} more" if len(lines) > most else ""
    return "; ".join(lines[:most]) + more
