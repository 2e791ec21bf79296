"""Fronts die and hang under running official clients: every one of them goes on by itself, and nothing is lost."""

from __future__ import annotations

from collections.abc import Iterator

import psutil
import pytest
from support.clients.official.client import Language, require, those_with
from support.clients.official.traffic import Outage, Restarts, at_work
from support.rigs.daemon.fronts import serving, until, until_gone, with_fronts
from support.rigs.daemon.process import Daemon

pytestmark = pytest.mark.fault
_LANGUAGES = those_with("restart")


@pytest.fixture(scope="module")
def outages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Restarts]:
    with Daemon(tmp_path_factory.mktemp("daemon") / "data", env=with_fronts()) as daemon:
        stopped: list[psutil.Process] = []

        def kill(count: int) -> None:
            killed = serving(daemon)[:count]
            for each in killed:
                each.kill()
            until_gone(killed)

        def stop_one() -> None:
            stopped.append(serving(daemon)[0])
            stopped[0].suspend()

        def await_two() -> None:
            until("two fronts serve", lambda: len(serving(daemon)) == 2)

        def await_its_end() -> None:
            until_gone(stopped)
            await_two()

        with at_work(_LANGUAGES, daemon.address, tmp_path_factory) as outages:
            outages.run(
                Outage("the death of one", lambda: kill(1), await_two, is_noticed=False),
                Outage("the death of all", lambda: kill(2), await_two, is_noticed=False),
                Outage("one that hangs", stop_one, await_its_end, is_noticed=False),
            )
        assert [each["pid"] for each in daemon.events("front_unresponsive")] == [stopped[0].pid]
        yield outages
        daemon.stop()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("language", _LANGUAGES, ids=lambda language: language.name)
def test_clients_go_on_after_fronts_died_or_hung(language: Language, outages: Restarts) -> None:
    """Producer and consumers work again within seconds, and both consumers had all that was sent."""
    require(language)
    if language.name in outages.failed:
        raise outages.failed[language.name]
