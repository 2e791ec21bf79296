"""Recall and SQL92 filters, as official clients see them: the tests of ``support.clients.official.recall_suite``."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.clients.official.client import LANGUAGES, Language, OfficialClient, require
from support.clients.official.client_bench import Topics
from support.clients.official.recall_suite import *  # noqa: F403 - pytest finds the tests here, in their order
from support.clients.official.recall_suite import KINDS
from support.rigs.daemon.process import Daemon

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with Daemon(tmp_path_factory.mktemp("daemon") / "data") as daemon:
        yield daemon
        daemon.stop()


@pytest.fixture(scope="module", params=LANGUAGES, ids=lambda language: language.name)
def process(
    request: pytest.FixtureRequest, daemon: Daemon, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[OfficialClient]:
    """The process of one language's clients."""
    language: Language = request.param
    require(language)
    with OfficialClient(language, tmp_path_factory.mktemp(language.name), daemon.address) as client:
        yield client


@pytest.fixture(scope="module")
def topics(process: OfficialClient) -> Topics:
    """New topics for one language's clients."""
    return Topics(process, *KINDS)


@pytest.fixture
def topic(topics: Topics) -> str:
    """A new topic with a producer ``p-<topic>``."""
    return topics.take()
