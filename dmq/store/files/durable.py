"""Durable files and directories. A name is an entry of its directory, so the directory is synced as well."""

from __future__ import annotations

import os
from pathlib import Path


def make_directory(path: Path, mode: int = 0o777) -> None:
    """Create a directory and its missing parents, durable on return. ``mode`` applies to the directory itself."""
    if path.is_dir():
        return
    make_directory(path.parent)
    path.mkdir(mode, exist_ok=True)
    sync_directory(path.parent)


def sync_file(path: Path) -> None:
    """Sync the content of a file, or the entries of a directory, to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


sync_directory = sync_file
