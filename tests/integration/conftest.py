"""What integration tests share: real daemons, and official clients in front of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.client_builds import BUILDS, what_is_missing
from support.daemon import Daemon
from support.official_client import Language


def pytest_collection_finish(session: pytest.Session) -> None:
    """Build the programs around official clients before the first test: it may take longer than a test may."""
    params = [value for item in session.items if hasattr(item, "callspec") for value in item.callspec.params.values()]
    chosen = [value for value in params if isinstance(value, Language)]
    if chosen and not session.config.option.collectonly:
        for build in (*BUILDS.values(), *(language.build for language in chosen if language.build is not None)):
            what_is_missing(build)  # the tests that need it say so


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A directory for a daemon; it does not exist yet."""
    return tmp_path / "data"


@pytest.fixture
def daemon(data: Path) -> Iterator[Daemon]:
    """A running daemon of this test's own, ended with it."""
    with Daemon(data) as running:
        yield running
