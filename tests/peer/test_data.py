"""Token data: the counts of the corpus' README, addresses instead of iterators, one tokenization a machine."""

from __future__ import annotations

import json
import multiprocessing
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from peer import data as data_module
from peer.data import TokenData, bigram_loss, fingerprint, load_data
from protocols.errors import ConfigError
from protocols.run_spec import RunSpec, preset


def a_spec(corpus: str | Path = "sotu", **data) -> RunSpec:
    return preset("nano", data={"corpus": str(corpus), **data}, rounds={"seq_len": 32})


def some_data(num_train=10_000, num_validation=1_000) -> TokenData:
    """Each id is its own place, modulo 65536: a window shows where it was cut."""
    return TokenData(
        np.arange(num_train).astype("<u2"), np.arange(num_validation).astype("<u2"), vocab_size=1 << 16
    )


@pytest.fixture(scope="module")
def sotu() -> TokenData:
    return load_data(a_spec(), Path(os.environ["GOSSAMER_CACHE_DIR"]))


@pytest.fixture
def corpus(tmp_path) -> Path:
    """41 short documents: two of them, 10 and 30, are held out."""
    path = tmp_path / "corpus.jsonl"
    path.write_text(
        "".join(json.dumps({"text": f"Document {i} speaks of whales. " * 9}) + "\n" for i in range(41))
    )
    return path


def test_built_in_text_has_the_published_counts(sotu):
    """The README beside the corpus states them; a changed split or tokenizer shows here."""
    assert (len(sotu.train), len(sotu.validation), sotu.vocab_size) == (3_452_142, 165_125, 1024)
    assert np.count_nonzero(sotu.validation == 1) == 12


def test_bigram_yardstick_of_the_built_in_text(sotu):
    """3.85 nats a token is what a trained model must beat."""
    assert bigram_loss(sotu.train, sotu.validation, sotu.vocab_size) == pytest.approx(3.85, abs=0.02)


def test_bigram_loss_by_hand():
    """Train 0 1 0 1 0 2: c(0,1)=2 of c(0)=3, T(0)=2; p(1) = 3/9. Validation 0 1: (2 + 2/3) / 5."""
    loss = bigram_loss(np.array([0, 1, 0, 1, 0, 2], "<u2"), np.array([0, 1], "<u2"), vocab_size=3)
    assert loss == pytest.approx(-np.log((2 + 2 * 3 / 9) / 5))


def test_bigram_loss_after_a_context_never_seen_is_the_unigram():
    """No count to divide by."""
    loss = bigram_loss(np.array([0, 0, 1], "<u2"), np.array([2, 1], "<u2"), vocab_size=3)
    assert loss == pytest.approx(-np.log(2 / 6))


def test_sample_is_the_same_on_every_machine():
    """Golden values: an originator that resumes, or a peer that checks one, must cut the same windows for ever."""
    tokens_BL, targets_BL = some_data().sample(7, 3, "12D3KooWa", 41, rows=3, seq_len=4)
    assert tokens_BL.dtype == torch.int64
    assert tokens_BL[:, 0].tolist() == [1656, 832, 7144]
    assert torch.equal(targets_BL, tokens_BL + 1)


@given(st.lists(st.integers(0, 1 << 62), min_size=3, max_size=3), st.text(max_size=9), st.integers(0, 3))
def test_any_part_of_the_address_changes_the_sample(numbers, originator, part):
    """Two originators, or two rounds, must not train on the same rows."""
    address = [numbers[0], numbers[1], originator, numbers[2]]
    other = list(address)
    other[part] = other[part] + ("x" if part == 2 else 1)
    data = some_data(60_000)
    first, second = (data.sample(*a, rows=8, seq_len=4)[0] for a in (address, other))
    assert not torch.equal(first, second)
    assert torch.equal(first, data.sample(*address, rows=8, seq_len=4)[0])


@given(st.integers(2, 40), st.integers(0, 40))
def test_samples_stay_inside_the_text(seq_len, extra):
    """Also in the shortest text that holds one sequence."""
    data = some_data(seq_len + 1 + extra)
    tokens_BL, targets_BL = data.sample(0, 0, "a", 0, rows=16, seq_len=seq_len)
    assert tokens_BL.shape == targets_BL.shape == (16, seq_len)
    assert torch.equal(targets_BL, tokens_BL + 1)


@given(st.integers(4, 500), st.integers(1, 5))
def test_validation_takes_every_window_once_before_any_twice(num_validation, rows):
    """Windows do not overlap, so each held-out token weighs the same."""
    num_windows = (num_validation - 1) // 3
    data = some_data(num_validation=num_validation)
    batches = [data.validation_batch(i, rows, seq_len=3)[0] for i in range(num_windows)]
    starts = torch.cat(batches)[:num_windows, 0].tolist()
    assert sorted(starts) == [3 * i for i in range(num_windows)]


def test_first_validation_batches_spread_over_the_text():
    """Four batches of eight windows see all of 1790 to 2021, not George Washington alone."""
    data = some_data(num_validation=60_000)
    starts = torch.cat([data.validation_batch(i, 8, 128)[0][:, 0] for i in range(4)]).sort().values
    assert torch.diff(starts).max() < 60_000 / 8


@pytest.mark.parametrize("method", ["sample", "validation_batch"])
def test_text_shorter_than_a_sequence_is_refused(method):
    """One window needs seq_len + 1 ids."""
    data = some_data(num_train=32, num_validation=32)
    arguments = (0, 0, "a", 0, 1, 32) if method == "sample" else (0, 1, 32)
    with pytest.raises(ConfigError, match="32 tokens, a sequence needs 33"):
        getattr(data, method)(*arguments)


def test_every_twentieth_document_is_held_out(corpus, tmp_path):
    """Documents 10 and 30 of 41."""
    data = load_data(a_spec(corpus), tmp_path / "cache")
    assert np.count_nonzero(data.validation == 1) == 2
    assert np.count_nonzero(data.train == 1) == 39


def test_few_documents_hold_out_the_last_twentieth_of_the_tokens(tmp_path):
    """A single novel has no document to spare."""
    (tmp_path / "novel.txt").write_text("It was a dark and stormy night; the sea was wide. " * 200)
    data = load_data(a_spec(tmp_path / "novel.txt"), tmp_path / "cache")
    total = len(data.train) + len(data.validation)
    assert len(data.validation) == total // 20
    assert data.train[0] == 1
    assert data.validation[-1] == 2


def test_second_start_maps_what_the_first_tokenized(corpus, tmp_path, monkeypatch):
    """Tokenizing costs seconds a start, mapping nothing."""
    first = load_data(a_spec(corpus), tmp_path / "cache")
    monkeypatch.setattr(data_module, "encoded_documents", lambda *_: pytest.fail("tokenized twice"))
    second = load_data(a_spec(corpus), tmp_path / "cache")
    assert np.array_equal(first.train, second.train)
    assert isinstance(second.train, np.memmap)


def test_changed_corpus_is_tokenized_anew(corpus, tmp_path):
    """Same name, other bytes."""
    before = load_data(a_spec(corpus), tmp_path / "cache")
    corpus.write_text(corpus.read_text() + json.dumps({"text": "One more."}) + "\n")
    assert len(load_data(a_spec(corpus), tmp_path / "cache").train) > len(before.train)


@pytest.mark.parametrize("damage", ["flip", "truncate", "no index", "bad index"])
def test_damaged_cache_is_made_again(corpus, tmp_path, damage, caplog):
    """A disk that lost a block, or a person who tidied up."""
    good = load_data(a_spec(corpus), tmp_path / "cache")
    expected = np.array(good.train)
    (file,) = (tmp_path / "cache").glob("tokens/*/train.u16")
    if damage == "flip":
        file.write_bytes(b"\xff\xff" + file.read_bytes()[2:])
    elif damage == "truncate":
        file.write_bytes(file.read_bytes()[:-2])
    elif damage == "no index":
        (file.parent / "index.json").unlink()
    else:
        (file.parent / "index.json").write_text("{}")
    assert np.array_equal(load_data(a_spec(corpus), tmp_path / "cache").train, expected)
    assert "made again" in caplog.text


def test_shard_folder_is_a_corpus_and_keeps_its_fingerprint(corpus, tmp_path):
    """One machine tokenizes, the others get its folder: the run's hashes are those of the text."""
    load_data(a_spec(corpus), tmp_path / "cache")
    (shards,) = (found for found in (tmp_path / "cache" / "tokens").iterdir() if found.is_dir())
    assert fingerprint(str(shards), "bpe1024") == fingerprint(str(corpus), "bpe1024")
    loaded = load_data(a_spec(shards), tmp_path / "unused")
    assert len(loaded.validation) > 0
    assert not (tmp_path / "unused").exists()
    with pytest.raises(ConfigError, match="shards were made with the tokenizer"):
        load_data(a_spec(shards, tokenizer="bpe4096"), tmp_path / "unused")
    (shards / "train.u16").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"train\.u16: damaged"):
        load_data(a_spec(shards), tmp_path / "unused")


def test_run_with_other_hashes_names_both(corpus, tmp_path):
    """Half the swarm has the first edition, half the second."""
    hashes = fingerprint(str(corpus), "bpe1024")
    load_data(a_spec(corpus, corpus_sha256=hashes[0], tokenizer_sha256=hashes[1]), tmp_path / "cache")
    for field, found in (("corpus_sha256", hashes[0]), ("tokenizer_sha256", hashes[1])):
        with pytest.raises(ConfigError, match=f"{'0' * 64}.*{found}"):
            load_data(a_spec(corpus, **{field: "0" * 64}), tmp_path / "cache")


def test_tokenizer_larger_than_the_model_is_refused(corpus, tmp_path):
    """An id beyond the embedding would crash the first forward."""
    with pytest.raises(ConfigError, match=r"4096 entries, model\.vocab_size is 1024"):
        load_data(a_spec(corpus, tokenizer="bpe4096"), tmp_path / "cache")


def test_corpus_too_short_for_the_run_is_refused_at_the_start(tmp_path):
    """Not at the first validation, an hour later."""
    (tmp_path / "a.txt").write_text("Too short to hold out a sequence of it. " * 9)
    with pytest.raises(ConfigError, match="validation text has"):
        load_data(a_spec(tmp_path / "a.txt"), tmp_path / "cache")


def test_failed_tokenization_leaves_nothing_behind(tmp_path):
    """The file breaks off in the middle; after it is mended the next start works."""
    path = tmp_path / "corpus.jsonl"
    path.write_text('{"text": "good"}\n{"text": "cut o')
    with pytest.raises(ConfigError, match=r"corpus.jsonl:2"):
        load_data(a_spec(path), tmp_path / "cache")
    assert [entry.suffix for entry in (tmp_path / "cache" / "tokens").iterdir()] == [".lock"]


def test_cache_that_cannot_be_written_is_one_message(corpus, tmp_path):
    """A file stands where the folder should be (a full disk and a wrong owner take the same way out)."""
    (tmp_path / "cache").write_text("in the way")
    with pytest.raises(ConfigError, match=r"token cache .*set another cache_dir"):
        load_data(a_spec(corpus), tmp_path / "cache")


def _load_and_report(corpus: str, cache: str, queue) -> None:
    real = data_module._write_shards

    def counted(*arguments) -> None:
        queue.put("tokenized")
        real(*arguments)

    data_module._write_shards = counted
    queue.put(len(load_data(a_spec(corpus), Path(cache)).train))


def test_peers_of_one_host_tokenize_once(corpus, tmp_path):
    """Four first-stage peers start together on an empty cache."""
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    arguments = (str(corpus), str(tmp_path / "cache"), queue)
    processes = [context.Process(target=_load_and_report, args=arguments) for _ in range(3)]
    for process in processes:
        process.start()
    reports = [queue.get(timeout=100) for _ in range(4)]
    for process in processes:
        process.join(timeout=100)
    assert reports.count("tokenized") == 1
    assert len({report for report in reports if report != "tokenized"}) == 1
