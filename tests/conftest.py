"""Set-up of all tests: the marker of their kind, an environment without settings of ours, shared fixtures.

The tests of a module are at its path below ``tests/``. Test files belong to no package (``--import-mode=importlib``),
so two may share a name. Code that tests share is in ``tests/support``; ``pythonpath = ["tests"]`` in pyproject.toml
makes it importable as ``support``. Nothing else in ``tests/`` imports from ``tests/``, except the tidy rules.
"""

from __future__ import annotations

import atexit
import gc
import os
import signal
import sys
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import support.effort  # noqa: F401 - reads our environment before it is cleaned below
import support.forms
from hypothesis import HealthCheck, settings
from support.parallel import ByUnit, by_length, ends_cluster, is_controller
from xdist.remote import Producer

if TYPE_CHECKING:
    from support.rigs.daemon.process import Daemon

# Kinds of tests; `pytestmark` of a module names one, default unit. pyproject.toml describes them.
KINDS = {"bench", "browser", "cluster", "contract", "fault", "integration", "property", "spark", "tidy"}
# Time limits of tests that set none. The first test of a cluster downloads and starts it; hypothesis shrinks failures.
TIMEOUTS_S = {"cluster": 900, "property": 600, "spark": 300}
# Modules of tests that several modules share.
for _suite in ("client_suite", "recall_suite", "transaction_suite", "traffic"):
    pytest.register_assert_rewrite(f"support.clients.official.{_suite}")

# A run in CI takes fresh random examples too, and a failure prints the line that repeats it anywhere
# (`@reproduce_failure(...)`). hypothesis's own profile of this name would try the same examples for ever.
# A deadline per example, and a judgement on slow ones, would turn a busy machine into a failure.
settings.register_profile("dev", print_blob=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", settings.get_profile("dev"), derandomize=False, database=None)
settings.load_profile("ci" if os.environ.get("CI") else "dev")


def pytest_configure(config: pytest.Config) -> None:
    """Remove our settings from the environment, before anything reads them and for all processes tests start.

    A process that hands out tests keeps them for its workers, which come here as well.
    """
    if not is_controller(config):
        for name in [name for name in os.environ if name.startswith("DMQ_")]:
            del os.environ[name]
        _hide_contexts()
        support.forms.choose()
        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in the background of a shell; processes inherit it
            signal.signal(signal.SIGINT, signal.default_int_handler)


def _hide_contexts() -> None:
    """Let this user's contexts be none: an address of theirs would be asked. Other programs find their settings."""
    of_user = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    if (of_user / "dmq").exists():
        shown = tempfile.TemporaryDirectory(prefix="config-")
        for each in of_user.iterdir():
            if each.name != "dmq":
                Path(shown.name, each.name).symlink_to(each)
        os.environ["XDG_CONFIG_HOME"] = shown.name
        atexit.register(shown.cleanup)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> ByUnit:
    """Hand out the tests by units, in the order that they have here."""
    config.option.loadscopereorder = False
    return ByUnit(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Let the collector of garbage leave alone what collecting makes: some million objects that stay to the end."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark tests without a kind as unit tests, and give each kind its time limit."""
    for item in items:
        kinds = [mark.name for mark in item.iter_markers() if mark.name in KINDS]
        if not kinds:
            item.add_marker("unit")
        elif kinds[0] in TIMEOUTS_S and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(TIMEOUTS_S[kinds[0]]))
    if hasattr(config, "workerinput"):
        items[:] = by_length(items)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Build the programs around official clients before the first test: it may take longer than a test may."""
    if session.config.option.collectonly or "support.clients.official.client" not in sys.modules:
        return
    from support.clients.official.builds import BUILDS, what_is_missing
    from support.clients.official.client import Language

    params = [value for item in session.items if hasattr(item, "callspec") for value in item.callspec.params.values()]
    if chosen := [value for value in params if isinstance(value, Language)]:
        for build in (*BUILDS.values(), *(language.build for language in chosen if language.build is not None)):
            what_is_missing(build)  # the tests that need it report it


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A directory for a daemon; it does not exist yet."""
    return tmp_path / "data"


@pytest.fixture
def daemon(data: Path) -> Iterator[Daemon]:
    """A running daemon of this test's own, ended with it."""
    from support.rigs.daemon.process import Daemon

    with Daemon(data) as running:
        yield running


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """End the cluster with the last test that needs it: even at rest it takes a part of a processor."""
    module = sys.modules.get("support.rigs.rocketmq.cluster")
    if module is not None and hasattr(item.config, "workerinput") and ends_cluster(item, nextitem):
        module.end()
