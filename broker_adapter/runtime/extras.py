"""Optional dependencies: a missing one raises an error with the command that installs its extra."""

from __future__ import annotations

import sys
from importlib.util import find_spec


class ExtraMissing(ModuleNotFoundError):
    """An imported feature needs an extra that is not installed; the text has the command that installs it."""


def require(what: str, extra: str, *modules: str) -> None:
    """Raise ``ExtraMissing`` if one of ``modules`` is missing; ``extra`` installs them, ``what`` names the feature.

    The modules are not imported (except the parents of a dotted name).
    """
    for module in modules:
        if not is_installed(module):
            raise ExtraMissing(f"{what} needs {module}, which is missing: {command(extra)}", name=module)


def command(extra: str) -> str:
    """Return the command that installs an extra."""
    return f"pip install 'rock-dmq[{extra}]'"


def is_installed(module: str) -> bool:
    """Return True if ``module`` can be imported; it is not (except the parents of a dotted name)."""
    try:
        return sys.modules.get(module) is not None or find_spec(module) is not None
    except (ModuleNotFoundError, ValueError):  # missing parent; blocked module
        return False
