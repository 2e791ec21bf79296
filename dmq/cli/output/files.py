"""Targets of an export: a file that is written atomically, or stdout."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TextIO

from dmq.cli.output.errors import refused


def lines_into(file: Path | None) -> AbstractContextManager[TextIO]:
    """Return a context manager for the lines of an export: ``file``, or stdout if it is None."""
    return _complete_file(file) if file is not None else _stdout()


@contextmanager
def _stdout() -> Iterator[TextIO]:
    yield sys.stdout
    sys.stdout.flush()  # here, so that a closed pipe is an error of the command and not of the interpreter's exit


@contextmanager
def _complete_file(path: Path) -> Iterator[TextIO]:
    """Yield a file that gets its final name after it is written and synced. It is removed if that fails."""
    target = path.resolve()
    if target.exists() and not target.is_file():  # the rename would replace a device by a file
        raise refused("it exists and is not a file", "--out", given=str(path))
    if not target.parent.is_dir():
        raise refused(f"there is no directory {path.parent}", "--out", given=str(path))
    handle, name = tempfile.mkstemp(prefix=f".{target.name}.", suffix=".part", dir=target.parent)
    part = Path(name)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        part.replace(target)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
