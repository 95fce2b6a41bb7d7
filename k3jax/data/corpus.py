"""Sources of text and the documents in them.

A source is named in `DataConfig.sources`: `python:stdlib`, `python:site-packages`, a text file, a
folder (recursive) or a `.jsonl` file. What is a document depends on it:

| source | document |
|---|---|
| `python:stdlib`, `python:site-packages` | one `.py` file; test folders and caches are left out |
| folder | one text file; each line of its `.jsonl` files; hidden and binary files are left out |
| `.jsonl` file | one line: the text is `line[jsonl_field]`, `line["loss_mask"]` is optional |
| any other file | about 1/256 of it, cut at line ends, so that there is something to hold out |

Files come in a fixed order; empty documents are left out. Text is UTF-8, taken as it is.
"""

from __future__ import annotations

import codecs
import dataclasses
import hashlib
import json
import logging
import os
import sysconfig
from collections.abc import Iterator, Set
from pathlib import Path

import numpy as np

ALLOWED = (
    "must be python:stdlib, python:site-packages, a text file, a folder of text files or a "
    ".jsonl file"
)
LOSS_MASK = "loss_mask"  # the field of a .jsonl line
PIECES = 256  # documents that a single text file is cut into,
SHORTEST_PIECE = 512  # or fewer, of this many bytes

log = logging.getLogger("k3jax")

_NOT_SOURCE = {"__pycache__", "dist-packages", "idle_test", "site-packages", "test", "tests"}


@dataclasses.dataclass(frozen=True)
class Document:
    """One text, not empty, and where it was read (`origin`, for messages).

    `loss_mask`: bool, one entry per token of the text; None where all of them are learned.
    """

    text: str
    loss_mask: np.ndarray | None
    origin: str


@dataclasses.dataclass(frozen=True)
class Source:
    """The files of a source, in order. `root` is the folder (or file) they were found under.

    `strict`: a file that is not text is an error, not left out.
    """

    name: str
    root: Path
    files: tuple[Path, ...]
    strict: bool = False
    cut: bool = False  # one text file, cut into documents

    def digest(self) -> str:
        """Digest of all that decides the documents: names, order and content of the files."""
        total = hashlib.sha256(b"cut" if self.cut else b"whole")
        for path in self.files:
            try:
                with path.open("rb") as file:
                    content = hashlib.file_digest(file, "sha256").digest()
            except OSError as error:
                raise self._unreadable(path, error) from error
            total.update(os.fsencode(path.relative_to(self.root)) + b"\0" + content)
        return total.hexdigest()

    def documents(self, jsonl_field: str = "text") -> Iterator[Document]:
        """The documents, in order. Raises `ValueError` for files that cannot be read as such."""
        skipped = []
        for path in self.files:
            try:
                if path.suffix == ".jsonl":
                    yield from _lines(path, jsonl_field)
                elif self.cut:
                    yield from _pieces(path)
                elif text := _text(path.read_bytes()):
                    yield Document(text, None, str(path))
            except _NotTextError as error:
                if self.strict:
                    raise ValueError(f"data.sources = {self.name!r}: {error}") from error
                skipped.append(path)
            except OSError as error:
                raise self._unreadable(path, error) from error
        if skipped:
            log.warning(
                "%s: %d of %d files are not UTF-8 text and are left out, first %s",
                self.name,
                len(skipped),
                len(self.files),
                skipped[0],
            )

    def _unreadable(self, path: Path, error: OSError) -> ValueError:
        return ValueError(f"data.sources = {self.name!r}: cannot read {path}: {error.strerror}")


def find(name: str) -> Source:
    """The source that `name` names. Raises `ValueError` where there is none, or no file in it."""
    if name == "python:stdlib":
        source = _python(name, "stdlib")
    elif name == "python:site-packages":
        source = _python(name, "purelib")
    elif (root := Path(name).expanduser()).is_dir():
        source = Source(name, root, tuple(_walk(root)))
    elif root.is_file():
        source = Source(name, root, (root,), strict=True, cut=root.suffix != ".jsonl")
    else:
        raise ValueError(f"data.sources = {name!r}: no such source, {ALLOWED}")
    if not source.files:
        raise ValueError(f"data.sources = {name!r}: no files in {source.root}, {ALLOWED}")
    return source


class _NotTextError(Exception):
    """A file that is not UTF-8 text."""


def _python(name: str, key: str) -> Source:
    root = Path(sysconfig.get_paths()[key])
    return Source(name, root, tuple(_walk(root, _NOT_SOURCE, ".py")))


def _walk(root: Path, without: Set[str] = frozenset(), suffix: str = "") -> Iterator[Path]:
    """Regular files under `root`, in order, without hidden ones."""
    for folder, folders, files in os.walk(root, onerror=_refuse):
        folders[:] = sorted(n for n in folders if n not in without and not n.startswith("."))
        paths = (Path(folder, name) for name in sorted(files) if not name.startswith("."))
        yield from (path for path in paths if path.name.endswith(suffix) and path.is_file())


def _refuse(error: OSError) -> None:
    raise ValueError(f"data.sources: cannot read {error.filename}: {error.strerror}") from error


def _text(raw: bytes) -> str:
    if b"\0" in raw:
        raise _NotTextError("is binary: it has a zero byte")
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise _NotTextError(f"is not UTF-8 text: {error.reason} at byte {error.start}") from error


def _pieces(path: Path) -> Iterator[Document]:
    """A file cut at line ends into about `PIECES` documents; lines much longer are cut as well."""
    size = max(SHORTEST_PIECE, -(-path.stat().st_size // PIECES))
    decoder = codecs.getincrementaldecoder("utf-8")()
    with path.open("rb") as file:
        while True:
            start = file.tell()
            raw = file.read(size)
            raw += file.readline(size)
            if b"\0" in raw:
                raise _NotTextError("is binary: it has a zero byte")
            try:
                text = decoder.decode(raw, final=not raw)
            except UnicodeDecodeError as error:
                raise _NotTextError(
                    f"is not UTF-8 text: {error.reason} near byte {start + error.start}"
                ) from error
            if text:
                yield Document(text, None, f"{path} from byte {start}")
            if not raw:
                return


def _lines(path: Path, field: str) -> Iterator[Document]:
    with path.open("rb") as file:
        for number, raw in enumerate(file, 1):
            if not raw.strip():
                continue
            origin = f"{path}, line {number}"
            try:
                line = json.loads(raw)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{origin}: is not JSON: {error}") from error
            if not isinstance(line, dict) or not isinstance(line.get(field), str):
                has = [*line][:8] if isinstance(line, dict) else type(line).__name__
                raise ValueError(
                    f"data.jsonl_field = {field!r}: no such text in {origin}, which has {has}"
                )
            _check_encodable(line[field], origin)
            if line[field]:
                yield Document(line[field], _loss_mask(line.get(LOSS_MASK), origin), origin)


def _check_encodable(text: str, origin: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{origin}: is not UTF-8 text: {error.reason}, character {error.start}"
        ) from error


def _loss_mask(values: object, origin: str) -> np.ndarray | None:
    if values is None:
        return None
    if not isinstance(values, list) or not all(value in (0, 1) for value in values):
        raise ValueError(f"{origin}: {LOSS_MASK} must be a list of 0 and 1, one per token")
    return np.array(values, bool)
