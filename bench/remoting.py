"""What a bench and the tests ask of RocketMQ's own management: topics, groups, routes, over its remoting protocol.

Apache's command-line tool does the same in five seconds a call. A frame is ``length 4 | header length 4 | header |
body``; the first byte of the header length says how the header is written: 0 is JSON.
"""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Mapping

_TIMEOUT_S = 10.0
_VERSION = 513  # of RocketMQ 5.5.0; from 401 on a name server answers proper JSON
_UPDATE_TOPIC, _UPDATE_GROUP, _ROUTE = 17, 200, 105
_READ_WRITE = 6
_LENGTHS = struct.Struct(">II")


class RemotingRefused(Exception):
    """A server of RocketMQ answered with another code than 0."""


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
    _ask(broker, _UPDATE_TOPIC, {name: _text(value) for name, value in fields.items()})


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
    _ask(broker, _UPDATE_GROUP, {}, json.dumps(settings).encode())


def brokers_of(names: str, topic: str) -> set[str]:
    """Return the names of the brokers that the name server says have a topic; none if it knows no such topic."""
    try:
        body = _ask(names, _ROUTE, {"topic": topic, "acceptStandardJsonOnly": "true"})
    except RemotingRefused:
        return set()
    return {each["brokerName"] for each in json.loads(body)["queueDatas"]}


def _ask(address: str, code: int, fields: Mapping[str, str], body: bytes = b"") -> bytes:
    host, _, port = address.rpartition(":")
    header = json.dumps(
        {"code": code, "language": "OTHER", "version": _VERSION, "opaque": 1, "flag": 0, "extFields": dict(fields)}
    ).encode()
    with socket.create_connection((host, int(port)), timeout=_TIMEOUT_S) as connection:
        connection.sendall(_LENGTHS.pack(4 + len(header) + len(body), len(header)) + header + body)
        stream = connection.makefile("rb")
        length, header_length = _LENGTHS.unpack(stream.read(_LENGTHS.size))
        answer = json.loads(stream.read(header_length & 0xFFFFFF))
        content = stream.read(length - 4 - (header_length & 0xFFFFFF))
    if answer["code"] != 0:
        raise RemotingRefused(f"{address} answers {answer['code']} to {code}: {answer.get('remark', '')[:300]}")
    return content


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
