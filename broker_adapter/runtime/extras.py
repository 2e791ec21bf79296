"""Optional dependencies: what lacks one says in a line which extra of the distribution brings it."""

from __future__ import annotations

import sys
from importlib.util import find_spec


class ExtraMissing(ModuleNotFoundError):
    """Something was imported that needs an extra which is not installed; the text has the command that installs it."""


def require(what: str, extra: str, *modules: str) -> None:
    """Raise ``ExtraMissing`` if ``what`` cannot be used because one of ``modules``, which ``extra`` brings, is missing.

    It imports none of them (of a dotted name, what stands before the last dot).
    """
    for module in modules:
        if not _is_there(module):
            raise ExtraMissing(f"{what} needs {module}, which is missing: {command(extra)}", name=module)


def command(extra: str) -> str:
    """Return the command that installs an extra."""
    return f"pip install 'rock-dmq[{extra}]'"


def _is_there(module: str) -> bool:
    try:
        return sys.modules.get(module) is not None or find_spec(module) is not None
    except (ModuleNotFoundError, ValueError):  # of what the name stands in; kept out by somebody
        return False
