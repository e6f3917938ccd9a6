"""Text files to token windows, against the tokenizers library and hand-made bytes."""

from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from halfbyte.calibration.data import (
    consecutive_windows,
    load_texts,
    load_tokenizer,
    text_sha256,
    token_windows,
)
from halfbyte.errors import CalibrationError

TEXTS = [f"Line {n} of the text: {'word ' * (n % 7)}{n * 13}." for n in range(40)]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.jsonl"
    path.write_text("".join(json.dumps({"text": line, "src": "x"}) + "\n" for line in TEXTS))
    return path


@pytest.fixture(scope="module")
def ids(tiny: Path) -> list[int]:
    """The same tokens by the tokenizers library, without transformers."""
    tokenizer = Tokenizer.from_file(str(tiny / "tokenizer.json"))
    end = tokenizer.token_to_id("<|endoftext|>")
    return [i for line in TEXTS for i in [*tokenizer.encode(line).ids, end]]


def rows(windows: torch.Tensor) -> list[tuple[int, ...]]:
    return [tuple(row) for row in windows.tolist()]


@pytest.mark.parametrize("length", [1, 7, 32])
def test_windows_are_cuts_of_the_joined_documents(
    text: Path, tiny: Path, ids: list[int], length: int
) -> None:
    cuts = [tuple(ids[i : i + length]) for i in range(0, len(ids) - length + 1, length)]
    everything = token_windows(text, tiny, len(cuts), length, seed=0)
    assert everything.dtype == torch.int64
    assert sorted(rows(everything)) == sorted(cuts)
    assert rows(consecutive_windows(text, tiny, length)) == cuts


def test_choice_depends_on_the_seed_alone(text: Path, tiny: Path) -> None:
    first = token_windows(text, tiny, 10, 16, seed=3)
    assert first.shape == (10, 16)
    assert torch.equal(first, token_windows(text, tiny, 10, 16, seed=3))
    assert not torch.equal(first, token_windows(text, tiny, 10, 16, seed=4))


def test_consecutive_windows_spread_over_the_text(text: Path, tiny: Path) -> None:
    everything = consecutive_windows(text, tiny, 16)
    some = consecutive_windows(text, tiny, 16, limit=3)
    assert torch.equal(some, everything[[0, (len(everything) - 1) // 2, len(everything) - 1]])


def test_plain_text_is_one_document(tmp_path: Path, tiny: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("\n".join(TEXTS))
    assert load_texts(path) == ["\n".join(TEXTS)]
    assert len(rows(token_windows(path, tiny, 2, 32, seed=0))) == 2


def test_blank_lines_and_empty_documents_are_skipped(tmp_path: Path) -> None:
    path = tmp_path / "text.jsonl"
    path.write_text('{"text": "a"}\n\n{"text": "  "}\n{"text": "\\u2028b"}')
    assert load_texts(path) == ["a", "\u2028b"]


@pytest.mark.parametrize(
    ("name", "data", "says"),
    [
        ("a.jsonl", b"", "no text in the file"),
        ("a.txt", b" \n", "no text in the file"),
        ("a.jsonl", b'{"text": "x"}\n{"text": \n', "line 2 is not JSON"),
        ("a.jsonl", b'{"text": "x"}\n["x"]\n', "line 2 is not an object"),
        ("a.jsonl", b'{"txt": "x"}\n', 'line 1 is not an object with a string "text"'),
        ("a.jsonl", b'{"text": 3}\n', "line 1 is not an object"),
        ("a.jsonl", b'{"text": "x"}\n{"text": "\xe9"}\n', "0xe9 at offset 24, line 2"),
        ("a.txt", b"one\ntwo\ncaf\xe9\n", "0xe9 at offset 11, line 3"),
        ("a.csv", b"x", "ends in .jsonl or .txt"),
    ],
)
def test_unusable_files(tmp_path: Path, tiny: Path, name: str, data: bytes, says: str) -> None:
    path = tmp_path / name
    path.write_bytes(data)
    with pytest.raises(CalibrationError, match=says):
        load_texts(path)
    with pytest.raises(CalibrationError, match=says):
        token_windows(path, tiny, 1, 1, seed=0)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(CalibrationError, match="no such file"):
        load_texts(tmp_path / "a.jsonl")


def test_too_short_text_says_both_numbers(text: Path, tiny: Path, ids: list[int]) -> None:
    available = len(ids) // 64
    says = rf"{len(ids)} tokens fill {available} windows of 64, 99 \(6336 tokens\) are needed"
    with pytest.raises(CalibrationError, match=says) as caught:
        token_windows(text, tiny, 99, 64, seed=0)
    assert f"--samples {available}" in str(caught.value.hint)


@pytest.mark.parametrize(("samples", "length"), [(0, 8), (8, 0), (-1, 8)])
def test_nothing_to_choose(text: Path, tiny: Path, samples: int, length: int) -> None:
    with pytest.raises(CalibrationError, match="must be at least 1"):
        token_windows(text, tiny, samples, length, seed=0)


def test_text_sha256_covers_ids_and_shape() -> None:
    tokens = torch.tensor([[1, 2, 3], [4, 5, 60000]])
    expected = hashlib.sha256(b"2,3\n" + struct.pack("<6q", 1, 2, 3, 4, 5, 60000)).hexdigest()
    assert text_sha256(tokens) == expected
    assert text_sha256(tokens.int()) == expected
    assert text_sha256(tokens.t().contiguous().t()) == expected
    assert text_sha256(tokens.view(3, 2)) != expected


def test_folder_without_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(CalibrationError, match="the tokenizer cannot be loaded"):
        load_tokenizer(tmp_path)


def test_tokenizer_without_end_of_text(tiny_copy: Path, text: Path) -> None:
    path = tiny_copy / "tokenizer_config.json"
    config = json.loads(path.read_text())
    del config["eos_token"]
    path.write_text(json.dumps(config))
    with pytest.raises(CalibrationError, match="no end-of-text token"):
        token_windows(text, tiny_copy, 1, 8, seed=0)


def test_code_of_the_checkpoint_is_never_run(tiny_copy: Path, tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    (tiny_copy / "code.py").write_text(f"open({str(marker)!r}, 'w').close()\nclass T: pass\n")
    config = {"tokenizer_class": "T", "auto_map": {"AutoTokenizer": ["code.T", None]}}
    (tiny_copy / "tokenizer_config.json").write_text(json.dumps(config))
    (tiny_copy / "tokenizer.json").unlink()
    with pytest.raises(CalibrationError, match="the tokenizer cannot be loaded"):
        load_tokenizer(tiny_copy)
    assert not marker.exists()


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / "text.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "one"}\n{"text": "two"}\n')
    assert load_texts(path) == ["one", "two"]


@pytest.mark.parametrize(
    "line", [b'{"text": "\\ud800 half"}', b"[" * 100_000], ids=["surrogate", "nesting"]
)
def test_lines_that_no_tokenizer_can_take(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "text.jsonl"
    path.write_bytes(b'{"text": "one"}\n' + line + b"\n")
    with pytest.raises(CalibrationError, match="line 2"):
        load_texts(path)
