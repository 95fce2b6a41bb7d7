"""Tokenizers: bytes, and local files read by packages that need not be there."""

import base64
import json
import sys
import types
from pathlib import Path

import numpy as np
import pytest

from k3jax.data import tokenizer
from k3jax.data.tokenizer import ByteTokenizer, check_vocab, load_tokenizer


def test_bytes_round_trip_and_stand_for_themselves():
    text = "naïve \U0001f600\0\r\n"
    byte = load_tokenizer("bytes")
    ids = byte.encode(text)
    assert ids.dtype == byte.dtype == np.uint8 and bytes(ids) == text.encode()
    assert byte.decode([256, *ids, 256]) == text
    assert byte.decode([0xC3]) == "\ufffd"
    assert byte.token_bytes.dtype == np.int32 and byte.token_bytes.shape == (byte.vocab_size,)
    assert byte.token_bytes[ids].sum() == len(text.encode())
    assert byte.token_bytes[[byte.bos_id, byte.eos_id]].tolist() == [0, 0]


def test_a_vocabulary_that_is_too_small_is_refused():
    check_vocab(ByteTokenizer(), 257)
    check_vocab(ByteTokenizer(), 320)
    with pytest.raises(ValueError, match=r"model\.vocab_size = 256: must be at least 257"):
        check_vocab(ByteTokenizer(), 256)


@pytest.mark.parametrize("name", ["byte", "missing/tokenizer.json", "."])
def test_an_unknown_tokenizer_is_one_clear_line(name):
    with pytest.raises(ValueError, match="must be bytes, symbols:N, or the path") as caught:
        load_tokenizer(name)
    assert repr(name) in str(caught.value) and "\n" not in str(caught.value)


class FakeTokenizer:
    """Of the `tokenizers` package, what is used: one token for each character of the vocabulary."""

    def __init__(self, spec: dict) -> None:
        self.vocab = dict(spec["model"]["vocab"])
        self.vocab |= {token["content"]: token["id"] for token in spec["added_tokens"]}
        self.calls = []
        self.encode_special_tokens = False

    @classmethod
    def from_str(cls, content: str) -> "FakeTokenizer":
        return cls(json.loads(content))

    def no_truncation(self) -> None:
        self.calls.append("no_truncation")

    def no_padding(self) -> None:
        self.calls.append("no_padding")

    def get_vocab(self, with_added_tokens: bool) -> dict[str, int]:
        assert with_added_tokens
        return self.vocab

    def get_vocab_size(self) -> int:
        return len(self.vocab)

    def encode(self, text: str, add_special_tokens: bool) -> types.SimpleNamespace:
        assert not add_special_tokens and self.encode_special_tokens
        return types.SimpleNamespace(ids=[self.vocab[c] for c in text])

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        assert not skip_special_tokens
        pieces = {i: piece for piece, i in self.vocab.items()}
        return "".join(pieces[i] for i in ids)


def write_tokenizer(folder: Path, vocab: dict, added: dict, decoder: str = "Fuse", **config):
    spec = {
        "model": {"vocab": vocab},
        "decoder": {"type": "Sequence", "decoders": [{"type": decoder}]},
        "added_tokens": [{"content": c, "id": i, "special": s} for c, (i, s) in added.items()],
    }
    (folder / "tokenizer.json").write_text(json.dumps(spec))
    if config:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def fake_tokenizers(monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", types.SimpleNamespace(Tokenizer=FakeTokenizer))


@pytest.mark.usefixtures("fake_tokenizers")
def test_hugging_face_files(tmp_path):
    vocab = {"a": 0, "é": 1, "\u2581the": 2, "<0x0A>": 3}
    added = {"<s>": (4, True), "<tab>": (5, False), "</s>": (6, True)}
    folder = write_tokenizer(tmp_path, vocab, added, bos_token={"content": "<s>"}, eos_token="</s>")
    found = load_tokenizer(str(folder))
    assert (found.bos_id, found.eos_id, found.vocab_size) == (4, 6, 7)
    assert found.token_bytes.tolist() == [1, 2, 4, 1, 0, 5, 0]
    ids = found.encode("aé")
    assert ids.tolist() == [0, 1] and ids.dtype == found.dtype == np.uint8
    assert found.decode([4, 1, 0, 6]) == "éa"
    assert found._tokenizer.calls == ["no_truncation", "no_padding"]
    assert load_tokenizer(str(folder / "tokenizer.json")).fingerprint == found.fingerprint


@pytest.mark.usefixtures("fake_tokenizers")
def test_hugging_face_byte_level_pieces_count_their_bytes(tmp_path):
    vocab = {"\u0120the": 0, "\u00c3": 1, "\u00c3\u00a9": 2}
    folder = write_tokenizer(tmp_path, vocab, {"\u00e9t": (3, False)}, decoder="ByteLevel")
    assert load_tokenizer(str(folder)).token_bytes.tolist() == [4, 1, 2, 3, 0]


@pytest.mark.usefixtures("fake_tokenizers")
@pytest.mark.parametrize(
    ("config", "frame"),
    [
        ({}, (3, 3)),
        ({"eos_token": "<s>"}, (2, 2)),
        ({"bos_token": "<s>", "eos_token": None}, (2, 2)),
    ],
)
def test_hugging_face_frames(tmp_path, config, frame):
    folder = write_tokenizer(tmp_path, {"a": 0, "b": 1}, {"<s>": (2, True)}, **config)
    found = load_tokenizer(str(folder))
    assert (found.bos_id, found.eos_id) == frame and found.vocab_size == max(frame) + 1


@pytest.mark.usefixtures("fake_tokenizers")
def test_bad_hugging_face_files(tmp_path):
    write_tokenizer(tmp_path, {"a": 0}, {}, bos_token="<none>")
    with pytest.raises(ValueError, match="bos_token = '<none>' is no token"):
        load_tokenizer(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match=r"tokenizer\.json': cannot be read"):
        load_tokenizer(str(tmp_path))
    write_tokenizer(tmp_path, {"a": 0}, {}, eos_token=None)
    with pytest.raises(ValueError, match="cannot encode 'ab'"):
        load_tokenizer(str(tmp_path)).encode("ab")
    for content in ("{", "[1]"):
        (tmp_path / "tokenizer_config.json").write_text(content)
        with pytest.raises(ValueError, match=r"tokenizer_config\.json: is not a JSON object"):
            load_tokenizer(str(tmp_path))
    write_tokenizer(tmp_path, {}, {}, eos_token=None)
    with pytest.raises(ValueError, match="no tokens in it"):
        load_tokenizer(str(tmp_path))


class FakeEncoding:
    def __init__(self, name, *, pat_str, mergeable_ranks, special_tokens):
        assert pat_str == tokenizer.SPLIT_PATTERN and special_tokens == {}
        self.ranks = mergeable_ranks

    def encode_ordinary(self, text: str) -> list[int]:
        return [self.ranks[bytes([b])] for b in text.encode()]

    def decode(self, ids: list[int], errors: str) -> str:
        return b"".join({r: t for t, r in self.ranks.items()}[i] for i in ids).decode(errors=errors)


def test_tiktoken_files(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tiktoken", types.SimpleNamespace(Encoding=FakeEncoding))
    path = tmp_path / "small.tiktoken"
    tokens = [bytes([i]) for i in range(256)] + [b"the", b" \xc3\xa9"]
    path.write_bytes(b"".join(b"%b %d\n" % (base64.b64encode(t), i) for i, t in enumerate(tokens)))
    found = load_tokenizer(str(path))
    assert (found.bos_id, found.eos_id, found.vocab_size) == (258, 258, 259)
    assert found.token_bytes.tolist() == [1] * 256 + [3, 3, 0]
    ids = found.encode("é")
    assert ids.tolist() == [0xC3, 0xA9] and ids.dtype == np.uint16
    assert found.decode([258, 256, 257, 258, 0xC3]) == "the é\ufffd"

    twice = path.read_bytes().replace(b" 256\n", b" 255\n")
    for content in (b"", b"dGhl\n", b"dGhl one\n", b"!!!! 3\n", b"dGhl 3\n", twice):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"small\.tiktoken': must have a token in base64"):
            load_tokenizer(str(path))


@pytest.mark.parametrize(
    ("package", "file"), [("tokenizers", "tokenizer.json"), ("tiktoken", "x.tiktoken")]
)
def test_a_missing_package_is_one_clear_line(tmp_path, monkeypatch, package, file):
    monkeypatch.setitem(sys.modules, package, None)  # makes its import fail
    (tmp_path / file).write_text("{}")
    with pytest.raises(ValueError, match=f"needs the package {package}") as caught:
        load_tokenizer(str(tmp_path / file))
    assert "\n" not in str(caught.value)


def test_the_real_tokenizers_package(tmp_path):
    library = pytest.importorskip("tokenizers")
    pieces = [*map(chr, range(256)), "\u0120", "\u0120t", "th", "\u0120th", "<|end|>"]
    merges = [("t", "h"), ("\u0120", "t"), ("\u0120", "th")]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    model = library.models.BPE(vocab=vocab, merges=merges)
    real = library.Tokenizer(model)
    real.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    real.decoder = library.decoders.ByteLevel()
    real.add_special_tokens(["<|end|>"])
    real.enable_truncation(2)
    real.save(str(tmp_path / "tokenizer.json"))
    found = load_tokenizer(str(tmp_path))
    text = "th th <|end|> th"
    ids = found.encode(text)
    assert vocab["<|end|>"] not in ids and found.decode(ids) == text
    assert found.token_bytes[ids].sum() == len(text)


def test_the_real_tiktoken_package(tmp_path):
    pytest.importorskip("tiktoken")
    ranks = {bytes([i]): i for i in range(256)} | {b"th": 256, b"the": 257, b" the": 260}
    path = tmp_path / "small.tiktoken"
    path.write_bytes(b"".join(b"%b %d\n" % (base64.b64encode(t), i) for t, i in ranks.items()))
    found = load_tokenizer(str(path))
    text = "the the \U0001f600 <|endoftext|>"
    ids = found.encode(text)
    assert found.decode(ids) == text and 257 in ids
    assert found.decode([258, 259, *ids, 261, 999]) == text  # a model may draw what is no token
    assert found.token_bytes[ids].sum() == len(text.encode())


def test_symbols_are_ids_without_text():
    symbols = load_tokenizer("symbols:1000")
    assert (symbols.vocab_size, symbols.bos_id, symbols.eos_id) == (1001, 1000, 1000)
    assert symbols.token_bytes.sum() == 1000 and symbols.token_bytes[1000] == 0
    assert symbols.decode([3, 1000, 999]) == "3 999"
    with pytest.raises(ValueError, match="knows no text"):
        symbols.encode("text")


@pytest.mark.parametrize("name", ["symbols:", "symbols:0", "symbols:-1", "symbols:x"])
def test_symbols_need_a_count(name):
    with pytest.raises(ValueError, match="must read symbols:N"):
        load_tokenizer(name)
