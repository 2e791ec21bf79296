"""Modules compiled for speed: imported in place of their sources, but only if compiled from these sources.

The compiled modules of a package are in its folder ``_compiled``, in one folder for each Python version. It also holds
a digest of all of their sources. If a source differs, Python runs the sources, so that the running code is always the
visible code. ``DMQ_COMPILED=0`` in the environment forces this too. ``tools/compile_http2.py`` creates the folder, and
includes it in a wheel that is built with ``DMQ_COMPILED=1``. A subpackage adds its part of the compiled folder to its
``__path__`` with ``extend_path``.
"""

from __future__ import annotations

import hashlib
import os
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Final

SUFFIX: Final = EXTENSION_SUFFIXES[0]  # such as .cpython-311-x86_64-linux-gnu.so
DIGEST: Final = "sources.sha256"


def compiled_first(package: list[str]) -> list[str]:
    """Return the search path for the modules of a package: its ``__path__``, after the compiled folder if that is
    valid.
    """
    sources = Path(package[0])
    folder = folder_of(sources)
    if os.environ.get("DMQ_COMPILED") == "0" or not is_made_of(folder, sources):
        return package
    return [str(folder), *package]


def folder_of(sources: Path) -> Path:
    """Return the folder of this Python's compiled modules of a package, which may not exist."""
    return sources / "_compiled" / SUFFIX.split(".")[1]


def is_made_of(folder: Path, sources: Path) -> bool:
    """Return True if the modules in the folder were compiled from exactly these sources."""
    try:
        return (folder / DIGEST).read_text(encoding="ascii") == digest_of(sources)
    except OSError:
        return False


def modules_of(sources: Path) -> list[Path]:
    """Return the source files of a package and of its subpackages, without those for tests."""
    return sorted(each for each in sources.rglob("*.py") if each.parent.name != "testing")


def digest_of(sources: Path) -> str:
    """Return a digest of the sources of a package."""
    found = hashlib.sha256()
    for source in modules_of(sources):
        found.update(f"{source.relative_to(sources).as_posix()} {source.stat().st_size}\n".encode())
        found.update(source.read_bytes())
    return found.hexdigest()
