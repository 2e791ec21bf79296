"""A store with a trail."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.rigs.broker.trail_cell import Cell


@pytest.fixture
def cell(tmp_path: Path) -> Iterator[Cell]:
    """A cell whose exporter works turn by turn."""
    made = Cell(tmp_path)
    yield made
    made.exporter.close(5)
    made.store.close()
