"""Log lines: their form, and that a flood of one kind is held back and counted."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator

import pytest

from peer import logs


@pytest.fixture(autouse=True)
def _root_logger_as_before() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = handlers, level


def test_json_lines_hold_time_level_and_message(capsys: pytest.CaptureFixture[str]):
    logs.set_up("info", "json")
    logging.getLogger("peer.x").warning("stage %d is empty", 3)
    logging.getLogger("peer.x").debug("not shown")
    [line] = capsys.readouterr().err.splitlines()
    record = json.loads(line)
    assert (record["level"], record["logger"], record["message"]) == ("warning", "peer.x", "stage 3 is empty")
    assert record["time"].endswith("Z")


def test_set_up_twice_still_prints_once(capsys: pytest.CaptureFixture[str]):
    """Lines printed twice by a second handler are a classic of this ecosystem."""
    logs.set_up()
    logs.set_up()
    logging.getLogger("hivemind.dht").info("chatter")
    logging.getLogger("hivemind.dht").warning("trouble")
    [line] = capsys.readouterr().err.splitlines()
    assert "trouble" in line


def test_a_flood_of_one_kind_is_held_back_and_counted():
    now = 0.0
    repeat_filter = logs.RepeatFilter(clock=lambda: now)

    def passes(message: str, *args: object) -> str | None:
        record = logging.LogRecord("peer.x", logging.INFO, "", 0, message, args, None)
        return record.getMessage() if repeat_filter.filter(record) else None

    shown = [passes("%s %s", "retry", n) for n in range(20)]
    assert [text for text in shown if text] == [f"retry {n}" for n in range(logs.REPEATS_MAX)]
    assert passes("%s %s", "adopted", 3) == "adopted 3"  # another kind is still heard
    now = logs.REPEAT_WINDOW_S
    assert passes("%s %s", "retry", 20) == "retry 20 (and 15 more like it in the last minute)"


def test_progress_is_never_held_back():
    repeat_filter = logs.RepeatFilter(clock=lambda: 0.0)
    record = logging.LogRecord(logs.PROGRESS_LOGGER, logging.INFO, "", 0, "round", (), None)
    assert all(repeat_filter.filter(record) for _ in range(50))
