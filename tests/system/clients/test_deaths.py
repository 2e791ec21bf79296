"""A listener that is killed with messages in its hands. It takes more than a minute: all languages wait at once."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.clients.official.client import Language, OfficialClient, those_with
from support.clients.official.scenarios import Scenarios
from support.effort import at_length
from support.rigs.daemon.process import Daemon

pytestmark = pytest.mark.integration
HELD_S_MAX = 130.0


def _die(process: OfficialClient) -> tuple[str, list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the id of a message, the deliveries to the listener that died, and those to the one that lives."""
    topic = f"held-{process.language.name}"
    with (
        tempfile.TemporaryDirectory() as home,
        OfficialClient(process.language, Path(home), process.address) as doomed,
    ):
        process.start("held-p", "producer", topic)
        doomed.start("doomed", "push", topic, group=topic)
        message_id = process.send("held-p", topic, body="hang 1")
        held = doomed.wait_for_deliveries("doomed", 1)
    process.start("held-c", "push", topic, group=topic)
    return message_id, held, process.wait_for_deliveries("held-c", 1, within_s=HELD_S_MAX)


@pytest.fixture(scope="module")
def scenarios(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scenarios]:
    with Daemon(tmp_path_factory.mktemp("daemon") / "data") as daemon:
        with Scenarios(daemon.address, tmp_path_factory, (_die,)) as running:
            yield running
        daemon.stop()


@at_length
@pytest.mark.timeout(200)
@pytest.mark.parametrize("language", those_with("push"), ids=lambda language: language.name)
def test_another_consumer_gets_the_messages_of_a_dead_listener(scenarios: Scenarios, language: Language) -> None:
    """Nobody renews the lease any more: within two minutes the other one has the message, on its second attempt."""
    message_id, held, found = scenarios.result(_die, language, HELD_S_MAX + 30)
    assert [(each["message_id"], each["attempt"]) for each in held] == [(message_id, 1)]
    assert [(each["message_id"], each["attempt"]) for each in found] == [(message_id, 2)]
