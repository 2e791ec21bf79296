"""Log lines of a library in an application without any configuration of logging."""

from __future__ import annotations

import logging

import pytest
import structlog

from broker_adapter.runtime.log import LibraryLog


def test_a_traceback_has_its_own_lines(caplog: pytest.LogCaptureFixture) -> None:
    """Below the line with the fields, as from standard logging, so that a person can read it."""
    assert not structlog.is_configured()
    try:
        raise ValueError("no paper")
    except ValueError:
        LibraryLog("rockdmq.test").log(logging.ERROR, "message_failed", group="printer", exc_info=True)
    (record,) = caplog.records
    line, first, *_, last = record.getMessage().splitlines()
    assert (line, first, last) == (
        "event='message_failed' group='printer'",
        "Traceback (most recent call last):",
        "ValueError: no paper",
    )


def test_a_line_without_a_traceback_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    """A line break in a value is escaped."""
    LibraryLog("rockdmq.test").error("message_failed", group="a\nb")
    assert [record.getMessage() for record in caplog.records] == ["event='message_failed' group='a\\nb'"]
