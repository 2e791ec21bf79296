"""Read of a file with secrets, which others must not be able to read."""

from __future__ import annotations

import os
import stat
from pathlib import Path


def read_secret_file(path: Path, bytes_max: int) -> bytes:
    """Return the content of a regular file that only its owner, and at most its group, can read.

    Raise ``OSError`` if it cannot be read, and ``ValueError`` with a text for an operator if it is not such a file.
    """
    with open(path, "rb", opener=_open_at_once) as file:
        state = os.fstat(file.fileno())
        if not stat.S_ISREG(state.st_mode):
            raise ValueError(f"{path} is not a regular file")
        if state.st_mode & (stat.S_IRWXO | stat.S_IWGRP):
            mode = stat.S_IMODE(state.st_mode)
            raise ValueError(
                f"{path} contains secrets and others can access it (mode {mode:04o}); run: chmod 600 {path}"
            )
        content = file.read(bytes_max + 1)
    if len(content) > bytes_max:
        raise ValueError(f"{path} is larger than {bytes_max} bytes")
    return content


def _open_at_once(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)  # opening a pipe would block until it has a writer
