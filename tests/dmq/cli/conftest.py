"""A daemon for commands to ask."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.rigs.commands.live_cell import LiveCell, live_cell


@pytest.fixture
def live(tmp_path: Path) -> Iterator[LiveCell]:
    """The parts of a daemon in this process, with nothing in them yet."""
    with live_cell(tmp_path / "data") as live:
        yield live
