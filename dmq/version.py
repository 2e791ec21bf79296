"""Which version of this is installed."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def version_here() -> str:
    """Return the version of what is installed."""
    try:
        return version("rock-dmq")
    except PackageNotFoundError:
        return "unknown"
