"""Texts and tokenizers: every source a person may name, and every way in which it can be wrong."""

from __future__ import annotations

import gzip
import json
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models

import peer.tokens as tokens
from peer.tokens import (
    BUILT_IN_CORPORA,
    BUILT_IN_TOKENIZERS,
    corpus_path,
    corpus_sha256,
    documents,
    encoded_documents,
    file_sha256,
    load_tokenizer,
    special_tokens,
    tokenizer_path,
)
from protocols.errors import ConfigError

TEXTS = ["Call me Ishmael.", "line one\nline two — naïve 鯨 🐋\n", ""]


@pytest.fixture(scope="module")
def bpe() -> Tokenizer:
    return load_tokenizer(tokenizer_path("bpe1024"))


def write_json_lines(path, texts=TEXTS):
    lines = "".join(json.dumps({"year": 1851, "text": text}) + "\n" for text in texts)
    path.write_bytes(gzip.compress(lines.encode()) if path.suffix == ".gz" else lines.encode())
    return path


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_json_lines_give_one_document_a_line(tmp_path, name):
    """The same text packed and unpacked is the same corpus."""
    assert list(documents(write_json_lines(tmp_path / name))) == TEXTS


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz"])
def test_text_file_is_one_document(tmp_path, name):
    """A novel."""
    content = TEXTS[1].encode()
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    assert list(documents(tmp_path / name)) == [TEXTS[1]]


def test_parquet_gives_one_document_a_row(tmp_path):
    """A file from a data hub: other columns are not read, a row without text is no document."""
    table = pa.table({"text": [TEXTS[0], None, TEXTS[1]], "id": [1, 2, 3]})
    pq.write_table(table, tmp_path / "a.parquet")
    assert list(documents(tmp_path / "a.parquet")) == TEXTS[:2]


def test_parquet_without_its_library_names_the_remedy(tmp_path, monkeypatch):
    """The plain installation has no pyarrow."""
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ConfigError, match=r"pip install 'gossamer\[parquet\]'"):
        list(documents(tmp_path / "a.parquet"))


def test_parquet_without_a_text_column_says_what_there_is(tmp_path):
    """The column was called `content`."""
    pq.write_table(pa.table({"content": ["x"], "id": [1]}), tmp_path / "a.parquet")
    with pytest.raises(ConfigError, match="content, id"):
        list(documents(tmp_path / "a.parquet"))


def test_folder_is_read_in_name_order_and_its_hash_covers_all_files(tmp_path):
    """Parts of one data set; a README beside them is no text of it."""
    write_json_lines(tmp_path / "part-2.jsonl", ["second"])
    write_json_lines(tmp_path / "part-1.jsonl", ["first"])
    (tmp_path / "README.md").write_text("about")
    assert list(documents(tmp_path)) == ["first", "second"]
    before = corpus_sha256(tmp_path)
    write_json_lines(tmp_path / "part-2.jsonl", ["changed"])
    assert corpus_sha256(tmp_path) != before


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"caf\xe9", "not UTF-8"),
        ("a.txt.gz", b"plain", "damaged gzip"),
        (
            "a.jsonl.gz",
            gzip.compress(b'{"text": "' + bytes(range(97, 123)) * 40 + b'"}')[:-20],
            "damaged gzip",
        ),
        ("a.jsonl", b'{"text": "ok"}\nnot json\n', r"a\.jsonl:2: "),
        ("a.jsonl", b'{"body": "ok"}\n', r"a\.jsonl:1: .*\"text\""),
        ("a.jsonl", b"[1]\n", r"a\.jsonl:1: "),
        ("a.jsonl", b'{"text": 7}\n', r"a\.jsonl:1: "),
        ("a.parquet", b"PAR1 but nothing more", "not a readable parquet"),
        ("a.docx", b"x", "not a text source"),
    ],
)
def test_broken_source_is_one_clear_message(tmp_path, name, content, message):
    """Each names the file, and where it can the line."""
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=message) as caught:
        list(documents(tmp_path / name))
    assert name in str(caught.value)


def test_built_in_files_are_those_of_their_readme():
    """The README beside them is what a person checks against."""
    lines = (corpus_path("sotu").parent / "README.md").read_text().split("```")[1].split("\n")
    hashes = {name: digest for digest, name in (line.split() for line in lines if line)}
    paths = [*map(corpus_path, BUILT_IN_CORPORA), *map(tokenizer_path, BUILT_IN_TOKENIZERS)]
    assert {path.name: file_sha256(path) for path in paths} == hashes


def test_missing_corpus_names_place_and_choices():
    """A typing error in the RunSpec."""
    with pytest.raises(ConfigError, match=r"data.corpus 'stou'.*sotu, moby-dick"):
        corpus_path("stou")


@pytest.mark.parametrize("content", ["{}", "not json", '{"version": "1.0", "model": {"type": "?"}}'])
def test_file_that_is_no_tokenizer_is_refused(tmp_path, content):
    """A config.json given for a tokenizer.json."""
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ConfigError, match=r"not a tokenizer\.json"):
        load_tokenizer(tmp_path / "tokenizer.json")


def word_level(path, vocabulary):
    Tokenizer(models.WordLevel(vocabulary, unk_token="<s>")).save(str(path))
    return path


def test_vocabulary_beyond_uint16_is_refused(tmp_path):
    """Shards hold two bytes a token."""
    with pytest.raises(ConfigError, match="smaller vocabulary"):
        load_tokenizer(word_level(tmp_path / "t.json", {"<s>": 0, "</s>": 1, "far": 1 << 16}))


def test_tokenizer_without_begin_or_end_is_refused(tmp_path):
    """Documents could not be told apart."""
    with pytest.raises(ConfigError, match="no begin or end token"):
        load_tokenizer(word_level(tmp_path / "t.json", {"<s>": 0, "a": 1}))


def test_special_tokens_of_a_foreign_vocabulary_are_found(tmp_path):
    """SentencePiece's names, and no padding."""
    tokenizer = load_tokenizer(word_level(tmp_path / "t.json", {"<s>": 0, "</s>": 1}))
    assert special_tokens(tokenizer) == ("<s>", "</s>", None)


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"])), max_size=4))
def test_any_text_comes_back_exactly(bpe, texts):
    """Byte-level BPE loses nothing; each document stands between its begin and end."""
    encoded = list(encoded_documents(texts, bpe))
    assert [ids[0] for ids in encoded] == [1] * len(texts)
    assert [ids[-1] for ids in encoded] == [2] * len(texts)
    assert [bpe.decode(ids[1:-1].tolist()) for ids in encoded] == texts


def test_text_that_spells_a_special_token_stays_text(bpe):
    """A page about tokenizers must not end the document."""
    (ids,) = encoded_documents(["before <|eos|> after"], bpe)
    assert np.count_nonzero(ids == 2) == 1


def test_long_document_is_encoded_in_pieces_without_loss(bpe, monkeypatch):
    """A whole library in one file: pieces end at line ends, a line longer than a piece stays whole."""
    monkeypatch.setattr(tokens, "PIECE_CHARS_MAX", 16)
    text = "".join(f"line {i} of a long book\n" for i in range(40)) + "x" * 100
    pieces = list(tokens._pieces(text))
    assert "".join(pieces) == text
    assert len(pieces) > 20
    (ids,) = encoded_documents([text], bpe)
    assert bpe.decode(ids[1:-1].tolist()) == text
