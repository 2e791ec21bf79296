"""File systems of their own for one process: a small one, a read-only one. Needs user namespaces; a named skip else."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

_ENTER = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]


def small_disk(directory: Path, size_bytes: int) -> list[str]:
    """The command line to put before another one, for which ``directory`` is an empty file system of that size."""
    script = 'mount -t tmpfs -o size="$1" none "$2" && shift 2 && exec "$@"'
    return _checked([*_ENTER, script, "sh", str(size_bytes), str(directory)])


def read_only(directory: Path) -> list[str]:
    """The command line to put before another one, which can read ``directory`` and not write it, root or not."""
    script = 'mount --bind "$1" "$1" && mount -o remount,ro,bind "$1" && shift && exec "$@"'
    return _checked([*_ENTER, script, "sh", str(directory)])


def _checked(prefix: list[str]) -> list[str]:
    if shutil.which("unshare") is None:
        pytest.skip("no unshare: a file system of its own cannot be mounted")
    tried = subprocess.run([*prefix, "true"], check=False, capture_output=True, text=True, timeout=20)
    if tried.returncode != 0:
        pytest.skip(f"a file system of its own cannot be mounted here: {tried.stderr.strip()}")
    return prefix
