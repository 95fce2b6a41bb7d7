"""Documents as token arrays on disk, mapped into memory, and their split into train and validation.

A source is tokenised once. Its folder in the cache is named by a digest of the content of its files
and of the tokenizer, and holds

    tokens.bin    the tokens of all documents, one after another, without bos and eos
    ignored.bin   only where a document has a loss mask: a byte per token, 1 where it is not learned
    offsets.npy   [documents + 1] int64: document i is tokens[offsets[i]:offsets[i + 1]]
    hashes.npy    [documents] uint64: a hash of each document's text
    meta.json     the SHA-256 of each of these files, by which a damaged folder is known

A folder is written under another name and then renamed, so that what is there is whole, and
processes that write the same one at a time do no harm: the first to finish wins.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
import re
import secrets
import shutil
from pathlib import Path

import numpy as np

from k3jax.data.corpus import Document, Source
from k3jax.data.tokenizer import Tokenizer

log = logging.getLogger("k3jax")

FORMAT = 2  # raise it when what a cached folder means changes


@dataclasses.dataclass(frozen=True)
class TokenStore:
    """The tokenised documents of one source.

    `tokens [N]` unsigned, `offsets [n + 1]` int64, `hashes [n]` uint64, `ignored [N]` bool or None,
    as above, all mapped into memory; `digest` names the content and the tokenizer.
    """

    tokens: np.ndarray
    offsets: np.ndarray
    hashes: np.ndarray
    ignored: np.ndarray | None
    digest: str


def token_store(
    source: Source, tokenizer: Tokenizer, cache_dir: Path, jsonl_field: str = "text"
) -> TokenStore:
    """The tokens of `source`, from the cache, or put there now.

    Raises `ValueError` for a source that cannot be read or holds no text, `OSError` where the cache
    cannot be written.
    """
    content = source.digest()
    key = f"{FORMAT} {content} {tokenizer.fingerprint} {jsonl_field}"
    digest = hashlib.sha256(key.encode()).hexdigest()[:32]
    folder = cache_dir / f"{re.sub(r'[^A-Za-z0-9]+', '-', source.name).strip('-')[-40:]}-{digest}"
    if not _is_whole(folder):
        try:
            cache_dir.mkdir(parents=True, exist_ok=True)
            partial = cache_dir / f".partial-{secrets.token_hex(8)}"
            partial.mkdir()
            try:
                _write(partial, source, tokenizer, jsonl_field)
                if source.digest() != content:
                    raise ValueError(
                        f"data.sources = {source.name!r}: changed while it was read, start again"
                    )
                _publish(partial, folder)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
        except OSError as error:
            raise OSError(
                error.errno, f"cannot write the token cache: {error.strerror}", str(folder)
            ) from error
    return _open(folder, tokenizer, digest)


def validation_mask(hashes: np.ndarray, fraction: float) -> np.ndarray:
    """Which documents, `[n]` bool, are held out: those whose hash is among the lowest `fraction`.

    A document's side depends on its text alone, so copies stay together and corpora that share
    documents share the split; only where no hash is that low, the lowest one is held out. Raises
    `ValueError` where nothing is left to train on.
    """
    highest = max(int(fraction * 2**64) - 1, int(hashes.min()))
    held_out = hashes <= np.uint64(highest)
    if held_out.all():
        raise ValueError(
            f"data.validation_fraction = {fraction}: holds out all of the {len(hashes)} documents "
            f"({len(np.unique(hashes))} different ones); at least two different ones, or a smaller "
            "fraction, are needed"
        )
    return held_out


def text_hash(text: str) -> int:
    """64-bit hash of a document's text."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def _write(folder: Path, source: Source, tokenizer: Tokenizer, jsonl_field: str) -> None:
    offsets, hashes, masked = [0], [], False
    with (
        (folder / "tokens.bin").open("wb") as tokens,
        (folder / "ignored.bin").open("wb") as ignored,
    ):
        for document in source.documents(jsonl_field):
            ids = tokenizer.encode(document.text)
            if not len(ids):
                continue
            if document.loss_mask is not None:
                masked = True
                ignored.seek(offsets[-1])
                ignored.write(_ignored(document, len(ids)))
            tokens.write(np.ascontiguousarray(ids, tokenizer.dtype))
            offsets.append(offsets[-1] + len(ids))
            hashes.append(text_hash(document.text))
        ignored.truncate(offsets[-1])  # what was not written reads as 0
    if not hashes:
        raise ValueError(
            f"data.sources = {source.name!r}: no text in its {len(source.files)} files"
        )
    if not masked:
        (folder / "ignored.bin").unlink()
    np.save(folder / "offsets.npy", np.array(offsets, np.int64))
    np.save(folder / "hashes.npy", np.array(hashes, np.uint64))
    meta = {
        "source": source.name,
        "tokenizer": tokenizer.fingerprint,
        "files": {path.name: file_digest(path) for path in sorted(folder.iterdir())},
    }
    (folder / "meta.json").write_text(json.dumps(meta, indent=2))
    for path in folder.iterdir():
        with path.open("rb+") as file:
            os.fsync(file.fileno())
    log.info("%s: %d documents, %d tokens", source.name, len(hashes), offsets[-1])


def _ignored(document: Document, tokens: int) -> bytes:
    mask = document.loss_mask
    assert mask is not None
    if len(mask) != tokens:
        raise ValueError(
            f"{document.origin}: loss_mask has {len(mask)} entries, must have one for each of the "
            f"{tokens} tokens of the text"
        )
    return (~mask).tobytes()


def _publish(partial: Path, folder: Path) -> None:
    try:
        partial.rename(folder)
    except OSError:  # another process was first, or what is there is damaged
        if _is_whole(folder):
            return
        damaged = folder.rename(partial.with_suffix(".damaged"))
        partial.rename(folder)
        shutil.rmtree(damaged, ignore_errors=True)


def _is_whole(folder: Path) -> bool:
    try:
        files = json.loads((folder / "meta.json").read_text())["files"]
        return all(file_digest(folder / name) == digest for name, digest in files.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def file_digest(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _open(folder: Path, tokenizer: Tokenizer, digest: str) -> TokenStore:
    ignored = folder / "ignored.bin"
    return TokenStore(
        tokens=np.memmap(folder / "tokens.bin", tokenizer.dtype, "r"),
        offsets=np.load(folder / "offsets.npy", mmap_mode="r"),
        hashes=np.load(folder / "hashes.npy", mmap_mode="r"),
        ignored=np.memmap(ignored, np.bool_, "r") if ignored.exists() else None,
        digest=digest,
    )
