"""Modules that were compiled for speed, beside their sources: found first, and only if they were made of these sources.

Compiled modules of a package lie in its folder ``_compiled``, those of each kind of Python in one of its own, with a
digest of all sources that they were made of. Where a source is another one, Python runs the sources, so nobody debugs
code that is not there. ``DMQ_COMPILED=0`` in the environment has it run them as well. ``tools/compile_http2.py`` makes
the folder, and takes it into a wheel that is built with ``DMQ_COMPILED=1``.
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
    """Return where the modules of a package are to be looked for: its ``__path__``, or a folder and that."""
    sources = Path(package[0])
    folder = folder_of(sources)
    if os.environ.get("DMQ_COMPILED") == "0" or not is_made_of(folder, sources):
        return package
    return [str(folder), *package]


def folder_of(sources: Path) -> Path:
    """Return where this Python's compiled modules of a package lie, if there are any."""
    return sources / "_compiled" / SUFFIX.split(".")[1]


def is_made_of(folder: Path, sources: Path) -> bool:
    """Say whether the folder has what these very sources were compiled to."""
    try:
        return (folder / DIGEST).read_text(encoding="ascii") == digest_of(sources)
    except OSError:
        return False


def digest_of(sources: Path) -> str:
    """Return a digest of the sources of a package, without those of packages in it."""
    found = hashlib.sha256()
    for source in sorted(sources.glob("*.py")):
        found.update(f"{source.name} {source.stat().st_size}\n".encode())
        found.update(source.read_bytes())
    return found.hexdigest()
