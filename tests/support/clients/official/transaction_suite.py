"""Transactional producers, as the official clients see them: tests to be taken as those of ``client_suite``."""

from __future__ import annotations

import threading
import time

import pytest
from support.clients.official.client import ClientError, OfficialClient, having
from support.clients.wire.client import WireClient, a_message

from broker_adapter.wire import rocketmq_v2 as wire

KINDS: tuple[str, ...] = ("transactional", "listener")


def half(process: OfficialClient, topic: str, body: str, **arguments: object) -> str:
    """Send a half message and return its id."""
    return process.send(f"p-{topic}", topic, body=body, is_half=True, **arguments)


def bodies(process: OfficialClient, topic: str, expected: int) -> list[str]:
    """Wait for what the consumer is to be given."""
    return [each["body"] for each in process.wait_for_deliveries(f"c-{topic}", expected)]


def assert_commit_refused(process: OfficialClient, message_id: str, why: str) -> None:
    """Commit what ended otherwise: the client raises, unless its version takes any answer for a success."""
    if "end status" in process.language.lacks:
        process.do("commit", message_id=message_id)
        return
    with pytest.raises(ClientError, match=why):
        process.do("commit", message_id=message_id)


def test_commit_and_rollback(process: OfficialClient, topic: str) -> None:
    """What is committed comes, with all it carries; what is rolled back never does, nor a half message by itself."""
    lacks = process.language.lacks
    properties = {} if "properties" in lacks else {"color": "blue"}
    good = half(process, topic, "wanted", tag="red", key="k-1", properties=properties)
    bad = half(process, topic, "unwanted")
    process.send(f"p-{topic}", topic, body="before")
    assert bodies(process, topic, 1) == ["before"]
    process.do("rollback", message_id=bad)
    process.do("commit", message_id=good)
    assert bodies(process, topic, 2) == ["before", "wanted"]
    seen = process.deliveries(f"c-{topic}")[1]
    assert (seen["message_id"], seen["tag"], seen["attempt"]) == (good, "red", 1)
    assert seen["keys"] == ([] if "keys" in lacks else ["k-1"])
    assert (seen["properties"], seen["is_corrupted"]) == (properties, "digest" in lacks)
    process.send(f"p-{topic}", topic, body="behind")
    assert bodies(process, topic, 3) == ["before", "wanted", "behind"]


@having("second end")
def test_an_end_is_final(process: OfficialClient, topic: str) -> None:
    """A commit may be repeated, and what was rolled back cannot be committed any more."""
    good, bad = half(process, topic, "wanted"), half(process, topic, "unwanted")
    process.do("rollback", message_id=bad)
    for _ in range(2):
        process.do("commit", message_id=good)
    assert_commit_refused(process, bad, "was rolled back at")
    assert bodies(process, topic, 1) == ["wanted"]


@having("checks")
def test_a_silent_producer_is_asked(process: OfficialClient, topic: str) -> None:
    """Its checker decides: one is committed, the other one rolled back."""
    ids = {half(process, topic, body): body for body in ("commit later", "rollback later")}
    checks = process.wait_for_messages(f"p-{topic}", ids)  # one may be asked about again before the other one is
    assert {each["message_id"]: each["body"] for each in checks} == ids
    assert bodies(process, topic, 1) == ["commit later"]


@having("checks")
def test_the_answer_to_a_check_is_final(process: OfficialClient, topic: str) -> None:
    """Its producer cannot commit any more what its checker rolled back."""
    bad = half(process, topic, "rollback later")
    assert process.wait_for_deliveries(f"p-{topic}", 1)
    assert "was rolled back at" in how_it_ended(process, topic, bad)
    if "second end" not in process.language.lacks:
        assert_commit_refused(process, bad, "was rolled back at")


def how_it_ended(process: OfficialClient, topic: str, message_id: str) -> str:
    """Send a half message again until that is refused because it ended; return the refusal.

    A checker's answer leaves its client after the check is reported here: to ask by a commit could come before it.
    """
    again = a_message(topic, message_id)
    again.system_properties.message_type = wire.TRANSACTION
    pause, until_s = threading.Event(), time.monotonic() + 20
    with WireClient(process.address) as client:
        while (status := client.send(again).entries[0].status).code == wire.OK:
            assert time.monotonic() < until_s, f"{message_id} still waits"
            pause.wait(0.05)
    return str(status.message)


@having("properties")
def test_a_delay_begins_at_the_commit(process: OfficialClient, topic: str) -> None:
    """A relative one, in a property that any client can set."""
    message_id = half(process, topic, "later", properties={"TIMER_DELAY_MS": "1500"})
    process.send(f"p-{topic}", topic, body="at once")
    assert bodies(process, topic, 1) == ["at once"]
    committed_ms = time.time() * 1000
    process.do("commit", message_id=message_id)
    assert bodies(process, topic, 2) == ["at once", "later"]
    assert process.deliveries(f"c-{topic}")[1]["at_ms"] - committed_ms > 1_499


def test_a_message_group_is_refused(process: OfficialClient, topic: str) -> None:
    """By the client itself, or by the server."""
    with pytest.raises(ClientError):
        half(process, topic, "grouped", message_group="a")
