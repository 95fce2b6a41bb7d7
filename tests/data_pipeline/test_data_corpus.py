"""Sources, documents, the token cache and the split."""

import multiprocessing
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from k3jax.data import corpus, tokens
from k3jax.data.tokenizer import ByteTokenizer
from k3jax.data.tokens import text_hash, token_store, validation_mask


def texts(name: object, field: str = "text") -> list[str]:
    return [document.text for document in corpus.find(str(name)).documents(field)]


def test_the_standard_library_is_found_in_order_and_without_tests():
    source = corpus.find("python:stdlib")
    names = [path.relative_to(source.root).as_posix() for path in source.files]
    assert "json/decoder.py" in names and "argparse.py" in names
    assert not [n for n in names if {"test", "tests", "site-packages"} & set(n.split("/"))]
    assert source == corpus.find("python:stdlib")
    assert len(names) == len(set(names)) > 300
    import json.decoder

    assert Path(json.decoder.__file__).read_text() in texts("python:stdlib")


def test_site_packages_hold_installed_sources():
    source = corpus.find("python:site-packages")
    names = {path.relative_to(source.root).as_posix() for path in source.files}
    assert "numpy/__init__.py" in names and not [n for n in names if "/tests/" in n]


def test_folder_reads_text_recursively_and_leaves_out_the_rest(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / ".hidden").mkdir()
    (tmp_path / "b" / "two.md").write_text("zwei é\r\n", newline="")
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "c.png").write_bytes(b"\x89PNG\0")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / ".hidden" / "no.txt").write_text("no")
    (tmp_path / "broken.txt").symlink_to("nowhere")
    os.mkfifo(tmp_path / "pipe.txt")
    (tmp_path / "loop").symlink_to(tmp_path)
    (tmp_path / "self.txt").symlink_to("self.txt")
    (tmp_path / os.fsdecode(b"n\xe9.txt")).write_text("any name")
    (tmp_path / "d.jsonl").write_text('{"text": "three"}\n\n{"text": ""}\n{"text": "four"}\n')
    assert texts(tmp_path) == ["one", "three", "four", "any name", "zwei é\r\n"]
    assert len(corpus.find(str(tmp_path)).digest()) == 64


@pytest.mark.parametrize("newlines", [True, False])
def test_a_single_file_is_cut_into_documents_that_join_to_it(tmp_path, newlines):
    rng = np.random.default_rng(0)
    words = rng.choice(["é", "line", "\U0001f600", "\n" if newlines else "-"], 60_000)
    text = "".join(words)
    (tmp_path / "one.txt").write_text(text, newline="")
    pieces = texts(tmp_path / "one.txt")
    assert "".join(pieces) == text
    assert 100 < len(pieces) <= corpus.PIECES + 1
    assert not newlines or all(piece.endswith("\n") for piece in pieces[:-1])


BAD_SOURCES = {
    "unknown": (None, "no such source, must be python:stdlib"),
    "empty file": (("x.txt", b""), "no text in its 1 files"),
    "binary": (("x.txt", b"ab\0c"), "is binary"),
    "latin-1": (("x.txt", b"caf\xe9 au lait"), "is not UTF-8 text"),
    "cut short": (("x.txt", b"caf\xc3"), "is not UTF-8 text"),
    "not json": (("x.jsonl", b'{"text": "a"}\n{"text"\n'), "line 2: is not JSON"),
    "no field": (
        ("x.jsonl", b'{"body": "a"}\n'),
        "no such text in .*line 1, which has \\['body'\\]",
    ),
    "line break": (("x.jsonl", b'{"bo\\ndy": "a"}\n'), "which has \\['bo.ndy'\\]"),
    "deep": (("x.jsonl", b"[" * 100_000), "line 1: is not JSON: maximum recursion"),
    "no object": (("x.jsonl", b'["a"]\n'), "line 1, which has list"),
    "surrogate": (("x.jsonl", b'{"text": "\\ud800"}\n'), "line 1: is not UTF-8"),
    "mask length": (("x.jsonl", b'{"text": "abc", "loss_mask": [1]}\n'), "has 1 entries.* 3 tok"),
    "mask values": (("x.jsonl", b'{"text": "a", "loss_mask": [2]}\n'), "a list of 0 and 1"),
}


@pytest.mark.parametrize("case", BAD_SOURCES)
def test_a_bad_source_is_one_clear_line(tmp_path, case):
    file, message = BAD_SOURCES[case]
    name = tmp_path / (file[0] if file else "missing.txt")
    if file:
        name.write_bytes(file[1])
    with pytest.raises(ValueError, match=message) as caught:
        token_store(corpus.find(str(name)), ByteTokenizer(), tmp_path / "cache")
    assert "\n" not in str(caught.value) and str(tmp_path) in str(caught.value)
    assert not list((tmp_path / "cache").glob("*")) if file else True


def test_an_empty_folder_an_unknown_python_source_and_an_unreadable_file(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="no files in"):
        corpus.find(str(tmp_path))
    with pytest.raises(ValueError, match="'python:nothing': no such source"):
        corpus.find("python:nothing")
    (tmp_path / "a.txt").write_text("text")
    source = corpus.find(str(tmp_path))

    def refuse(self, *args, **kwargs):
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(ValueError, match=r"cannot read .*a\.txt: Permission denied"):
        source.digest()


def test_the_store_holds_the_bytes_of_every_document(folder, tmp_path):
    store = token_store(corpus.find(str(folder)), ByteTokenizer(), tmp_path / "cache")
    expected = texts(folder)
    found = [
        bytes(store.tokens[a:b]).decode()
        for a, b in zip(store.offsets[:-1], store.offsets[1:], strict=True)
    ]
    assert found == expected and len(found) == 40
    assert store.tokens.dtype == np.uint8 and isinstance(store.tokens, np.memmap)
    assert store.hashes.tolist() == [text_hash(text) for text in expected]
    assert store.ignored is None


def test_the_cache_is_used_again_and_only_for_the_same_content(folder, tmp_path, monkeypatch):
    cache, source = tmp_path / "cache", corpus.find(str(folder))
    first = token_store(source, ByteTokenizer(), cache)
    with monkeypatch.context() as patch:
        patch.setattr(tokens, "_write", None)  # a second write would fail
        again = token_store(corpus.find(str(folder)), ByteTokenizer(), cache)
    assert again.digest == first.digest
    np.testing.assert_array_equal(again.tokens, first.tokens)

    path = source.files[3]
    status = path.stat()
    path.write_bytes(path.read_bytes()[:-1] + b"!")  # the same size and time
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    changed = token_store(source, ByteTokenizer(), cache)
    assert changed.digest != first.digest
    assert bytes(changed.tokens) != bytes(first.tokens)
    assert len(list(cache.iterdir())) == 2


@pytest.mark.parametrize("how", ["truncate", "flip"])
@pytest.mark.parametrize("damage", ["tokens.bin", "meta.json", "hashes.npy"])
def test_a_damaged_cache_is_written_anew(folder, tmp_path, damage, how):
    cache, source = tmp_path / "cache", corpus.find(str(folder))
    first = bytes(token_store(source, ByteTokenizer(), cache).tokens)
    (place,) = cache.iterdir()
    if how == "truncate":
        os.truncate(place / damage, 5)
    else:
        content = bytearray((place / damage).read_bytes())
        content[len(content) // 2] ^= 1
        (place / damage).write_bytes(content)
    assert bytes(token_store(source, ByteTokenizer(), cache).tokens) == first
    assert [p.name for p in cache.iterdir()] == [place.name]


def test_a_write_that_fails_leaves_nothing_behind(folder, tmp_path, monkeypatch):
    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tokens.np, "save", full)
    with pytest.raises(OSError, match="cannot write the token cache: No space left on device"):
        token_store(corpus.find(str(folder)), ByteTokenizer(), tmp_path / "cache")
    assert not list((tmp_path / "cache").iterdir())


def test_a_source_that_changes_while_it_is_read_is_refused(folder, tmp_path, monkeypatch):
    source, write = corpus.find(str(folder)), tokens._write

    def write_and_change(*args):
        write(*args)
        source.files[0].write_text("something else")

    monkeypatch.setattr(tokens, "_write", write_and_change)
    with pytest.raises(ValueError, match="changed while it was read"):
        token_store(source, ByteTokenizer(), tmp_path / "cache")


def _tokenise(root: str, cache: str, gate, sizes) -> None:
    gate.wait()
    sizes.put(len(token_store(corpus.find(root), ByteTokenizer(), Path(cache)).tokens))


def test_processes_that_write_the_same_cache_agree(folder, tmp_path):
    context = multiprocessing.get_context("spawn")
    gate, sizes = context.Barrier(2), context.Queue()
    arguments = (str(folder), str(tmp_path / "cache"), gate, sizes)
    workers = [context.Process(target=_tokenise, args=arguments) for _ in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert [worker.exitcode for worker in workers] == [0, 0]
    assert sizes.get(timeout=5) == sizes.get(timeout=5) == sum(map(len, texts(folder)))
    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_losing_the_race_to_publish_keeps_the_winner(folder, tmp_path, monkeypatch):
    cache, source, publish = tmp_path / "cache", corpus.find(str(folder)), tokens._publish

    def late(partial, place):
        shutil.copytree(partial, place)
        (place / "winner").touch()
        publish(partial, place)

    monkeypatch.setattr(tokens, "_publish", late)
    token_store(source, ByteTokenizer(), cache)
    (place,) = cache.iterdir()
    assert (place / "winner").exists()


def test_the_split_follows_the_hash_and_never_parts_duplicates():
    rng = np.random.default_rng(1)
    hashes = rng.integers(0, 2**64, 50_000, np.uint64)
    hashes = np.concatenate([hashes, rng.permutation(hashes)])
    mask = validation_mask(hashes, 0.05)
    assert abs(mask.mean() - 0.05) < 0.005
    assert not set(hashes[mask]) & set(hashes[~mask])
    some = rng.permutation(len(hashes))[:30_000]  # a document's side does not depend on the others
    np.testing.assert_array_equal(validation_mask(hashes[some], 0.05), mask[some])
    assert not (mask & ~validation_mask(hashes, 0.1)).any()


def test_the_split_holds_out_at_least_one_text_and_refuses_when_none_is_left():
    hashes = np.array([2**63 + 5, 2**63 + 1, 2**63 + 1], np.uint64)
    assert validation_mask(hashes, 0.01).tolist() == [False, True, True]
    with pytest.raises(ValueError, match="at least two different ones"):
        validation_mask(hashes[1:], 0.01)
    assert validation_mask(np.array([0, 2**64 - 1], np.uint64), 0.999).tolist() == [True, False]
