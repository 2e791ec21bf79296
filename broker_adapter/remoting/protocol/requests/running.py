"""State that a group member reports when an operator requests it through a broker. Pure.

RocketMQ calls it the running info of a consumer. The keys of its queue table are JSON objects without quotes around
them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from broker_adapter.contracts.classic import Filter, HeldQueue, MemberState
from broker_adapter.remoting.protocol.loose_json import decode_object, unreadable
from broker_adapter.remoting.protocol.requests.bodies import queue_of_name, subscription_body
from broker_adapter.remoting.protocol.requests.pulling import SQL

_MIB = 1024 * 1024


def running_body(state: MemberState, names: Sequence[str]) -> bytes:
    """Return the state of a consumer in the format of RocketMQ's own tools. ``names``: its name servers."""
    properties = {
        "PROP_NAMESERVER_ADDR": ";".join(names),
        "PROP_CONSUME_TYPE": "CONSUME_PASSIVELY",
        "PROP_CONSUMEORDERLY": str(state.in_order).lower(),
        "PROP_CONSUMER_START_TIMESTAMP": str(state.started_at_ms),
    }
    wanted = [subscription_body(topic, each, 0) for topic, each in state.filters.items()]
    queues = ",".join(f"{_name(each)}:{json.dumps(_process_queue(each))}" for each in state.queues)
    known = {"properties": properties, "subscriptionSet": wanted, "statusTable": {}}
    return f'{json.dumps(known, ensure_ascii=False)[:-1]},"mqTable":{{{queues}}}}}'.encode()


def decode_running(body: bytes) -> MemberState:
    """Decode the state of a member, including Java clients; ``FrameBroken`` for an invalid answer.

    Java clients round sizes down to MiB. Queues that the member is releasing are omitted.
    """
    what = "what a member says of itself"
    found = decode_object(body, what)
    try:
        properties: Mapping[str, Any] = found.get("properties") or {}
        wanted = {
            str(each["topic"]): Filter(str(each["subString"]), each.get("expressionType") == SQL)
            for each in found.get("subscriptionSet") or ()
        }
        table: Mapping[str, Any] = found.get("mqTable") or {}
        held = [_held(name, each) for name, each in table.items() if not each.get("droped")]
        in_order = str(properties.get("PROP_CONSUMEORDERLY")).lower() == "true"
        return MemberState(wanted, sorted(held), in_order, int(properties.get("PROP_CONSUMER_START_TIMESTAMP", 0)))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise unreadable(what, error) from None


def _name(held: HeldQueue) -> str:
    queue = held.queue
    return json.dumps({"brokerName": queue.broker, "queueId": queue.queue_id, "topic": queue.topic})


def _process_queue(held: HeldQueue) -> Mapping[str, int | bool]:
    return {
        "commitOffset": held.commit_offset,
        "cachedMsgMinOffset": held.commit_offset if held.messages else 0,
        "cachedMsgMaxOffset": held.commit_offset + held.span if held.messages else 0,
        "cachedMsgCount": held.messages,
        "cachedMsgSizeInMiB": held.size_bytes // _MIB,
        "locked": held.is_locked,
        "droped": False,
        "lastPullTimestamp": held.pulled_at_ms,
        "lastConsumeTimestamp": held.consumed_at_ms,  # RocketMQ's tools report a block a minute later
    }


def _held(name: str, found: Mapping[str, Any]) -> HeldQueue:
    count = int(found.get("cachedMsgCount", 0))
    span = int(found.get("cachedMsgMaxOffset", 0)) - int(found.get("cachedMsgMinOffset", 0))
    return HeldQueue(
        queue_of_name(name),
        int(found.get("commitOffset", 0)),
        count,
        span if count else 0,
        int(found.get("cachedMsgSizeInMiB", 0)) * _MIB,
        int(found.get("lastPullTimestamp", 0)),
        int(found.get("lastConsumeTimestamp", 0)),
        bool(found.get("locked")),
    )
