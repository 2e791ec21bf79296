"""Logs of the daemon: one event, one line on stderr.

    log = structlog.get_logger("dmq.store")
    log.info("recovered", entries=12, cut_bytes=0)

The name of an event is a literal snake_case verb and its facts are fields; a test checks every call in ``dmq``. Logs of
libraries through ``logging`` (gRPC, asyncio, warnings) have the same form, as the event ``library_logged``.

Payloads are never logged: a bytes field shows only its length.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import Literal, TextIO

import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

from broker_adapter.runtime.clock import Clock
from dmq.config.units import format_time

__all__ = ["configure"]

_FIELD_CHARS_MAX = 4096  # a line mostly stays one write on a pipe, and fits one screen
# Verbose below a warning, about internals only.
_QUIET_LIBRARIES = ("asyncio", "grpc", "grpc._cython.cygrpc")


def configure(
    level: str,
    format: Literal["auto", "json", "console"],  # noqa: A002 - the name of the configuration key, without its prefix
    clock: Clock,
    stream: TextIO | None = None,
    *,
    process: str = "",
) -> None:
    """Send all logs of this process to ``stream`` (stderr), from ``level`` up; another call changes the settings.

    ``auto`` is ``console`` on a terminal and ``json`` elsewhere. Timestamps are from ``clock``. ``process`` is the name
    of one of several processes, added to each line.
    """
    stream = stream or sys.stderr
    for_people = is_for_people(format, stream)
    number = logging.getLevelNamesMapping()[level.upper()]
    # Processors of every event, from either source.
    shared: list[Processor] = [
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.ExtraAdder(),
        _timestamper(clock),
        *([_name_process(process)] if process else []),
    ]
    formatter = structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=[*shared, _name_library_event],
        processors=[
            structlog.stdlib.ProcessorFormatter.remove_processors_meta,
            *([] if for_people else [structlog.processors.format_exc_info]),
            _shorten,
            *_renderers(for_people=for_people, colors=stream.isatty()),
        ],
    )
    handler = logging.StreamHandler(stream)
    handler.setFormatter(formatter)
    root = logging.getLogger()
    for old in root.handlers[:]:
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(number)
    for name in _QUIET_LIBRARIES:
        logging.getLogger(name).setLevel(max(number, logging.WARNING))
    logging.captureWarnings(True)
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.stdlib.LoggerFactory(),
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        cache_logger_on_first_use=False,  # loggers are created at import, before the configuration
    )


def is_for_people(format: str, stream: TextIO) -> bool:  # noqa: A002 - as above
    """Return True if a log in this format is for people, and not for programs."""
    return format == "console" or (format == "auto" and stream.isatty())


def _renderers(*, for_people: bool, colors: bool) -> list[Processor]:
    if for_people:
        # The default would add local variables to a traceback, including payloads.
        plain = structlog.dev.plain_traceback
        return [
            structlog.dev.ConsoleRenderer(
                colors=colors, timestamp_key="time", pad_event_to=24, exception_formatter=plain
            )
        ]
    return [_first_things_first, structlog.processors.JSONRenderer(default=str, ensure_ascii=False)]


def _timestamper(clock: Clock) -> Processor:
    now_ms: Callable[[], int] = clock.now_ms

    def stamp(logger: WrappedLogger, method: str, event: EventDict) -> EventDict:  # noqa: ARG001
        event["time"] = format_time(now_ms())
        return event

    return stamp


def _name_process(process: str) -> Processor:
    def name(logger: WrappedLogger, method: str, event: EventDict) -> EventDict:  # noqa: ARG001
        event["process"] = process
        return event

    return name


def _name_library_event(logger: WrappedLogger, method: str, event: EventDict) -> EventDict:  # noqa: ARG001
    event["message"] = event["event"]
    event["event"] = "library_logged"
    return event


def _shorten(logger: WrappedLogger, method: str, event: EventDict) -> EventDict:  # noqa: ARG001
    for key, value in event.items():
        if isinstance(value, bytes | bytearray | memoryview):
            event[key] = f"<{len(value)} bytes>"
        elif isinstance(value, str) and len(value) > _FIELD_CHARS_MAX and key != "exception":
            event[key] = value[:_FIELD_CHARS_MAX] + "..."
    return event


def _first_things_first(logger: WrappedLogger, method: str, event: EventDict) -> EventDict:  # noqa: ARG001
    head = {key: event.pop(key) for key in ("time", "level", "event", "logger", "process") if key in event}
    return {**head, **event}
