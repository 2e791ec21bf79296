"""What long work says on stderr while it lasts."""

from __future__ import annotations

import io
import sys

import pytest

from broker_adapter.runtime.clock import ManualClock
from dmq.cli.bulk import progress as module
from dmq.cli.bulk.progress import Progress


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> ManualClock:
    """The clock that the lines go by."""
    clock = ManualClock()
    monkeypatch.setattr(module, "SystemClock", lambda: clock)
    return clock


def test_quick_work_prints_nothing_and_long_work_now_and_then(
    clock: ManualClock, capsys: pytest.CaptureFixture[str]
) -> None:
    """A line for every five seconds, however often it is told, and without what could move the cursor."""
    with Progress("work\x1b[2J") as progress:
        for second in range(1, 12):
            clock.advance(1000)
            progress.show(f"{second} done")
    assert capsys.readouterr() == ("", "dmq: work\\x1b[2J: 5 done\ndmq: work\\x1b[2J: 10 done\n")


def test_quiet_work_prints_nothing(clock: ManualClock, capsys: pytest.CaptureFixture[str]) -> None:
    """A program wants its answer only."""
    with Progress("work", quiet=True) as progress:
        clock.advance(60_000)
        progress.show("half")
    assert capsys.readouterr() == ("", "")


class Terminal(io.StringIO):
    """A stderr that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_a_bar_that_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """With what was reached, text as text; the line is erased at the end."""
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    with Progress("job [red]7") as progress:
        progress.show("3 of 4", done=3, of=4)
    shown = screen.getvalue()
    assert "job [red]7" in shown
    assert "3 of 4" in shown
    assert shown.endswith("\x1b[2K")
    screen.truncate(0)
    with Progress("job", quiet=True) as progress:
        progress.show("3 of 4")
    assert not screen.getvalue()
