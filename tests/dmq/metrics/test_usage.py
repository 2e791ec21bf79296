"""What a process takes of the machine, as the system tells it."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from dmq.metrics import usage


def test_memory_is_the_resident_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the system tells it; elsewhere the most that ever was, which is never less."""
    now = usage.usage()
    most_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    assert 2**20 < now.memory_bytes <= most_bytes + 2**20  # which the kernel counts a little behind
    monkeypatch.setattr(usage, "_STATM", Path("gone"))
    assert usage.usage().memory_bytes >= most_bytes
    assert usage.usage().cpu_s >= now.cpu_s > 0
