"""Token data of a run: tokenized once a machine into shards, then any sample by its address.

Invariant: a sample depends on (seed, round, originator, counter) and the corpus alone, so any peer can fetch
any sample and a resumed run goes on where it stopped. There is no iterator state to save.
"""

from __future__ import annotations

import hashlib
import logging
import math
import shutil
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from filelock import FileLock
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor

from peer.tokens import (
    corpus_path,
    corpus_sha256,
    documents,
    encoded_documents,
    file_sha256,
    load_tokenizer,
    tokenizer_path,
    vocab_size,
)
from protocols.errors import ConfigError
from protocols.run_spec import RunSpec

logger = logging.getLogger(__name__)

SHARD_DTYPE = np.dtype("<u2")
INDEX_NAME = "index.json"
SPLIT_EVERY, SPLIT_REMAINDER = 20, 10  # document i is held out when i % 20 == 10
DOCUMENTS_MIN = SPLIT_EVERY + 1  # with fewer, the last twentieth of the tokens is held out
INVERSE_GOLDEN_RATIO = (math.sqrt(5) - 1) / 2


class _Split(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")
    num_tokens: int = Field(ge=0)
    sha256: str


class ShardIndex(BaseModel):
    """`index.json` of a shard folder: what the two token files hold and what they were made from."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    format: Literal[1] = 1
    corpus_sha256: str
    tokenizer_sha256: str
    vocab_size: int
    train: _Split
    validation: _Split


@dataclass(frozen=True, slots=True, eq=False)
class TokenData:
    """Ids of both splits (uint16, memory-mapped), and samples of them."""

    train: np.ndarray
    validation: np.ndarray
    vocab_size: int

    def sample(
        self, seed: int, round: int, originator: str, counter: int, rows: int, seq_len: int
    ) -> tuple[Tensor, Tensor]:
        """(tokens_BL, targets_BL), int64: windows of the training text at places drawn from the address.

        Drawn from SHAKE-256 and not from a library's generator: every version on every machine must agree.
        """
        num_starts = self._num_starts(self.train, seq_len, "training")
        address = f"{seed}/{round}/{originator}/{counter}".encode()
        draws = np.frombuffer(hashlib.shake_256(address).digest(8 * rows), dtype="<u8")
        return _windows(self.train, (int(draw) % num_starts for draw in draws), seq_len)

    def validation_batch(self, index: int, rows: int, seq_len: int) -> tuple[Tensor, Tensor]:
        """Fixed windows, the same for everyone; the first few already spread over the whole held-out text.

        No window comes twice before all came once: the stride shares no factor with their number.
        """
        num_windows = (self._num_starts(self.validation, seq_len, "validation") - 1) // seq_len + 1
        stride = max(1, round(num_windows * INVERSE_GOLDEN_RATIO))
        while math.gcd(stride, num_windows) != 1:
            stride += 1
        numbers = range(index * rows, (index + 1) * rows)
        return _windows(self.validation, (n * stride % num_windows * seq_len for n in numbers), seq_len)

    def _num_starts(self, tokens: np.ndarray, seq_len: int, name: str) -> int:
        num_starts = len(tokens) - seq_len  # a window has seq_len + 1 ids: the last is a target only
        if num_starts < 1:
            raise ConfigError(
                f"the {name} text has {len(tokens)} tokens, a sequence needs {seq_len + 1}; "
                f"use a longer text or a smaller rounds.seq_len"
            )
        return num_starts


def _windows(tokens: np.ndarray, starts: Iterable[int], seq_len: int) -> tuple[Tensor, Tensor]:
    windows = np.stack([tokens[start : start + seq_len + 1] for start in starts]).astype(np.int64)
    ids = torch.from_numpy(windows)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def load_data(spec: RunSpec, cache_folder: Path) -> TokenData:
    """The run's data. The first call on a machine tokenizes (about 1 MB of text a CPU second), others map.

    Blocks; several processes may call it at once, one of them does the work.
    """
    corpus, tokenizer_file = corpus_path(spec.data.corpus), tokenizer_path(spec.data.tokenizer)
    hashes = fingerprint(spec.data.corpus, spec.data.tokenizer)
    for field, expected, found, path in (
        ("corpus", spec.data.corpus_sha256, hashes[0], corpus),
        ("tokenizer", spec.data.tokenizer_sha256, hashes[1], tokenizer_file),
    ):
        if expected and expected != found:
            raise ConfigError(
                f"data.{field}: the run wants SHA-256 {expected}, {path} has {found}; "
                f"use the file that the run was made with"
            )
    if _is_shard_folder(corpus):
        data = _open_shards(corpus, _read_index(corpus))
    else:
        data = _cached_shards(corpus, tokenizer_file, hashes, cache_folder)
    if data.vocab_size > spec.model.vocab_size:
        raise ConfigError(
            f"tokenizer {spec.data.tokenizer!r} has {data.vocab_size} entries, model.vocab_size is "
            f"{spec.model.vocab_size}; raise model.vocab_size or choose another tokenizer"
        )
    data.sample(spec.seed, 0, "", 0, 1, spec.rounds.seq_len)
    data.validation_batch(0, 1, spec.rounds.seq_len)
    return data


def fingerprint(corpus: str, tokenizer: str) -> tuple[str, str]:
    """(corpus_sha256, tokenizer_sha256) for a RunSpec; shards answer for the corpus they were made from."""
    corpus_place, tokenizer_place = corpus_path(corpus), tokenizer_path(tokenizer)
    tokenizer_hash = file_sha256(tokenizer_place)
    if not _is_shard_folder(corpus_place):
        return corpus_sha256(corpus_place), tokenizer_hash
    index = _read_index(corpus_place)
    if index.tokenizer_sha256 != tokenizer_hash:
        raise ConfigError(
            f"{corpus_place}: shards were made with the tokenizer of SHA-256 {index.tokenizer_sha256}, "
            f"{tokenizer_place} has {tokenizer_hash}; use that tokenizer, or make the shards again"
        )
    return index.corpus_sha256, tokenizer_hash


def _is_shard_folder(path: Path) -> bool:
    return (path / INDEX_NAME).is_file()


def _read_index(folder: Path) -> ShardIndex:
    try:
        return ShardIndex.model_validate_json((folder / INDEX_NAME).read_bytes())
    except (OSError, ValidationError):
        raise ConfigError(
            f"{folder / INDEX_NAME}: not an index of token shards; make the shards again"
        ) from None


def _split_file(folder: Path, split: str) -> Path:
    return folder / f"{split}.u16"


def _open_shards(folder: Path, index: ShardIndex) -> TokenData:
    """Map both files after checking size and hash: a flipped bit would be text that nobody else has."""
    mapped = []
    for split, facts in (("train", index.train), ("validation", index.validation)):
        path = _split_file(folder, split)
        if (
            file_sha256(path) != facts.sha256
            or path.stat().st_size != facts.num_tokens * SHARD_DTYPE.itemsize
        ):
            raise ConfigError(
                f"{path}: damaged (its SHA-256 is not the one in {INDEX_NAME}); make the shards again"
            )
        empty = np.zeros(0, dtype=SHARD_DTYPE)  # an empty file cannot be mapped
        mapped.append(np.memmap(path, dtype=SHARD_DTYPE, mode="r") if facts.num_tokens else empty)
    return TokenData(mapped[0], mapped[1], index.vocab_size)


def _cached_shards(
    corpus: Path, tokenizer_file: Path, hashes: tuple[str, str], cache_folder: Path
) -> TokenData:
    """The corpus' shards from the cache; made when missing or damaged, by one process while others wait."""
    folder = cache_folder / "tokens" / f"{hashes[0][:16]}-{hashes[1][:16]}"
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{folder}.lock"):
            if folder.exists():
                try:
                    return _open_shards(folder, _read_index(folder))
                except ConfigError as error:
                    logger.warning("token cache is made again: %s", error)
                    shutil.rmtree(folder)
            logger.info("tokenizing %s, once on this machine", corpus)
            temporary = folder.with_name(f"{folder.name}.tmp")  # ours alone: we hold the lock
            shutil.rmtree(temporary, ignore_errors=True)  # a process killed at work left it
            try:
                _write_shards(temporary, corpus, tokenizer_file, hashes)
                temporary.rename(folder)
            finally:
                shutil.rmtree(temporary, ignore_errors=True)
            return _open_shards(folder, _read_index(folder))
    except OSError as error:
        raise ConfigError(
            f"token cache {folder}: {error.strerror or error}; free space or set another cache_dir"
        ) from None


def _write_shards(folder: Path, corpus: Path, tokenizer_file: Path, hashes: tuple[str, str]) -> None:
    folder.mkdir()
    tokenizer = load_tokenizer(tokenizer_file)
    digests = {"train": hashlib.sha256(), "validation": hashlib.sha256()}
    counts = dict.fromkeys(digests, 0)
    with ExitStack() as stack:
        sinks = {split: stack.enter_context(_split_file(folder, split).open("wb")) for split in digests}
        for held_out, ids in _split_documents(encoded_documents(documents(corpus), tokenizer)):
            split = "validation" if held_out else "train"
            data = ids.astype(SHARD_DTYPE, copy=False).tobytes()
            sinks[split].write(data)
            digests[split].update(data)
            counts[split] += len(ids)
    train, validation = (
        _Split(num_tokens=counts[split], sha256=digests[split].hexdigest())
        for split in ("train", "validation")
    )
    index = ShardIndex(
        corpus_sha256=hashes[0],
        tokenizer_sha256=hashes[1],
        vocab_size=vocab_size(tokenizer),
        train=train,
        validation=validation,
    )
    (folder / INDEX_NAME).write_text(index.model_dump_json(indent=2) + "\n")


def _split_documents(encoded: Iterator[np.ndarray]) -> Iterator[tuple[bool, np.ndarray]]:
    """(held out?, ids) in order."""
    head = list(islice(encoded, DOCUMENTS_MIN))
    if len(head) == DOCUMENTS_MIN:
        for i, ids in enumerate(chain(head, encoded)):
            yield i % SPLIT_EVERY == SPLIT_REMAINDER, ids
    elif head:
        tokens = np.concatenate(head)
        start = len(tokens) - len(tokens) // SPLIT_EVERY
        yield False, tokens[:start]
        yield True, tokens[start:]


def bigram_loss(train: np.ndarray, validation: np.ndarray, vocab_size: int) -> float:
    """Nats per validation token of a bigram model counted on `train`: the yardstick that a run must beat.

    Witten-Bell: p(w | v) = (c(v, w) + T(v) p(w)) / (c(v) + T(v)) with T(v) the number of different successors
    of v and p(w) = (c(w) + 1) / (N + V). Witten and Bell 1991, method C.
    """
    left, right = validation[:-1].astype(np.int64), validation[1:].astype(np.int64)
    pairs, pair_counts = np.unique(train[:-1].astype(np.int64) * vocab_size + train[1:], return_counts=True)
    followers = np.bincount(pairs // vocab_size, minlength=vocab_size)[left]
    context_counts = np.bincount(train[:-1], minlength=vocab_size)[left]
    unigram = (np.bincount(train, minlength=vocab_size) + 1) / (len(train) + vocab_size)

    wanted = left * vocab_size + right
    place = np.minimum(np.searchsorted(pairs, wanted), len(pairs) - 1)
    seen = np.where(pairs[place] == wanted, pair_counts[place], 0)
    total = context_counts + followers
    # a context never seen has T(v) = 0 and falls back to p(w)
    probability = np.where(
        total > 0, (seen + followers * unigram[right]) / np.maximum(total, 1), unigram[right]
    )
    return float(-np.log(probability).mean())
