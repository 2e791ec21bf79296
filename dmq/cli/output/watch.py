"""Output that is repeated until Ctrl-C: in place on a terminal, one line each as JSON, one after another in a pipe."""

from __future__ import annotations

import io
import json
import os
import select
import signal
import sys
import termios
import tty
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout, suppress
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, NoReturn, Self

import typer

from broker_adapter.runtime.clock import SystemClock
from dmq.cli.output.errors import CommandFailed, ExitCode, refusing
from dmq.cli.output.output import note, printable
from dmq.config.units import format_time, parse_duration

if TYPE_CHECKING:
    from rich.text import Text

INTERVAL_DEFAULT = "2s"
INTERVAL_MS_MIN = 100

_STDIN, _STDOUT = 0, 1
_KEYS_BYTES = 512

Draw = Callable[[], object]


def interval_s(text: str) -> float:
    """Return the seconds of ``--interval``. Raise a usage error for an invalid duration."""
    with refusing("--interval", text):
        interval_ms = parse_duration(text)
        if interval_ms < INTERVAL_MS_MIN:
            raise ValueError(f"at least {INTERVAL_MS_MIN}ms is expected")
    return interval_ms / 1000


def wait(seconds: float) -> None:
    """Wait. Raise ``BrokenPipeError`` as soon as the reader of stdout is gone."""
    stdout = select.poll()
    stdout.register(_STDOUT, 0)  # an error is always reported
    if stdout.poll(seconds * 1000):
        raise BrokenPipeError


class Outage:
    """Tolerates an unavailable daemon after its first answer. Use it as the context of each attempt.

    ``report`` gets one line at the begin of an outage and one at its end; ``error`` is the text of the current one.
    """

    def __init__(self, report: Callable[[str], object] = note) -> None:
        self.error = ""
        self._report = report
        self._has_answered = False

    def answered(self) -> None:
        """Record an answer of the daemon."""
        if self.error:
            self._report("the daemon answers again")
        self._has_answered, self.error = True, ""

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if not isinstance(error, CommandFailed) or error.exit_code is not ExitCode.UNAVAILABLE:
            return False
        if not self._has_answered:
            return False
        if not self.error:
            self._report(f"{error.text}; trying again")
        self.error = error.text
        return True


def repeat(draw: Draw, seconds: float, command: str, *, as_json: bool) -> None:
    """Run ``draw``, which prints, every ``seconds`` until Ctrl-C; on a terminal also until the key q.

    A terminal shows the newest output only, which stays after the end. As JSON, each output is one line. The first
    failure ends the command. A later outage of the daemon does not: the output continues when it answers again.
    """
    from rich.console import Console

    def draw_one() -> None:
        with suppress(typer.Exit):  # the exit code of one output
            draw()

    with suppress(KeyboardInterrupt):
        if not as_json and sys.stdout.isatty() and not Console().is_dumb_terminal:
            _on_screen(draw_one, seconds, f"every {seconds:g}s, q ends: {printable(command)}")
        else:
            _one_after_another(_line(draw_one) if as_json else _paragraph(draw_one), seconds)


def _one_after_another(draw: Draw, seconds: float) -> None:
    outage = Outage()
    while True:
        with outage:
            draw()
            outage.answered()
        wait(seconds)


def _paragraph(draw: Draw) -> Draw:
    def paragraph() -> None:
        draw()
        typer.echo()

    return paragraph


def _line(draw: Draw) -> Draw:
    def line() -> None:
        with redirect_stdout(io.StringIO()) as printed:
            draw()
        # Escaped as ASCII: exact, independent of the terminal and its encoding.
        typer.echo(json.dumps(json.loads(printed.getvalue()), separators=(",", ":")))

    return line


# -- a terminal --------------------------------------------------------------------------------------------------------


class _Captured(io.StringIO):
    """Stdout of a command that prints for a terminal."""

    def isatty(self) -> bool:
        return True


def _captured(draw: Draw) -> str:
    """Return the output of ``draw`` for this terminal, notes included."""
    with redirect_stdout(_Captured()) as printed, redirect_stderr(io.StringIO()) as notes:
        draw()
    return printed.getvalue() + notes.getvalue()


def _on_screen(draw: Draw, seconds: float, title: str) -> None:
    from rich.live import Live

    text = _captured(draw)
    outage = Outage(report=lambda _: None)
    outage.answered()
    with (
        suppress(KeyboardInterrupt),
        _Keys() as keys,
        Live(screen=True, auto_refresh=False, redirect_stdout=False, redirect_stderr=False) as live,
    ):
        while True:
            live.update(_page(text, title, outage.error, *live.console.size), refresh=True)
            if keys.ends_within(seconds):
                break
            with outage:
                text = _captured(draw)
                outage.answered()
    typer.echo(text, nl=False)


def _page(text: str, title: str, error: str, columns: int, height: int) -> Text:
    """Return the lines of a screen; a note replaces those that do not fit."""
    from rich.text import Text

    now = f"{format_time(SystemClock().now_ms())[11:19]}Z"
    width = max(columns - len(now) - 2, 1)
    head = [f"{title:<{width}.{width}}  {now}"]
    if error:
        head.append(typer.style(printable(f"{error}; trying again"), reverse=True))
    lines, room = text.splitlines(), height - len(head) - 1
    if len(lines) > room:
        lines[room - 1 :] = [f"... {len(lines) - room + 1:,} more lines; a taller terminal shows them"]
    page = Text.from_ansi("\n".join([*head, "", *lines]))
    page.no_wrap, page.overflow = True, "crop"
    return page


class _Keys:
    """Keys, resizes and signals of the terminal while the screen is in use."""

    def __enter__(self) -> Self:
        self._woken, self._wake = os.pipe()
        os.set_blocking(self._wake, False)
        handlers: dict[signal.Signals, Callable[[int, FrameType | None], object] | signal.Handlers] = {
            signal.SIGWINCH: lambda *_: None,  # without a handler, a resize does not wake the wait
            signal.SIGTSTP: signal.SIG_IGN,  # a stopped process would leave the terminal as it is now
            signal.SIGTERM: _end,
            signal.SIGHUP: _end,
        }
        self._handlers = {number: signal.signal(number, handler) for number, handler in handlers.items()}
        self._wakeup = signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)
        self._modes = termios.tcgetattr(_STDIN) if os.isatty(_STDIN) else None
        if self._modes is not None:
            tty.setcbreak(_STDIN)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._modes is not None:
            termios.tcsetattr(_STDIN, termios.TCSAFLUSH, self._modes)
        signal.set_wakeup_fd(self._wakeup)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        os.close(self._woken)
        os.close(self._wake)

    def ends_within(self, seconds: float) -> bool:
        """Wait, but not longer than until a key or a resize. Return True for the key q, or if the terminal is gone."""
        sources = [self._woken] if self._modes is None else [self._woken, _STDIN]
        ready, _, _ = select.select(sources, [], [], seconds)
        if self._woken in ready:
            os.read(self._woken, _KEYS_BYTES)
        keys = os.read(_STDIN, _KEYS_BYTES) if _STDIN in ready else b" "
        return not keys or b"q" in keys.lower()


def _end(number: int, _frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)
