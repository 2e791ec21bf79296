"""What a bench and the tests ask of RocketMQ's own management: topics, groups, routes, over the classic protocol.

Apache's command-line tool does the same in five seconds a call.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

from broker_adapter.errors import BrokerError
from broker_adapter.remoting.client import queues_of
from broker_adapter.remoting.codes import Operation, error_of
from broker_adapter.remoting.connection import Connection
from broker_adapter.remoting.frames import Frame

_TIMEOUT_S = 10.0
_READ_WRITE = 6


def make_topic(broker: str, topic: str, kind: str, queues: int = 4) -> None:
    """Make a topic of a type (NORMAL, FIFO, DELAY, TRANSACTION, MIXED) at a broker, or change it."""
    fields = {
        "topic": topic,
        "defaultTopic": "TBW102",
        "readQueueNums": queues,
        "writeQueueNums": queues,
        "perm": _READ_WRITE,
        "topicFilterType": "SINGLE_TAG",
        "topicSysFlag": 0,
        "order": kind == "FIFO",
        "attributes": f"+message.type={kind}",
    }
    _ask(broker, Operation.UPDATE_TOPIC, {name: _text(value) for name, value in fields.items()})


def make_group(broker: str, group: str, *, attempts: int = 17, is_fifo: bool = False) -> None:
    """Make a consumer group at a broker, or change it. ``attempts`` counts deliveries, the first included."""
    settings = {
        "groupName": group,
        "consumeEnable": True,
        "consumeFromMinEnable": True,
        "consumeBroadcastEnable": True,
        "consumeMessageOrderly": is_fifo,
        "retryQueueNums": 1,
        "retryMaxTimes": attempts - 1,
        "brokerId": 0,
        "whichBrokerWhenConsumeSlowly": 1,
        "notifyConsumerIdsChangedEnable": True,
    }
    _ask(broker, Operation.UPDATE_GROUP, {}, json.dumps(settings).encode())


def brokers_of(names: str, topic: str) -> set[str]:
    """Return the names of the brokers that the name server says have a topic; none if it knows no such topic."""
    try:
        body = _ask(names, Operation.ROUTE, {"topic": topic, "acceptStandardJsonOnly": "true"})
        return {each.broker for each in queues_of(topic, body)}
    except BrokerError:
        return set()


def _ask(address: str, operation: Operation, fields: Mapping[str, str], body: bytes = b"") -> bytes:
    async def ask() -> bytes:
        connection = Connection(address, timeout_s=_TIMEOUT_S)
        try:
            answer = await connection.ask(Frame(code=operation, fields=fields, body=body))
        finally:
            await connection.close()
        if answer.code:
            raise error_of(answer, address, operation)
        return answer.body

    with ThreadPoolExecutor(1) as beside:  # whoever asks may have a loop that runs
        return beside.submit(asyncio.run, ask()).result()


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
