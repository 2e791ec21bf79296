"""What integration tests share: real daemons, and official clients in front of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.daemon import Daemon


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A directory for a daemon; it does not exist yet."""
    return tmp_path / "data"


@pytest.fixture
def daemon(data: Path) -> Iterator[Daemon]:
    """A running daemon of this test's own, ended with it."""
    with Daemon(data) as running:
        yield running
