"""Allocation, choice by a key and faults are decided as by RocketMQ's own client, which reads bodies that we pack."""

from __future__ import annotations

import base64
import json
import os
import subprocess
from collections.abc import Iterator
from random import Random
from typing import Any

import pytest
from support.clients.java.jvm import SHORT_LIVED
from support.clients.java.programs import class_path
from support.effort import EFFORT, SEED

from bench.rocketmq import PeerMissing
from broker_adapter.contracts.message_queue import MessageQueue
from broker_adapter.queue_client.balance.allocation import (
    Averagely,
    AveragelyByCircle,
    Configured,
    ConsistentHash,
    MachineRoom,
    MachineRoomNearby,
    Strategy,
)
from broker_adapter.queue_client.balance.faults import RULES_5
from broker_adapter.queue_client.balance.queue_choice import by_hash
from broker_adapter.remoting.protocol.packing import Compression, pack

pytestmark = pytest.mark.cluster
BROKERS = ("east@a", "east@b", "north@a", "west@b", "west@c@", "plain", "a@b@c", "@empty", "room@")
ROOMS = ("east", "west", "north", "south", "")


def room_of(name: str) -> str:
    """Where a queue or a client is in these questions."""
    return name.partition("@")[0]


def a_strategy(random: Random, rooms: frozenset[str], configured: tuple[MessageQueue, ...]) -> Strategy:
    """Any of the six."""
    inner = random.choice((Averagely(), AveragelyByCircle(), ConsistentHash()))
    nearby = MachineRoomNearby(inner=inner, room_of_queue=lambda queue: room_of(queue.broker), room_of_client=room_of)
    return random.choice(
        (Averagely(), AveragelyByCircle(), ConsistentHash(), MachineRoom(rooms), nearby, Configured(configured))
    )


def questions(random: Random, count: int) -> Iterator[tuple[dict[str, Any], object]]:
    """Questions for the Java client, each with our answer."""
    for _ in range(count):
        brokers = random.sample(BROKERS, random.randint(1, 4))
        topic = random.choice(("orders", "%RETRY%workers"))
        queues = sorted(MessageQueue(topic, broker, n) for broker in brokers for n in range(random.randint(1, 9)))
        rooms = frozenset(random.sample(ROOMS, random.randint(0, 3)))
        strategy = a_strategy(random, rooms, tuple(random.sample(queues, random.randint(0, len(queues)))))
        if strategy.name.startswith("MACHINE_ROOM_NEARBY"):
            queues = [queue for queue in queues if room_of(queue.broker)] or [MessageQueue(topic, "east@a", 0)]
        names = {f"{random.choice(ROOMS[:4])}@{random.getrandbits(16)}ü" for _ in range(random.randint(1, 12))}
        clients = sorted(names)
        client = random.choice((*clients, "west@nobody"))
        question = {"strategy": strategy.name, "client": client, "queues": queues, "clients": clients}
        question |= {"rooms": sorted(rooms), "configured": getattr(strategy, "queues", ())}
        share = strategy("group", client, queues, clients)
        yield question, {"name": strategy.name, "share": [list(queue) for queue in share]}
        key = "".join(random.choices("aZ09ü€😀 ", k=random.randint(0, 40)))
        yield {"queues": queues, "key": key}, list(by_hash(queues, key))


def ask_java(asked: list[dict[str, Any]]) -> dict[str, Any]:
    """Have the Java client answer."""
    try:
        path = class_path()
    except PeerMissing as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(f"no Apache RocketMQ: {error}")
    command = ["java", *SHORT_LIVED, "-Dfile.encoding=UTF-8", "-cp", path, "Decisions"]
    done = subprocess.run(
        command, input=json.dumps(asked), capture_output=True, text=True, encoding="utf-8", timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    answers: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answers


def packed_bodies(random: Random) -> Iterator[tuple[dict[str, Any], object]]:
    """Bodies that we compress in each way, each with itself: one is of many blocks."""
    for method in Compression:
        for body in (b"x", random.randbytes(40) * 200, random.randbytes(300_000)):
            packed = base64.b64encode(pack(body, method)).decode()
            yield {"packed": packed, "method": method.name}, base64.b64encode(body).decode()


def test_every_decision_is_that_of_the_java_client() -> None:
    """All six strategies, with members that are not there and brokers with and without a room; one JVM for all."""
    asked = [*questions(Random(SEED), 400 * EFFORT), *packed_bodies(Random(SEED))]
    told = ask_java([question for question, _ in asked])
    for (question, ours), theirs in zip(asked, told["answers"], strict=True):
        assert ours == theirs, f"DMQ_TEST_SEED={SEED}: {str(question)[:2000]}"
    assert RULES_5.steps_ms == tuple(zip(told["latencies"], told["pauses"], strict=True))
