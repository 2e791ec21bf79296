"""What every test gets: its group's marker, an environment without our settings, one way to import support code.

Modules under ``tests/`` have no packages of their own (``--import-mode=importlib``), so two test files may share a
name. Code that tests share lives in ``tests/support``; ``pythonpath = ["tests"]`` in pyproject.toml makes it
``from support import ...`` everywhere. Nothing else in ``tests/`` imports from ``tests/``, but for the tidy rules.
"""

from __future__ import annotations

import atexit
import gc
import os
import sys
import tempfile
from collections.abc import Generator
from pathlib import Path

import pytest
import support.effort  # noqa: F401 - reads our environment before it is cleaned below
import support.forms
from hypothesis import HealthCheck, settings
from support.parallel import ByUnit, by_length, ends_cluster, is_controller
from xdist.remote import Producer

TESTS = Path(__file__).parent
# Modules of tests that several modules share.
for _suite in ("client_suite", "recall_suite", "transaction_suite", "client_traffic"):
    pytest.register_assert_rewrite(f"support.{_suite}")

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
    """Mark every test with the group its folder stands for, so that ``-m "not fault"`` needs no bookkeeping."""
    groups = {line.partition(":")[0].strip() for line in config.getini("markers")}
    for item in items:
        folder = item.path.relative_to(TESTS).parts[0]
        if folder not in groups:
            raise pytest.UsageError(f"tests/{folder} is no group of tests; pyproject.toml lists the markers")
        item.add_marker(folder)
    if hasattr(config, "workerinput"):
        items[:] = by_length(items)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """End the cluster with the last test that needs it: even at rest it takes a part of a processor."""
    module = sys.modules.get("support.cluster")
    if module is not None and hasattr(item.config, "workerinput") and ends_cluster(item, nextitem):
        module.end()
