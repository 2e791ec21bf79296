"""Log lines about retries and dead letters: one of a kind at a time, and the others are counted."""

from __future__ import annotations

from typing import Any

from structlog.testing import capture_logs

from broker_adapter.runtime.clock import ManualClock
from dmq.broker.failures.failure_log import INTERVAL_S, KINDS_MAX, LINES_MAX, FailureLog

_LATER_MS = int(INTERVAL_S * 1000)


def _fail(log: FailureLog, error: str = "E: x", count: int = 1) -> None:
    for _ in range(count):
        log.failed("message_retried", group="billing", topic="orders", error=error, message_id="m")


def test_a_kind_is_logged_once_in_a_while() -> None:
    """A thousand failures are one line, and the next one has the number of those left out."""
    clock = ManualClock()
    log = FailureLog(clock)
    with capture_logs() as lines:
        _fail(log, count=1_000)
        clock.advance(_LATER_MS)
        _fail(log)
    assert [(each["event"], each["log_level"], each.get("left_out")) for each in lines] == [
        ("message_retried", "info", None),
        ("message_retried", "info", 999),
    ]


def test_errors_that_differ_each_time_fill_no_log() -> None:
    """An error with a number in it: some lines in a while, and no more kinds are remembered than the bound."""
    clock = ManualClock()
    log = FailureLog(clock)
    lines: list[Any]
    with capture_logs() as lines:
        for number in range(3 * KINDS_MAX):
            _fail(log, f"E: {number}")
        assert len(lines) == LINES_MAX
        for number in range(3 * KINDS_MAX):
            clock.advance(_LATER_MS)
            _fail(log, f"E: {number}")
    assert len(log._kinds) == KINDS_MAX
