"""What every official client must see: one daemon, a process per language, the same tests for all.

Go and Java speak TLS, with the certificate that the daemon makes for itself; Python, Node and Rust speak plain text.

The tests are those of ``support.clients.official.client_suite``. Redelivery takes 10 s by the protocol. ``slow`` starts
those scenarios for all clients at once, before the first test; the last tests of the module check their results.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
from support.clients.official.client import LANGUAGES, OfficialClient, can_run, require
from support.clients.official.client_bench import Bench
from support.clients.official.client_suite import *  # noqa: F403 - pytest finds the tests here, in their order
from support.clients.official.client_suite import KINDS, LEVELS_MS, Slow, begin_slow
from support.rigs.daemon.process import Daemon

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    levels = " ".join(f"{level_ms}ms" for level_ms in LEVELS_MS)
    with (
        Daemon(tmp_path_factory.mktemp("daemon") / "data", "--delay-levels", levels) as daemon,
        ExitStack() as stack,
    ):
        made = Bench(daemon, stack, tmp_path_factory, *KINDS)
        yield made
        made.stop()


@pytest.fixture(scope="module", autouse=True)
def slow(bench: Bench) -> Iterator[dict[str, Slow]]:
    """Let a lease expire, a listener fail and a consumer die, for every client that can run here."""
    with ThreadPoolExecutor(max_workers=3 * len(LANGUAGES)) as pool:
        yield begin_slow(bench, list(filter(can_run, LANGUAGES)), pool)


@pytest.fixture(params=LANGUAGES, ids=lambda language: language.name)
def process(request: pytest.FixtureRequest, bench: Bench) -> Iterator[OfficialClient]:
    """The process of one language's clients."""
    require(request.param)
    yield bench.process(request.param)
    bench.daemon.print_log()  # shown if the test failed


@pytest.fixture
def topic(bench: Bench, process: OfficialClient) -> str:
    """A new topic with a producer ``p-<topic>`` and a simple consumer ``c-<topic>``."""
    return bench.topic(process.language)
