"""A store on either engine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.rigs.store.workbench import ENGINES, Bench, opened_bench


@pytest.fixture(params=ENGINES)
def bench(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Bench]:
    """A bench on the engine."""
    yield from opened_bench(request.param, tmp_path)
