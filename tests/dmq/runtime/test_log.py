"""Logs: one line per event, in one form whoever logs, on the given clock, and never a payload."""

from __future__ import annotations

import ast
import io
import json
import logging
import re
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog

from broker_adapter.runtime.clock import ManualClock
from dmq.runtime import log as dmq_log

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    """Logging is global to the process; give the next test what this one found."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    logging.captureWarnings(False)
    structlog.reset_defaults()
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.fixture
def stream() -> io.StringIO:
    """Where the logs go."""
    stream = io.StringIO()
    dmq_log.configure("info", "json", ManualClock(1_700_000_000_007), stream)
    return stream


def lines(stream: io.StringIO) -> list[dict[str, object]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_an_event_is_one_json_line(stream: io.StringIO) -> None:
    """Time from the given clock, level, event and logger first; newlines and other alphabets survive."""
    structlog.get_logger("dmq.store").info("recovered", entries=12, note="é\nß")
    assert lines(stream) == [
        {
            "time": "2023-11-14T22:13:20.007Z",
            "level": "info",
            "event": "recovered",
            "logger": "dmq.store",
            "entries": 12,
            "note": "é\nß",
        }
    ]
    assert list(lines(stream)[0]) == ["time", "level", "event", "logger", "entries", "note"]


def test_each_line_of_several_processes_names_its_process(stream: io.StringIO) -> None:
    """Also what libraries log."""
    dmq_log.configure("info", "json", ManualClock(), stream, process="front-0")
    structlog.get_logger("dmq.acl").warning("access_refused", rpc="SendMessage")
    logging.getLogger("asyncio").warning("slow")
    assert [line["process"] for line in lines(stream)] == ["front-0", "front-0"]
    assert list(lines(stream)[0]) == ["time", "level", "event", "logger", "process", "rpc"]


def test_below_the_level_nothing_is_written_and_the_level_can_be_changed(stream: io.StringIO) -> None:
    """Loggers made before configure() obey the latest one."""
    log = structlog.get_logger("dmq.store")
    log.debug("hidden")
    dmq_log.configure("debug", "json", ManualClock(), stream)
    log.debug("shown")
    assert [line["event"] for line in lines(stream)] == ["shown"]


def test_logs_of_libraries_have_the_same_form(stream: io.StringIO) -> None:
    """The text of a library is a field; it is never taken for an event of ours."""
    logging.getLogger("grpc").warning("odd %s", "thing", extra={"peer": "p"})
    logging.getLogger("grpc").info("chatter")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn("old", DeprecationWarning, stacklevel=1)
    first, second = lines(stream)
    assert (first["event"], first["message"], first["logger"], first["peer"]) == (
        "library_logged",
        "odd thing",
        "grpc",
        "p",
    )
    assert second["logger"] == "py.warnings"


def test_an_exception_stays_one_line(stream: io.StringIO) -> None:
    """The traceback is a field; values of variables are not in it, in either form."""
    for form in ("json", "console"):
        dmq_log.configure("info", form, ManualClock(), stream)
        try:
            secret_body = "hunter2"  # noqa: F841 - a local variable that a fancy traceback would show
            raise RuntimeError("boom")
        except RuntimeError:
            structlog.get_logger("dmq.x").exception("failed")
    first = stream.getvalue().splitlines()[0]
    assert "RuntimeError: boom" in str(json.loads(first)["exception"])
    assert stream.getvalue().count("RuntimeError: boom") == 2
    assert "'hunter2'" not in stream.getvalue()


def test_bytes_are_counted_not_shown(stream: io.StringIO) -> None:
    """A payload that gets into a log call by mistake does not get into the log."""
    structlog.get_logger("dmq.x").info("sent", body=b"hunter2", view=memoryview(b"hunter2"), long="x" * 10_000)
    (line,) = lines(stream)
    assert (line["body"], line["view"]) == ("<7 bytes>", "<7 bytes>")
    assert len(str(line["long"])) < 5000


def test_values_json_does_not_know_are_written_as_text(stream: io.StringIO) -> None:
    """A log call never fails for what it was given."""
    structlog.get_logger("dmq.x").info("opened", path=Path("a/b"), codes={1, 2})
    assert lines(stream)[0]["path"] == "a/b"


def test_people_get_a_console_form_on_a_terminal() -> None:
    """``auto`` looks at the stream: colours on a terminal, JSON in a pipe."""

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal, pipe = Terminal(), io.StringIO()
    dmq_log.configure("info", "auto", ManualClock(), terminal)
    structlog.get_logger("dmq.x").info("opened", n=1)
    dmq_log.configure("info", "auto", ManualClock(), pipe)
    structlog.get_logger("dmq.x").info("opened", n=1)
    assert "\x1b[" in terminal.getvalue()
    assert lines(pipe)[0]["event"] == "opened"


# Words of a person, and a second word for a meaning that has one: unreachable, unresponsive, failed, created, in use.
DIALECT = {"away", "cannot", "hangs", "heard", "made", "mended", "nonsense", "said", "taken", "told", "well"}


def _log_calls(tree: ast.Module) -> Iterator[ast.Call]:
    levels = {"debug", "info", "warning", "error", "exception", "critical"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in levels:
            target = node.func.value
            name = target.id if isinstance(target, ast.Name) else getattr(target, "attr", "")
            if name.strip("_") in {"log", "logger"}:
                yield node


def _is_named(call: ast.Call) -> bool:
    event = call.args[0] if len(call.args) == 1 else None
    return (
        isinstance(event, ast.Constant)
        and isinstance(event.value, str)
        and re.fullmatch(r"[a-z]+(_[a-z]+)*", event.value) is not None
        and (not DIALECT & set(event.value.split("_")) or event.value in {"snapshot_taken", "taken_over"})
    )


@pytest.mark.parametrize(
    ("code", "is_named"),
    [
        ('log.info("opened", n=1)', True),
        ('self._log.warning("wal_tail_cut")', True),
        ('log.info(f"opened {n}")', False),
        ('log.info("opened %s", n)', False),
        ('log.info("Opened the store")', False),
        ("log.info(name)", False),
        ('log.info("client_not_told")', False),
    ],
)
def test_the_rule_for_event_names(code: str, is_named: bool) -> None:
    """What the next test would find."""
    assert [_is_named(call) for call in _log_calls(ast.parse(code))] == [is_named]


def test_every_event_of_the_daemon_is_named_by_a_literal_verb() -> None:
    """So that a log can be searched by event, no value hides in a name, and one meaning has one word."""
    unnamed = [
        f"{path.relative_to(ROOT)}:{call.lineno}"
        for folder in ("dmq", "retry/hook", "broker_adapter")
        for path in sorted((ROOT / folder).rglob("*.py"))
        for call in _log_calls(ast.parse(path.read_text(encoding="utf-8")))
        if not _is_named(call)
    ]
    assert unnamed == []
