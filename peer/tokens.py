"""Texts and tokenizers: from a name or a path to documents, and from documents to token ids.

A corpus is a built-in name or a path: `.txt`, `.jsonl` (either also `.gz`), `.parquet`, or a folder of such
files, read in name order. A text file is one document, a JSON line or a parquet row is one (field `text`).
Invariant: the same bytes give the same documents in the same order on every machine.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np
from tokenizers import Tokenizer

from protocols.errors import ConfigError

BUILT_IN_CORPORA = {"sotu": "sotu.jsonl.gz", "moby-dick": "moby-dick.txt.gz"}
BUILT_IN_TOKENIZERS = {"bpe1024": "tokenizer-bpe1024.json", "bpe4096": "tokenizer-bpe4096.json"}
TEXT_SUFFIXES = (".txt", ".txt.gz", ".jsonl", ".jsonl.gz", ".parquet")
VOCAB_SIZE_MAX = 1 << 16  # a token id must fit uint16
PIECE_CHARS_MAX = 1 << 20  # longer documents are encoded in pieces cut at a line end: bounds memory
BATCH_CHARS = 1 << 20  # documents handed to the encoder's threads at once

# Names that vocabularies in use give their special tokens, ours first.
_BOS_NAMES = ("<|bos|>", "<s>", "<|begin_of_text|>", "<|endoftext|>")
_EOS_NAMES = ("<|eos|>", "</s>", "<|end_of_text|>", "<|endoftext|>")
_PAD_NAMES = ("<|pad|>", "<pad>")


class SpecialTokens(NamedTuple):
    """Texts of the special tokens; few vocabularies have padding."""

    bos: str
    eos: str
    pad: str | None


def corpus_path(corpus: str) -> Path:
    """Where a built-in name or a path points; ConfigError when nothing is there."""
    return _resolve(corpus, BUILT_IN_CORPORA, kind="corpus")


def tokenizer_path(tokenizer: str) -> Path:
    """Where a built-in name or a path to a `tokenizer.json` points."""
    return _resolve(tokenizer, BUILT_IN_TOKENIZERS, kind="tokenizer")


def _resolve(name: str, built_in: dict[str, str], *, kind: str) -> Path:
    if name in built_in:
        return Path(str(files("peer") / "assets" / "corpus" / built_in[name]))
    path = Path(name).expanduser()
    if not path.exists():
        raise ConfigError(
            f"data.{kind} {name!r}: no such file or folder ({path.absolute()}); "
            f"give a path, or a built-in name: {', '.join(built_in)}"
        )
    return path


def text_files(path: Path) -> list[Path]:
    """The file itself, or the text files of a folder in name order."""
    if path.is_file():
        found = [path]
    else:
        found = sorted(entry for entry in path.iterdir() if entry.name.endswith(TEXT_SUFFIXES))
    if not found or not found[0].name.endswith(TEXT_SUFFIXES):
        raise ConfigError(
            f"{path}: not a text source; expected {', '.join(TEXT_SUFFIXES)}, or a folder of such files"
        )
    return found


def file_sha256(path: Path) -> str:
    with _readable(path), path.open("rb") as file:
        digest = hashlib.sha256()
        while chunk := file.read(1 << 20):
            digest.update(chunk)
        return digest.hexdigest()


def corpus_sha256(path: Path) -> str:
    """Of the file's bytes; of a folder, of its files' hashes in name order."""
    if path.is_file():
        return file_sha256(path)
    return hashlib.sha256("".join(file_sha256(file) for file in text_files(path)).encode()).hexdigest()


def documents(path: Path) -> Iterator[str]:
    """All documents of a text source, in order."""
    for file in text_files(path):
        with _readable(file):
            yield from _documents_of(file)


def _documents_of(file: Path) -> Iterator[str]:
    if file.suffix == ".parquet":
        yield from _parquet_documents(file)
        return
    with _open_text(file) as lines:
        if file.name.endswith((".txt", ".txt.gz")):
            yield lines.read()
            return
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield _json_document(line, where=f"{file}:{number}")


def _open_text(file: Path) -> IO[str]:
    return gzip.open(file, "rt", encoding="utf-8") if file.suffix == ".gz" else file.open(encoding="utf-8")


def _json_document(line: str, *, where: str) -> str:
    try:
        text = json.loads(line)["text"]
    except (ValueError, TypeError, KeyError):
        text = None
    if not isinstance(text, str):
        raise ConfigError(f'{where}: every line must be a JSON object with a string "text"')
    return text


def _parquet_documents(file: Path) -> Iterator[str]:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise ConfigError(f"{file}: reading parquet needs pyarrow: pip install 'gossamer[parquet]'") from None
    try:
        with pq.ParquetFile(file) as table:
            if "text" not in table.schema_arrow.names:
                names = ", ".join(table.schema_arrow.names)
                raise ConfigError(
                    f'{file}: no column "text" (there are: {names}); rename the column that holds text'
                )
            for batch in table.iter_batches(batch_size=256, columns=["text"]):
                yield from (text for text in batch.column(0).to_pylist() if text is not None)
    except pa.ArrowInvalid as error:
        raise ConfigError(f"{file}: not a readable parquet file: {error}") from None


@contextmanager
def _readable(file: Path) -> Iterator[None]:
    """What can be wrong with a person's file, said in one line."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file}: not UTF-8 text (byte {error.start}); convert it first") from None
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ConfigError(f"{file}: damaged gzip file ({error}); fetch or pack it again") from None
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror or error}") from None


def load_tokenizer(path: Path) -> Tokenizer:
    """A `tokenizer.json`, set so that text which looks like a special token stays text."""
    with _readable(path):
        text = path.read_text(encoding="utf-8")
    try:
        tokenizer = Tokenizer.from_str(text)
    except Exception as error:  # the library raises bare Exception for a file that is not its own
        raise ConfigError(f"{path}: not a tokenizer.json of the tokenizers library ({error})") from None
    tokenizer.encode_special_tokens = True
    if vocab_size(tokenizer) > VOCAB_SIZE_MAX:
        raise ConfigError(
            f"{path}: {vocab_size(tokenizer)} entries; token shards hold ids below {VOCAB_SIZE_MAX}: "
            f"choose a smaller vocabulary"
        )
    special_tokens(tokenizer, where=str(path))
    return tokenizer


def vocab_size(tokenizer: Tokenizer) -> int:
    """Highest id + 1: a vocabulary may have holes."""
    return 1 + max(tokenizer.get_vocab().values(), default=-1)


def special_tokens(tokenizer: Tokenizer, *, where: str = "tokenizer") -> SpecialTokens:
    vocabulary = tokenizer.get_vocab()
    bos, eos, pad = (
        next((name for name in names if name in vocabulary), None)
        for names in (_BOS_NAMES, _EOS_NAMES, _PAD_NAMES)
    )
    if bos is None or eos is None:
        raise ConfigError(
            f"{where}: no begin or end token; it needs one of {', '.join(_BOS_NAMES)} "
            f"and one of {', '.join(_EOS_NAMES)}"
        )
    return SpecialTokens(bos, eos, pad)


def encoded_documents(texts: Iterable[str], tokenizer: Tokenizer) -> Iterator[np.ndarray]:
    """Each document as uint16 ids between begin and end token."""
    names = special_tokens(tokenizer)
    bos, eos = (np.array([tokenizer.token_to_id(name)], dtype=np.uint16) for name in (names.bos, names.eos))
    for batch in _batches(texts):
        pieces = [list(_pieces(text)) for text in batch]
        encodings = iter(
            tokenizer.encode_batch_fast([p for part in pieces for p in part], add_special_tokens=False)
        )
        for part in pieces:
            ids = [np.array(next(encodings).ids, dtype=np.uint16) for _ in part]
            yield np.concatenate([bos, *ids, eos])


def _batches(texts: Iterable[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    num_chars = 0
    for text in texts:
        batch.append(text)
        num_chars += len(text)
        if num_chars >= BATCH_CHARS:
            yield batch
            batch, num_chars = [], 0
    if batch:
        yield batch


def _pieces(text: str) -> Iterator[str]:
    start = 0
    while len(text) - start > PIECE_CHARS_MAX:
        end = text.find("\n", start + PIECE_CHARS_MAX) + 1
        if not end:
            break
        yield text[start:end]
        start = end
    yield text[start:]
