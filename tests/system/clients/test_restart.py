"""The daemon goes away under running official clients and comes back: every one of them goes on by itself.

The reference server leaves Python, Go and Rust consumers dead for minutes after its restart (it has forgotten their
settings). Here nothing a client told us is needed to serve it. All languages are at work while one daemon is restarted,
so that the waits overlap.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.clients.official.client import (
    NODE,
    PYTHON,
    ClientError,
    Language,
    OfficialClient,
    require,
    those_with,
)
from support.clients.official.traffic import RECOVERY_S_MAX, Outage, Restarts, at_work
from support.effort import at_length
from support.rigs.daemon.process import Daemon

pytestmark = pytest.mark.integration
_TOPIC = "restarted"
_AT_ONCE = 8  # languages under one daemon; all published versions at once would be thirty processes of three clients
_RESTARTABLE = those_with("restart")


@pytest.fixture(scope="module")
def restarts(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Restarts]:
    languages: tuple[Language, ...] = request.param
    with Daemon(tmp_path_factory.mktemp("daemon") / "data") as daemon:
        with at_work(languages, daemon.address, tmp_path_factory) as restarts:
            restarts.run(Outage("a stop", daemon.stop, daemon.restart), Outage("a kill", daemon.kill, daemon.restart))
        yield restarts
        daemon.stop()


@pytest.mark.parametrize(
    ("restarts", "language"),
    [
        pytest.param(_RESTARTABLE[at : at + _AT_ONCE], language, id=language.name)
        for at in range(0, len(_RESTARTABLE), _AT_ONCE)
        for language in _RESTARTABLE[at : at + _AT_ONCE]
    ],
    indirect=["restarts"],
    scope="module",  # else each language would see a restart of its own, and all of them five
)
def test_clients_go_on_after_a_restart(language: Language, restarts: Restarts) -> None:
    """After a clean stop and after SIGKILL, producer and consumers work again within seconds, and nothing is lost."""
    require(language)
    if language.name in restarts.failed:
        raise restarts.failed[language.name]


CHECK_BACK_S_MAX = 70.0  # Python asks for its routes every 30 s, and may be told the address it has at the first time


@pytest.mark.parametrize("language", [NODE, pytest.param(PYTHON, marks=at_length)], ids=lambda language: language.name)
def test_a_producer_is_asked_again_after_a_restart(language: Language, tmp_path: Path) -> None:
    """Its half message was undecided when the daemon was killed; its telemetry stream comes back without its doing.

    Go's client opens its stream again when it repeats its settings, after minutes, and nothing hurries it.
    """
    require(language)
    home = tmp_path / "home"
    home.mkdir()
    data = tmp_path / "data"
    env = {**os.environ, "DMQ_TRANSACTION_TIMEOUT": "1s", "DMQ_TRANSACTION_CHECK_INTERVAL": "1s"}
    with Daemon(data, env=env) as daemon, OfficialClient(language, home, daemon.address) as process:
        process.start("producer", "transactional", _TOPIC)
        message_id = process.send("producer", _TOPIC, body="commit after the restart", is_half=True)
        daemon.kill()
        daemon.restart()
        began_s = time.monotonic()
        while True:  # a producer at work shows itself at once, an idle one with its next heartbeat
            try:
                process.send("producer", _TOPIC, body="rollback", is_half=True)
                break
            except ClientError:
                assert time.monotonic() - began_s < RECOVERY_S_MAX
                time.sleep(0.1)
        assert process.wait_for_deliveries("producer", 1, within_s=CHECK_BACK_S_MAX)
        print(f"{language.name} was asked after {time.monotonic() - began_s:.1f} s")
        process.start("push", "push", _TOPIC, group="push")
        assert [each["message_id"] for each in process.wait_for_deliveries("push", 1)] == [message_id]
        daemon.stop()
