"""A real cluster read by offset: for itself, after a disk is gone, and for the audit."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from support.effort import EFFORT
from support.models.trail.read import read_trail
from support.rigs.daemon.process import Daemon, run_command
from support.rigs.rocketmq.cluster import cluster
from support.rigs.rocketmq.front import until
from support.rigs.rocketmq.real_time import a_message, new_id, now_ms, rocketmq

from broker_adapter.contracts.errors import Refused, Rule
from broker_adapter.contracts.message import Message, unpack_id
from broker_adapter.remoting import RemotingClient, RemotingOptions, StoredMessage, to_message
from broker_adapter.remoting.reading import Reading
from broker_adapter.wire.delay import wrap
from broker_adapter.wire.mapping import encode
from dmq.admin import admin_v1 as wire
from dmq.admin.client import AdminClient
from dmq.trail.export.verification import read_back

pytestmark = pytest.mark.cluster
PATIENCE_S = 120.0
HOUR_MS = 3_600_000


@pytest.fixture(scope="module", autouse=True)
def _running() -> None:
    cluster()


def options() -> RemotingOptions:
    """How to reach the cluster."""
    return RemotingOptions(names=(cluster().rocketmq.names,), request_timeout_ms=15_000)


def test_a_topic_is_read_back_as_it_was_sent() -> None:
    """All of it, or from a time on, with its senders' fields; a topic that is not there is refused."""
    topic = cluster().topic("FIFO")
    message = Message(
        topic=topic,
        message_id=new_id(),
        body=b"hello" * 2_000,
        tag="t",
        keys=("k1", "k2"),
        properties={"a": "1", "b": "ü"},
        message_group="g",
        born_at_ms=1_700_000_000_000,
        born_host="here",
    )

    async def scenario() -> None:
        async with rocketmq(None) as rig:  # type: ignore[arg-type]
            first = [a_message(topic, b"%d" % number, message_group=f"g{number}") for number in range(20)]
            for each in first:
                await rig.broker.send([each])
            await rig.broker.send([encode(message)])
        async with RemotingClient(options()) as client:
            found = [each async for each in Reading(client, topic, 0).messages()]
            assert all(isinstance(each, StoredMessage) for each in found)
            stored = [each for each in found if isinstance(each, StoredMessage)]
            assert {each.message_id for each in stored} == {message.message_id, *(each.message_id for each in first)}
            assert len(stored) == 21
            assert [each.stored_at_ms for each in stored] == sorted(each.stored_at_ms for each in stored)
            assert to_message(next(each for each in stored if each.message_id == message.message_id)) == message
            middle_ms = stored[10].stored_at_ms
            later = [each async for each in Reading(client, topic, middle_ms).messages()]
            assert later == [each for each in stored if each.stored_at_ms >= middle_ms]
            assert [each async for each in Reading(client, topic, now_ms() + HOUR_MS).messages()] == []
            (queue, *_) = await client.queues(topic)
            reached = await client.queue_range(queue)
            with pytest.raises(Refused) as refused:
                await client.pull(queue, reached.end + 10)
            assert refused.value.rule is Rule.OFFSET
            with pytest.raises(Refused) as refused:
                await client.queues("no-such-topic")
            assert refused.value.rule is Rule.TOPIC_UNKNOWN

    asyncio.run(scenario())


def test_a_disk_is_gone_and_the_audit_looks_at_the_cluster(tmp_path: Path) -> None:
    """A new daemon gets what waited, and nothing that was sent on; a message the cluster does not have is lost."""
    inner, topic, group = cluster().topic(), cluster().topic(), cluster().group()

    def service(name: str) -> Daemon:
        options = ("--broker", "rocketmq", "--endpoints", ";".join(cluster().endpoints), "--inner-topic", inner)
        return Daemon(tmp_path / name, *options, env={**os.environ, "DMQ_INNER_GROUP": group})

    async def send(*due_ms: int) -> list[str]:
        messages = [Message(topic=topic, message_id=new_id(), body=b"x" * 100) for _ in due_ms]
        async with rocketmq(None) as rig:  # type: ignore[arg-type]
            for message, each_ms in zip(messages, due_ms, strict=True):
                await rig.broker.send([encode(wrap(message, each_ms, inner_topic=inner))])
        return [each.message_id for each in messages]

    began_ms = now_ms()
    with service("one") as one:
        gone = asyncio.run(send(*[began_ms] * 10))
        waiting = set(asyncio.run(send(*[began_ms + HOUR_MS] * 10)))
        asyncio.run(until(one, lambda found: found.forwarded == 10 and found.inner.fetched == 20))
        one.stop()
    trail = tmp_path / "trail"
    shutil.move(one.data / "trail", trail)
    shutil.rmtree(one.data)
    (cell,) = [path.stem for path in (trail / "cells").glob("*.json")]
    with service("two") as two:

        def replay(*more: str) -> dict[str, Any]:
            names = ("--namesrv", cluster().rocketmq.names, "--inner-topic", inner, "--yes", "-o", "json")
            since = ("--address", two.address, "--since", str(began_ms - 60_000))
            ran = run_command("replay", *since, *names, *more)
            assert ran.returncode == 0, ran.stderr
            return {name: value for name, value in json.loads(ran.stdout).items() if value not in (0, [], False)}

        told = replay("--trail", str(trail), "--lost", cell)
        assert told == {"read": 20, "accepted": 10, "ended": 10}
        assert replay("--due-after", str(began_ms + 60_000)) == {"read": 20, "known": 10, "due_before": 10}
        with AdminClient(two.address) as admin:
            assert admin.status().timeline.pending == 10
            assert {admin.message(topic, each).state for each in waiting} == {wire.WAITING}
        two.stop()
    convict(trail, cell, tmp_path, gone)


def convict(trail: Path, cell: str, folder: Path, sent: list[str]) -> None:
    """Read the cluster back, take one message away from what was found, and audit: that one is lost, no other."""
    found = read_back(trail, options(), folder / "cluster", timeout_s=PATIENCE_S)
    assert found.unread == []
    path = folder / "cluster" / "messages.parquet"
    table = pq.read_table(path)
    places = {(unpack_id(row["message_id"]), row["queue_offset"]) for row in table.to_pylist()}
    said = {
        (unpack_id(event["message_id"]), event["detail"])
        for event in read_trail(trail, cell)
        if event["kind"] == "FORWARDED"
    }
    assert {message_id for message_id, _ in said} == set(sent)
    assert said <= places
    victim = table.column("message_id")[0]
    pq.write_table(table.filter(pc.not_equal(table.column("message_id"), victim)), path)
    if EFFORT < 2:  # a Spark of its own; that the audit finds what is missing is shown in tests/spark_audit
        return
    ended = subprocess.run(
        [
            *(sys.executable, "-m", "spark_audit", "run", "--trail", str(trail), "--out", str(folder / "out")),
            *("--read-back", str(folder / "cluster")),
        ],
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert ended.returncode == 20, ended.stdout + ended.stderr
    lines = (folder / "out" / "findings.jsonl").read_text(encoding="utf-8").splitlines()
    lost = [each for each in map(json.loads, lines) if each["kind"] == "LOST"]
    assert [(each["message_id"], each["rule"]) for each in lost] == [
        (unpack_id(victim.as_py()), "the cluster answered OK and does not have it")
    ]
    (row,) = json.loads((folder / "out" / "report.json").read_text(encoding="utf-8"))["cluster"]
    assert (row["sent"], row["there"], row["lost"], row["elsewhere"], row["duplicated"]) == (10, 9, 1, 0, 0)
