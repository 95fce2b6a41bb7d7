"""Text to token ids and back: bytes, or a tokenizer's local files.

Every document is framed by its `bos_id` before and its `eos_id` after it, which
`k3jax.data.packing` adds: the first token of a text is predictable, and so is its end. Both may be
the same id. `data.tokenizer` is one of

- `bytes`: 0 to 255 are UTF-8 bytes, 256 is bos and eos; the vocabulary is 257;
- `symbols:N`: N symbols for generated tasks (`k3jax.data.tasks`), and N is bos and eos;
- a Hugging Face `tokenizer.json`, or its folder: bos and eos are the `bos_token` and `eos_token` of
  the `tokenizer_config.json` beside it, one of them for both where only one is named; where none
  is, the id after the last;
- a `.tiktoken` file: the ids are ranks, bos and eos the id after the last.

A `.tiktoken` file has no split pattern; that of `cl100k_base` is used.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import importlib
import json
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import numpy as np

# GPT-4's rule: contractions, words with one leading mark, up to three digits, marks, white space.
SPLIT_PATTERN = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
)


SYMBOLS = "symbols:"
MOST_SYMBOLS = 1 << 20


class Tokenizer(Protocol):
    """What the pipeline needs to know of a tokenizer.

    `fingerprint` changes with its content. `token_bytes [vocab_size]` int32: the bytes of text a
    token stands for, 0 for bos, eos and other special tokens; bits per byte is the sum of -log2 p
    over targets, eos included, divided by the sum of their `token_bytes`. `dtype`: the narrowest
    unsigned type that holds the tokens of text.
    """

    fingerprint: str
    vocab_size: int
    bos_id: int
    eos_id: int
    token_bytes: np.ndarray
    dtype: np.dtype

    def encode(self, text: str) -> np.ndarray:
        """Token ids `[n]` of `text`, without bos and eos; special tokens in it are plain text."""

    def decode(self, ids: Iterable[int]) -> str:
        """Text of `ids`, special ones left out; bytes that are no UTF-8 become U+FFFD."""


def load_tokenizer(name: str) -> Tokenizer:
    """The tokenizer `name` of `DataConfig.tokenizer`; raises `ValueError` where there is none."""
    if name == "bytes":
        return ByteTokenizer()
    if name.startswith(SYMBOLS):
        return SymbolTokenizer(name)
    path = Path(name).expanduser()
    if path.is_dir():
        path = path / "tokenizer.json"
    if not path.is_file() or path.suffix not in (".json", ".tiktoken"):
        raise ValueError(
            f"data.tokenizer = {name!r}: must be bytes, symbols:N, or the path of a "
            "tokenizer.json, of its folder or of a .tiktoken file"
        )
    return (TiktokenTokenizer if path.suffix == ".tiktoken" else HuggingFaceTokenizer)(path)


def check_vocab(tokenizer: Tokenizer, vocab_size: int) -> None:
    """Raises `ValueError` where a model of `vocab_size` tokens is too small for `tokenizer`."""
    if vocab_size < tokenizer.vocab_size:
        raise ValueError(
            f"model.vocab_size = {vocab_size}: must be at least {tokenizer.vocab_size}, the "
            "tokens of data.tokenizer"
        )


class ByteTokenizer:
    """UTF-8 bytes; 256 stands before and after each document."""

    fingerprint = "bytes"
    vocab_size = 257
    bos_id = eos_id = 256
    token_bytes = np.repeat(np.array([1, 0], np.int32), [256, 1])
    dtype = np.dtype(np.uint8)

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode(), np.uint8)

    def decode(self, ids: Iterable[int]) -> str:
        return bytes(i for i in map(int, ids) if i < 256).decode(errors="replace")


class SymbolTokenizer:
    """`symbols:N`: ids without text, of which tasks are made; each counts as one byte."""

    def __init__(self, name: str) -> None:
        digits = name.removeprefix(SYMBOLS)
        if not digits.isdecimal() or not 1 <= int(digits) <= MOST_SYMBOLS:
            raise ValueError(
                f"data.tokenizer = {name!r}: must read symbols:N, with N from 1 to {MOST_SYMBOLS}"
            )
        self.fingerprint, count = name, int(digits)
        self.vocab_size, self.bos_id, self.eos_id = count + 1, count, count
        self.token_bytes = np.repeat(np.array([1, 0], np.int32), [count, 1])
        self.dtype = np.min_scalar_type(count)

    def encode(self, text: str) -> np.ndarray:
        raise ValueError(f"data.tokenizer = {self.fingerprint!r}: knows no text, only tasks")

    def decode(self, ids: Iterable[int]) -> str:
        return " ".join(str(i) for i in map(int, ids) if i < self.bos_id)


class HuggingFaceTokenizer:
    """A `tokenizer.json`, read by the `tokenizers` package."""

    def __init__(self, path: Path) -> None:
        library = _library("tokenizers", path)
        try:
            content = path.read_bytes()
            spec = json.loads(content)
            self._tokenizer = library.Tokenizer.from_str(content.decode())
            if not self._tokenizer.get_vocab_size():
                raise ValueError("no tokens in it")
        except Exception as error:  # the package raises bare exceptions
            raise ValueError(f"data.tokenizer = '{path}': cannot be read: {error}") from error
        self._path = path
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True

        pieces = {
            i: piece for piece, i in self._tokenizer.get_vocab(with_added_tokens=True).items()
        }
        added = {token["id"]: token for token in spec.get("added_tokens") or ()}
        special = {i for i, token in added.items() if token.get("special")}
        last = max(pieces)
        self.bos_id, self.eos_id = _frame(path, {piece: i for i, piece in pieces.items()}, last + 1)
        self.vocab_size = max(last, self.bos_id, self.eos_id) + 1
        self.dtype = np.min_scalar_type(last)
        self.token_bytes = np.zeros(self.vocab_size, np.int32)
        byte_level = '"ByteLevel"' in json.dumps(spec.get("decoder"))
        for i, piece in pieces.items():
            if i not in special and i not in (self.bos_id, self.eos_id):
                self.token_bytes[i] = _piece_bytes(piece, byte_level and i not in added)
        self._special = special | {self.bos_id, self.eos_id}
        self.fingerprint = f"tokenizers-{hashlib.sha256(content).hexdigest()}"

    def encode(self, text: str) -> np.ndarray:
        try:
            ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        except Exception as error:
            raise ValueError(
                f"data.tokenizer = '{self._path}': cannot encode {text[:20]!r}...: {error}"
            ) from error
        return np.array(ids, self.dtype)

    def decode(self, ids: Iterable[int]) -> str:
        kept = [i for i in map(int, ids) if i < self.vocab_size and i not in self._special]
        return self._tokenizer.decode(kept, skip_special_tokens=False)


class TiktokenTokenizer:
    """A `.tiktoken` file (a token in base64 and its rank on each line), read by `tiktoken`."""

    def __init__(self, path: Path) -> None:
        library = _library("tiktoken", path)
        content = path.read_bytes()
        try:
            fields = (line.split() for line in content.splitlines() if line.strip())
            ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in fields}
            if absent := 256 - sum(bytes([byte]) in ranks for byte in range(256)):
                raise ValueError(f"{absent} of the 256 single bytes are no token of it")
            if len(set(ranks.values())) < len(ranks) or min(ranks.values()) < 0:
                raise ValueError("a rank is negative or comes twice")
        except (ValueError, binascii.Error) as error:
            raise ValueError(
                f"data.tokenizer = '{path}': must have a token in base64 and its rank on each "
                f"line: {error}"
            ) from error
        last = max(ranks.values())
        self._encoding = library.Encoding(
            path.stem, pat_str=SPLIT_PATTERN, mergeable_ranks=ranks, special_tokens={}
        )
        self.bos_id = self.eos_id = last + 1
        self.vocab_size = last + 2
        self.dtype = np.min_scalar_type(last)
        self.token_bytes = np.zeros(self.vocab_size, np.int32)
        for token, rank in ranks.items():
            self.token_bytes[rank] = len(token)
        self.fingerprint = f"tiktoken-{hashlib.sha256(content).hexdigest()}"

    def encode(self, text: str) -> np.ndarray:
        return np.array(self._encoding.encode_ordinary(text), self.dtype)

    def decode(self, ids: Iterable[int]) -> str:
        kept = [i for i in map(int, ids) if i < self.bos_id and self.token_bytes[i]]
        return self._encoding.decode(kept, errors="replace")


def _library(package: str, path: Path) -> ModuleType:
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise ValueError(
            f"data.tokenizer = '{path}': needs the package {package} (pip install {package})"
        ) from error


def _frame(path: Path, ids: dict[str, int], unused: int) -> tuple[int, int]:
    """(bos, eos) as the `tokenizer_config.json` beside `path` names them, else `unused`."""
    beside = path.with_name("tokenizer_config.json")
    config: dict[str, Any] = {}
    if beside.is_file():
        try:
            config = dict(json.loads(beside.read_bytes()))
        except (ValueError, TypeError) as error:
            raise ValueError(f"{beside}: is not a JSON object: {error}") from error
    found = []
    for key in ("bos_token", "eos_token"):
        token = config.get(key)
        content = token.get("content") if isinstance(token, dict) else token
        if content is None:
            continue
        if content not in ids:
            raise ValueError(f"{beside}: {key} = {content!r} is no token of {path.name}")
        found.append(ids[content])
    found = found or [unused]
    return found[0], found[-1]


def _piece_bytes(piece: str, byte_level: bool) -> int:
    """Bytes of text that a vocabulary entry stands for.

    Byte-level vocabularies write one character per byte; the others write U+2581 for a space and
    `<0xAB>` for a byte.
    """
    if byte_level:
        return len(piece)
    if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
        return 1
    return len(piece.replace("\u2581", " ").encode())
