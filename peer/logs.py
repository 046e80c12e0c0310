"""Log lines of a peer: UTC times, one handler, and no flood of the same line.

Call `set_up` after `hivemind` is imported: that library installs a handler of its own on import, which would print
everything a second time in another form.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Callable

REPEATS_MAX = 5  # of one line in REPEAT_WINDOW_S
REPEAT_WINDOW_S = 60.0
KINDS_MAX = 1000  # remembered
PROGRESS_LOGGER = "peer.progress"  # says the same kind of thing all the time, which is its job
NOISY_LIBRARIES = ("hivemind", "asyncio", "grpc", "filelock", "matplotlib")


class RepeatFilter(logging.Filter):
    """Lets the first few of the same kind of line through in each minute, and says how many it held back.

    A kind is the logger, the message before formatting, and its first argument.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._seen: dict[tuple[str, str], tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        if record.name == PROGRESS_LOGGER:
            return True
        first_argument = record.args[0] if isinstance(record.args, tuple) and record.args else ""
        key, now = (record.name, f"{record.msg} {first_argument}"), self._clock()
        if len(self._seen) >= KINDS_MAX:
            self._seen.clear()
        since, count = self._seen.get(key, (now, 0))
        if now - since >= REPEAT_WINDOW_S:
            if count > REPEATS_MAX:
                record.msg = f"{record.msg} (and {count - REPEATS_MAX} more like it in the last minute)"
            since, count = now, 0
        self._seen[key] = (since, count + 1)
        return count < REPEATS_MAX


# by number: hivemind gives the levels other names when it is imported
LEVELS = {10: "debug", 20: "info", 30: "warning", 40: "error", 50: "critical"}


class JsonFormatter(logging.Formatter):
    """One object a line."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": self.formatTime(record),
            "level": LEVELS.get(record.levelno, "info"),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["stack"] = self.formatException(record.exc_info)
        return json.dumps(line)


def set_up(level: str = "info", log_format: str = "human") -> None:
    """Log to stderr. Libraries are heard from warnings on."""
    human = logging.Formatter("%(asctime)s %(levelname)-7s %(message)s")
    formatter = JsonFormatter() if log_format == "json" else human
    formatter.converter = time.gmtime
    formatter.default_time_format, formatter.default_msec_format = "%Y-%m-%dT%H:%M:%S", "%s.%03dZ"
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter)
    handler.addFilter(RepeatFilter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    for name in NOISY_LIBRARIES:
        library = logging.getLogger(name)
        library.handlers.clear()
        library.propagate = True
        library.setLevel(logging.WARNING)
