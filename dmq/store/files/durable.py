"""Files and directories that outlive a power cut: a name is an entry of a directory, which is synced as well."""

from __future__ import annotations

import os
from pathlib import Path


def make_directory(path: Path, mode: int = 0o777) -> None:
    """Make a directory and those above it, durable on return; ``mode`` is that of the last one."""
    if path.is_dir():
        return
    make_directory(path.parent)
    path.mkdir(mode, exist_ok=True)
    sync_directory(path.parent)


def sync_file(path: Path) -> None:
    """Return once the content of a file is on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


sync_directory = sync_file
