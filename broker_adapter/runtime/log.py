"""Logger of a library: uses the application's structlog if it is configured, else standard logging.

An application without any configuration gets warnings and errors on stderr, the default of the standard library. No log
line goes to stdout, the default of structlog.
"""

from __future__ import annotations

import logging
from collections.abc import MutableMapping
from typing import Any

import structlog

_fields_of = structlog.processors.KeyValueRenderer(key_order=["event"])


def _line(logger: object, method: str, fields: MutableMapping[str, Any]) -> str:
    """Return one line with the fields, and the traceback below it in its own lines, as standard logging does."""
    traceback = fields.pop("exception", "")
    line = _fields_of(logger, method, fields)
    return f"{line}\n{traceback}" if traceback else line


class LibraryLog:
    """Named logger that selects its target for each line."""

    def __init__(self, name: str) -> None:
        self._name = name

    def info(self, event: str, **fields: Any) -> None:  # noqa: ANN401 - any value
        """Log an event of normal operation."""
        self.log(logging.INFO, event, **fields)

    def warning(self, event: str, **fields: Any) -> None:  # noqa: ANN401 - any value
        """Log a warning."""
        self.log(logging.WARNING, event, **fields)

    def error(self, event: str, **fields: Any) -> None:  # noqa: ANN401 - any value
        """Log an error."""
        self.log(logging.ERROR, event, **fields)

    def log(self, level: int, event: str, **fields: Any) -> None:  # noqa: ANN401 - any value
        """Log an event at a level."""
        self._logger().log(level, event, **fields)

    def _logger(self) -> structlog.stdlib.BoundLogger:
        if structlog.is_configured():
            logger: structlog.stdlib.BoundLogger = structlog.get_logger(self._name)
            return logger
        wrapped: structlog.stdlib.BoundLogger = structlog.wrap_logger(
            logging.getLogger(self._name),
            processors=[
                structlog.stdlib.filter_by_level,
                structlog.processors.format_exc_info,
                _line,
            ],
            wrapper_class=structlog.stdlib.BoundLogger,
            context_class=dict,
            cache_logger_on_first_use=False,
        )
        return wrapped
