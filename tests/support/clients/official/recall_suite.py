"""Recall and SQL92 filters, as the official clients see them: tests to be taken as those of ``client_suite``."""

from __future__ import annotations

import json
import time

import pytest
from support.clients.official.client import ClientError, OfficialClient, having
from support.rigs.daemon.process import run_command

KINDS: tuple[str, ...] = ("producer",)
LATER_MS = 3_600_000


def send_later(process: OfficialClient, topic: str, delay_ms: int = LATER_MS, **arguments: object) -> tuple[str, str]:
    """Send a delayed message; return its id and its recall handle."""
    at = -(-(time.time_ns() // 1_000_000 + delay_ms) // process.language.deliver_at_unit_ms)
    sent = process.do("send", name=f"p-{topic}", topic=topic, deliver_at=at, **arguments)
    return sent["message_id"], sent["recall_handle"]


def recall(process: OfficialClient, topic: str, handle: str) -> str:
    """Recall a message and return the id the client is told."""
    return str(process.do("recall", name=f"p-{topic}", topic=topic, handle=handle))


@having("recall")
def test_a_recalled_message_does_not_come(process: OfficialClient, topic: str) -> None:
    """Of two that are due together only the other one comes; recalling it again is fine."""
    gone, handle = send_later(process, topic, 5_000, body="gone")
    send_later(process, topic, 5_000, body="stays")
    assert recall(process, topic, handle) == gone
    assert recall(process, topic, handle) == gone
    process.start(f"c-{topic}", "simple", topic, group=f"g-{topic}", wait_s=1)
    found = process.receive_until(f"c-{topic}", 1)
    assert [each["body"] for each in found] == ["stays"]
    assert process.do("receive", name=f"c-{topic}") == []


@having("recall")
def test_a_delivered_message_cannot_be_recalled(process: OfficialClient, topic: str) -> None:
    """The client raises, also that which takes 40401 for success, and its text says when it was delivered."""
    process.start(f"c-{topic}", "simple", topic, group=f"g-{topic}")
    _, handle = send_later(process, topic, 1_500)
    process.receive_until(f"c-{topic}", 1)
    with pytest.raises(ClientError, match=r"the message was delivered at 20\d\d-") as late:
        recall(process, topic, handle)
    assert late.value.code in (40400, 40401) or "40401" in str(late.value)


@having("recall")
def test_nonsense_is_refused(process: OfficialClient, topic: str) -> None:
    """A client's own mistake, not to be tried again: 40000."""
    process.do("send", name=f"p-{topic}", topic=topic)
    with pytest.raises(ClientError, match="not one of this store") as refused:
        recall(process, topic, "bm9uc2Vuc2U")
    assert refused.value.code == 40000 or "40000" in str(refused.value)


@having("recall", "properties")
def test_own_keys(process: OfficialClient, topic: str) -> None:
    """The last one sent replaces what waits; one that keeps it is answered with its id and its handle."""
    sent = [send_later(process, topic, 5_000, body=each, properties={"DMQ_KEY": "k"}) for each in ("first", "last")]
    kept = send_later(process, topic, properties={"DMQ_KEY": "k", "DMQ_ON_SAME_KEY": "keep"})
    assert kept == sent[1]
    with pytest.raises(ClientError, match="took its place at"):
        recall(process, topic, sent[0][1])
    process.start(f"c-{topic}", "simple", topic, group=f"g-{topic}", wait_s=1)
    (found,) = process.receive_until(f"c-{topic}", 1)
    assert (found["body"], found["properties"]["DMQ_KEY"]) == ("last", "k")


@having("recall")
def test_recalls_of_the_command_line(process: OfficialClient, topic: str) -> None:
    """With the handle a client was given; its exit code tells what is not found from what is wrong."""
    message_id, handle = send_later(process, topic)
    at = ("--address", process.address)
    first = run_command("msg", "recall", handle, *at)
    assert (first.returncode, first.stdout, first.stderr) == (0, f"{message_id}\n", "")
    again = run_command("msg", "recall", handle, "-o", "json", *at)
    assert json.loads(again.stdout) == {"topic": topic, "message_id": message_id, "recalled_before": True}
    assert recall(process, topic, handle) == message_id
    assert run_command("msg", "recall", "nonsense", *at).returncode == 2


@having("sql")
@pytest.mark.parametrize("kind", ["simple", "listener"])
def test_sql_filter(process: OfficialClient, topic: str, kind: str) -> None:
    """A consumer sees what its expression is true of, by user properties and by tag."""
    sql = "amount >= 10 AND (region = 'west' OR TAGS = 'red') AND note IS NULL"
    started = process.language.listener if kind == "listener" else kind
    process.start(f"c-{topic}", started, topic, group=f"g-{topic}", sql=sql)
    messages = [
        ("10", "west", "", {}),
        ("9", "west", "", {}),
        ("11", "east", "red", {}),
        ("12", "east", "blue", {}),
        ("13", "west", "red", {"note": "x"}),
        ("none", "west", "red", {}),
    ]
    for amount, region, tag, more in messages:
        properties = {"amount": amount, "region": region, **more}
        process.send(f"p-{topic}", topic, body=amount, tag=tag, properties=properties)
    take = process.receive_until if kind == "simple" else process.wait_for_deliveries
    assert sorted(each["body"] for each in take(f"c-{topic}", 2)) == ["10", "11"]


@having("sql")
def test_a_wrong_expression_is_reported(process: OfficialClient, topic: str) -> None:
    """With its position, by the code for filters; nothing is handed out."""
    process.send(f"p-{topic}", topic)
    process.start(f"c-{topic}", "simple", topic, group=f"g-{topic}", sql="amount > 'x'")
    with pytest.raises(ClientError, match=r"cannot be ordered; only numbers.*at position 10") as refused:
        process.do("receive", name=f"c-{topic}")
    assert refused.value.code == 40010 or "40010" in str(refused.value)
