"""JSON bodies of requests and answers: heartbeats, members, locks. Pure."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from broker_adapter.contracts.classic import Filter, Presence
from broker_adapter.contracts.message_queue import MessageQueue
from broker_adapter.contracts.topics import java_hash_code
from broker_adapter.remoting.protocol.loose_json import decode_object, unreadable
from broker_adapter.remoting.protocol.requests.pulling import expression_type

_ALL = "*"


def heartbeat_body(
    client_id: str, producers: Sequence[str], consumers: Sequence[Presence], version: Callable[[str, str, Filter], int]
) -> bytes:
    """Return the heartbeat of a client. ``version`` of a group, topic and filter increases when the filter changes."""
    return _encoded(
        {
            "clientID": client_id,
            "producerDataSet": [{"groupName": each} for each in producers],
            "consumerDataSet": [
                {
                    "groupName": each.group,
                    "consumeType": "CONSUME_PASSIVELY",
                    "messageModel": "BROADCASTING" if each.is_broadcast else "CLUSTERING",
                    "consumeFromWhere": each.start.value,
                    "subscriptionDataSet": [
                        subscription_body(topic, wanted, version(each.group, topic, wanted))
                        for topic, wanted in each.filters.items()
                    ],
                    "unitMode": False,
                }
                for each in consumers
            ],
        }
    )


def subscription_body(topic: str, wanted: Filter, version: int) -> dict[str, Any]:
    """Return the subscription of a consumer to a topic, as part of a body."""
    tags = (
        [] if wanted.is_sql or wanted.expression == _ALL else [each.strip() for each in wanted.expression.split("||")]
    )
    named = sorted({each for each in tags if each})
    return {
        "topic": topic,
        "subString": wanted.expression or _ALL,
        "tagsSet": named,
        "codeSet": sorted({java_hash_code(each) for each in named}),
        "subVersion": version,
        "expressionType": expression_type(wanted),
        "classFilterMode": False,
    }


def check_body(client_id: str, group: str, topic: str, wanted: Filter) -> bytes:
    """Return the body of a request that validates a filter."""
    return _encoded({"clientId": client_id, "group": group, "subscriptionData": subscription_body(topic, wanted, 0)})


def lock_body(group: str, client_id: str, queues: Iterable[MessageQueue]) -> bytes:
    """Return the body of a request to lock or unlock queues of one broker."""
    named = [{"topic": each.topic, "brokerName": each.broker, "queueId": each.queue_id} for each in queues]
    return _encoded({"consumerGroup": group, "clientId": client_id, "onlyThisBroker": False, "mqSet": named})


def decode_locked(body: bytes) -> frozenset[MessageQueue]:
    """Return the queues that a broker locked; ``FrameBroken`` for an invalid answer."""
    what = "the list of locked queues"
    try:
        found = decode_object(body, what)["lockOKMQSet"] or ()
        return frozenset(
            MessageQueue(str(each["topic"]), str(each["brokerName"]), int(each["queueId"])) for each in found
        )
    except (ValueError, TypeError, KeyError) as error:
        raise unreadable(what, error) from None


def decode_offsets(body: bytes) -> Mapping[MessageQueue, int]:
    """Return the offsets of an operator's reset, as a broker forwards them; ``FrameBroken`` for an invalid body."""
    what = "the list of offsets"
    try:
        return {queue_of_name(name): int(each) for name, each in decode_object(body, what)["offsetTable"].items()}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise unreadable(what, error) from None


def queue_of_name(name: str) -> MessageQueue:
    """Return the queue encoded in a key of RocketMQ's JSON.

    ``ValueError``, ``TypeError`` or ``KeyError`` for an invalid key.
    """
    queue = json.loads(name)
    return MessageQueue(str(queue["topic"]), str(queue["brokerName"]), int(queue["queueId"]))


def decode_members(body: bytes) -> tuple[str, ...]:
    """Return the members of a group, sorted; ``FrameBroken`` for an invalid answer."""
    what = "the list of members"
    try:
        return tuple(sorted(map(str, decode_object(body, what)["consumerIdList"])))
    except (TypeError, KeyError) as error:
        raise unreadable(what, error) from None


def _encoded(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()
