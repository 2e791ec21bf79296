"""Daemons with an HTTP API, for the tests of a module: one open to all callers, and one with access keys."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.rigs.daemon.acl import write_acl
from support.rigs.daemon.http_api import Api, api_of


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    """The API of a daemon without access keys."""
    with api_of(tmp_path_factory.mktemp("open") / "data") as api:
        yield api


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    """The API of a daemon with access keys."""
    folder = tmp_path_factory.mktemp("guarded")
    with api_of(folder / "data", "--acl", str(write_acl(folder))) as api:
        yield api
