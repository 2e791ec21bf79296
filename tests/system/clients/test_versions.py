"""Every published version of the official clients is served, and none logs a warning while nothing is wrong.

The newest of each language, its oldest and one from the middle; with ``make clients-matrix`` all of them. Their
programs run side by side in front of one daemon, before the first test; the tests look at what came of them.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import pytest
from support.clients.official.client import EARLIER, VERSIONS, Language, OfficialClient, can_run, require
from support.effort import at_length
from support.rigs.daemon.process import Daemon

pytestmark = pytest.mark.integration
BESIDE_MAX = 12  # programs at a time: each is a process that starts, and a Java one takes a processor for a second
ALIVE_S = 12.0  # a heartbeat goes out after a second, mostly, and one 10 s later
PROPERTIES = {"colour": "blau", "x": "1 2"}
_BAD = re.compile(r"\b(WARN|WARNING|ERROR|FATAL|CRITICAL|Exception|panicked)\b", re.IGNORECASE)

# What a client complains of by itself, whatever a server does: by what its name begins with.
ITS_OWN: dict[str, tuple[str, ...]] = {
    # A push consumer reads no more of its telemetry stream once it is told that metrics are off, RocketMQ's default.
    # Shut down, it complains of its own receives that ended with it, without a reason.
    "python": (
        "object has no attribute 'get_meter'",
        r"receive message error, (RpcClient is not running\.)?$",
        "process received message (raise exception|error), $",
        "end receive, because consumer is not running.",
        # Its settings are written by two threads at its start. Where both wait for the connection, the second is
        # refused by its own grpcio (too many operations), in words that no server can send; it then asks anew.
        "send setting to .* occurred AioRpcError",
        "Internal error from Core",
    ),
    # It closes its log before it has written all of it.
    "node": ("log stream had been closed",),
    # Shut down, a push consumer waits for its long poll of 20 s for less than that, and says good-bye afterwards.
    "go": ("Timeout waiting for all inflight receive requests",),
}


class Seen(NamedTuple):
    """What came of one program."""

    sent: list[str]
    due_ms: int
    received: list[dict[str, Any]]
    delayed: list[dict[str, Any]]
    listened: list[dict[str, Any]]
    log: list[str]


def _run(language: Language, address: str, tmp: pytest.TempPathFactory) -> Seen:
    with OfficialClient(language, tmp.mktemp(language.name), address) as process:
        began_s = time.monotonic()
        topic, later, heard = (f"{what}-{language.name}" for what in ("now", "later", "heard"))
        process.start("p", "producer", topic)
        process.start("c", "simple", topic, group=topic)
        process.start("d", "simple", later, group=later)
        process.start("l", language.listener, heard, group=heard)
        properties = {} if "properties" in language.lacks else PROPERTIES
        sent = [process.send("p", topic, body="héllo", tag="blue", key="order-7", properties=properties)]
        due_ms = time.time_ns() // 1_000_000 + 1_500
        sent.append(process.send("p", later, deliver_at_ms=due_ms))
        sent += [process.send("p", heard) for _ in range(3)]
        received = process.receive_until("c", 1)
        delayed = process.receive_until("d", 1)
        listened = process.wait_for_deliveries("l", 3)
        time.sleep(max(0.0, began_s + ALIVE_S - time.monotonic()))
        if language.listener == "push":
            process.do("shutdown", name="l")
        for name in ("c", "d", "p"):
            if language.name != "rust":  # its clients live as long as the process
                process.do("shutdown", name=name)
        log = f"{process.client_log()}\n{process.stderr()}"
        return Seen(sent, due_ms, received, delayed, listened, [line for line in log.splitlines() if _BAD.search(line)])


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Future[Seen]]]:
    """What came of each version that can run here."""
    with (
        Daemon(tmp_path_factory.mktemp("daemon") / "data") as daemon,
        ThreadPoolExecutor(BESIDE_MAX) as pool,
    ):
        yield {
            language.name: pool.submit(_run, language, daemon.address, tmp_path_factory)
            for language in filter(can_run, VERSIONS)
        }
        daemon.stop()


@pytest.mark.parametrize("language", VERSIONS, ids=lambda language: language.name)
def test_every_version_sends_receives_and_listens(language: Language, seen: dict[str, Future[Seen]]) -> None:
    """At once, later and by itself: each message once, on its first attempt, as it was sent."""
    require(language)
    found = seen[language.name].result(300)
    (received,), (delayed,) = found.received, found.delayed
    assert [received["message_id"], delayed["message_id"]] == found.sent[:2]
    keys = [] if "keys" in language.lacks else ["order-7"]
    assert (received["body"], received["tag"], received["keys"]) == ("héllo", "blue", keys)
    assert received["properties"] == ({} if "properties" in language.lacks else PROPERTIES)
    assert delayed["at_ms"] >= found.due_ms
    assert sorted(each["message_id"] for each in found.listened) == sorted(found.sent[2:])
    assert {each["attempt"] for each in (received, delayed, *found.listened)} == {1}


@pytest.mark.parametrize("language", VERSIONS, ids=lambda language: language.name)
def test_no_version_logs_a_warning(language: Language, seen: dict[str, Future[Seen]]) -> None:
    """Nothing was wrong from its start to its end, heartbeats in between: only what it says of itself may be there."""
    require(language)
    (its_own,) = [words for name, words in ITS_OWN.items() if language.name.startswith(name)] or [()]
    log = seen[language.name].result(300).log
    assert [line for line in log if not any(re.search(words, line) for words in its_own)] == []


@at_length
def test_a_listener_of_java_5_0_3_keeps_its_message(daemon: Daemon, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Busy for 150 s, longer than two leases and than clients are waited for: its heartbeats keep it, typeless."""
    (language,) = (each for each in EARLIER if each.name == "java-5_0_3")
    require(language)
    topic = "held"
    with (
        OfficialClient(language, tmp_path_factory.mktemp("busy"), daemon.address) as busy,
        OfficialClient(language, tmp_path_factory.mktemp("idle"), daemon.address) as idle,
    ):
        busy.start("p", "producer", topic)
        busy.start("busy", "push", topic, group="held")
        message_id = busy.send("p", topic, body="hang on")
        (held,) = busy.wait_for_deliveries("busy", 1)
        assert held["message_id"] == message_id
        idle.start("idle", "push", topic, group="held")
        assert idle.wait_for_deliveries("idle", 1, within_s=150) == []
        assert len(busy.deliveries("busy")) == 1
