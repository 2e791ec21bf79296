"""Installed version."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def version_here() -> str:
    """Return the installed version; ``unknown`` if the package is not installed."""
    try:
        return version("rock-dmq")
    except PackageNotFoundError:
        return "unknown"
