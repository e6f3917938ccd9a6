"""Calibration text to token windows.

A text file is a list of documents: `.jsonl` holds one JSON object with a `text` per line, `.txt`
is one document. Documents are tokenized with the checkpoint's own tokenizer, joined by its
end-of-text token and cut into windows of equal length.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from halfbyte.errors import CalibrationError

if TYPE_CHECKING:
    import torch

DOCUMENTS_PER_BATCH = 64


def load_texts(path: Path) -> list[str]:
    """The documents of a `.jsonl` or `.txt` file, in file order.

    Raises CalibrationError when the file is missing, of another kind, not UTF-8, not JSON lines
    with a string `text`, or holds no text at all.
    """
    texts = list(_documents(path))
    if not texts:
        raise CalibrationError(f"{path}: no text in the file")
    return texts


def token_windows(
    path: Path, tokenizer_dir: Path, samples: int, sequence_length: int, seed: int
) -> torch.Tensor:
    """`samples` windows of the text's tokens, chosen by `seed`: int64 [samples, sequence_length].

    Windows do not overlap, and none is chosen twice.

    Raises CalibrationError for what `load_texts` refuses, for a tokenizer that cannot be used and
    for text too short to fill the windows asked for.
    """
    import torch

    if samples < 1 or sequence_length < 1:
        raise CalibrationError(
            f"{samples} samples of {sequence_length} tokens: both must be at least 1"
        )
    windows = _windows(path, tokenizer_dir, sequence_length, needed=samples)
    generator = torch.Generator().manual_seed(seed)
    return windows[torch.randperm(len(windows), generator=generator)[:samples]].long()


def consecutive_windows(
    path: Path, tokenizer_dir: Path, sequence_length: int, limit: int | None = None
) -> torch.Tensor:
    """The text's tokens cut into windows, in order: int64 [windows, sequence_length].

    With `limit` at most that many, spread evenly over the text. What does not fill a window at the
    end is left out. Raises CalibrationError as `token_windows` does.
    """
    import torch

    windows = _windows(path, tokenizer_dir, sequence_length, needed=1)
    if limit is not None and limit < len(windows):
        windows = windows[torch.linspace(0, len(windows) - 1, limit).long()]
    return windows.long()


def longest_windows(path: Path, tokenizer_dir: Path, samples: int, longest: int) -> torch.Tensor:
    """`samples` windows as long as the text allows, `longest` tokens at most, in order: int64
    [samples, length]. Raises CalibrationError as `token_windows` does."""
    tokens = len(_windows(path, tokenizer_dir, 1, needed=samples))
    length = min(longest, tokens // samples)
    return _windows(path, tokenizer_dir, length, needed=samples)[:samples].long()


def text_sha256(tokens: torch.Tensor) -> str:
    """SHA-256 of token ids and their shape: what `Settings.calibration_sha256` records."""
    shape = ",".join(str(size) for size in tokens.shape)
    digest = hashlib.sha256(f"{shape}\n".encode())
    digest.update(tokens.cpu().long().contiguous().numpy().astype("<i8", copy=False).tobytes())
    return digest.hexdigest()


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer of a checkpoint folder, from local files and without running their code.

    Its length limit is lifted: windows are cut here, not by the tokenizer.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(
            str(folder),
            local_files_only=True,
            trust_remote_code=False,
            model_max_length=2**62,
        )
    except Exception as error:
        raise CalibrationError(
            f"{folder}: the tokenizer cannot be loaded: {error}".split("\n")[0],
            hint="the folder needs tokenizer.json and tokenizer_config.json",
        ) from error


def _windows(path: Path, tokenizer_dir: Path, sequence_length: int, needed: int) -> torch.Tensor:
    """All windows of the text, int32 [windows, sequence_length], at least `needed` of them."""
    import torch

    ids = _token_ids(path, load_tokenizer(tokenizer_dir), tokenizer_dir)
    available = len(ids) // sequence_length
    if available < needed:
        remedy = "a shorter --sequence-length or more text"
        raise CalibrationError(
            f"{path}: {len(ids)} tokens fill {available} windows of {sequence_length}, "
            f"{needed} ({needed * sequence_length} tokens) are needed",
            hint=f"use --samples {available}, {remedy}" if available else f"use {remedy}",
        )
    windows = torch.frombuffer(ids, dtype=torch.int32)[: available * sequence_length]
    return windows.view(available, sequence_length)


def _token_ids(path: Path, tokenizer: Any, tokenizer_dir: Path) -> array[int]:
    """Token ids of all documents, each followed by the end-of-text token, as 32-bit integers."""
    end_of_text = tokenizer.eos_token_id
    if end_of_text is None:
        raise CalibrationError(
            f"{tokenizer_dir}: the tokenizer has no end-of-text token to join documents with",
            hint="name its eos_token in tokenizer_config.json",
        )
    ids = array("i")
    documents = _documents(path)
    while batch := list(islice(documents, DOCUMENTS_PER_BATCH)):
        for document in tokenizer(batch, add_special_tokens=False)["input_ids"]:
            ids.extend(document)
            ids.append(end_of_text)
    if not ids:
        raise CalibrationError(f"{path}: no text in the file")
    return ids


def _documents(path: Path) -> Iterator[str]:
    """Documents that hold more than white space, one at a time."""
    if path.suffix not in (".jsonl", ".txt"):
        raise CalibrationError(
            f"{path}: a text file ends in .jsonl or .txt",
            hint='write one JSON object per line, {"text": "..."}, to a .jsonl file',
        )
    if not path.is_file():
        raise CalibrationError(f"{path}: no such file")
    documents = _json_lines(path) if path.suffix == ".jsonl" else iter([_plain_text(path)])
    return (text for text in documents if text.strip())


def _plain_text(path: Path) -> str:
    data = path.read_bytes()
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise _not_utf8(path, line, error.start, data[error.start]) from error


def _json_lines(path: Path) -> Iterator[str]:
    offset = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                # Some editors begin a file with a byte order mark.
                whole = line.decode("utf-8-sig" if number == 1 else "utf-8")
                record = json.loads(whole) if whole.strip() else {"text": ""}
            except UnicodeDecodeError as error:
                start = error.start
                raise _not_utf8(path, number, offset + start, line[start]) from error
            except (ValueError, RecursionError) as error:
                raise CalibrationError(f"{path}: line {number} is not JSON: {error}") from error
            text = record.get("text") if isinstance(record, dict) else None
            if not isinstance(text, str):
                raise CalibrationError(
                    f'{path}: line {number} is not an object with a string "text"'
                )
            try:
                text.encode()
            except UnicodeEncodeError as error:
                raise CalibrationError(f"{path}: line {number}: {error}") from error
            yield text
            offset += len(line)


def _not_utf8(path: Path, line: int, offset: int, byte: int) -> CalibrationError:
    return CalibrationError(
        f"{path}: not UTF-8 text: byte 0x{byte:02x} at offset {offset}, line {line}",
        hint="convert it, for example with iconv -f LATIN1 -t UTF-8",
    )
