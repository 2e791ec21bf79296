"""Hook configuration from environment variables. The distribution that provides the sinks interprets the variables."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from typing import Any

from retry.sink import DelaySink

_GROUP, _NAME = "rock_dmq.hook", "environment"
_Reader = Callable[[Mapping[str, str]], tuple[DelaySink, dict[str, Any]]]


class EnvironmentInvalid(ValueError):
    """An environment variable is invalid. The text names the variable, its value and the allowed values."""


def described_by(environ: Mapping[str, str]) -> tuple[DelaySink, dict[str, Any]]:
    """Return the open sink and the options of ``Redelivery`` from ``environ``; see docs/how-to/frameworks.md."""
    for each in entry_points(group=_GROUP, name=_NAME):
        read: _Reader = each.load()
        return read(environ)
    raise EnvironmentInvalid("no sink for environment variables is installed: reinstall rock-dmq, or pass a sink")
