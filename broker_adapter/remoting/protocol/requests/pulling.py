"""Pull requests as fields of the protocol, and their results in the message model. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from broker_adapter.contracts.classic import Filter, ReceivedMessage
from broker_adapter.contracts.message import Message
from broker_adapter.contracts.message_queue import MessageQueue
from broker_adapter.contracts.topics import RETRY_PREFIX
from broker_adapter.remoting.protocol.codes import Result
from broker_adapter.remoting.protocol.frames import FrameBroken, RemotingFrame, number_of
from broker_adapter.remoting.protocol.properties import RETRY_TOPIC, SYSTEM_PROPERTIES
from broker_adapter.remoting.protocol.stored import StoredMessage, UnreadableMessage, decode_messages, to_message

# Result codes of successful pulls.
PULLED = (Result.OK, Result.NOTHING_THERE, Result.NOTHING_MATCHED, Result.OFFSET_MOVED)
SQL = "SQL92"
_SUSPEND, _BRINGS_FILTER = 2, 4  # bits of a pull: long poll allowed; filter included, no heartbeat needed


def offset_fields(queue: MessageQueue) -> dict[str, str]:
    """Return the fields that identify a queue; ``bname`` identifies the broker to a proxy."""
    return {"topic": queue.topic, "queueId": str(queue.queue_id), "bname": queue.broker}


def pull_fields(
    group: str,
    queue: MessageQueue,
    queue_offset: int,
    *,
    batch_max: int,
    wait_ms: int = 0,
    brought: Filter | None = None,
    version: int = 0,
) -> Mapping[str, str]:
    """Return the fields of a pull.

    ``brought`` is the filter of this request; without it the broker uses the filter of the heartbeat with this version.
    """
    wanted = brought or Filter("")
    return {
        "consumerGroup": group,
        **offset_fields(queue),
        "queueOffset": str(queue_offset),
        "maxMsgNums": str(batch_max),
        "sysFlag": str(_SUSPEND * (wait_ms > 0) | _BRINGS_FILTER * (brought is not None)),
        "commitOffset": "0",
        "suspendTimeoutMillis": str(wait_ms),
        "subscription": wanted.expression,
        "subVersion": str(version),
        "expressionType": expression_type(wanted),
    }


def expression_type(wanted: Filter) -> str:
    """Return RocketMQ's name for the language of a filter."""
    return SQL if wanted.is_sql else "TAG"


def pulled(
    answer: RemotingFrame, queue_offset: int, address: str
) -> tuple[Sequence[StoredMessage | UnreadableMessage], int]:
    """Return the messages in the answer to a pull, and the next offset."""
    next_offset = number_of(answer, "nextBeginOffset", address)
    if answer.code != Result.OK:
        return (), next_offset
    if next_offset <= queue_offset:
        raise FrameBroken(f"{address} answers a pull at {queue_offset} with {next_offset} as the next")
    return tuple(decode_messages(answer.body)), next_offset


def received(stored: StoredMessage | UnreadableMessage, queue: MessageQueue) -> ReceivedMessage:
    """Return a stored message of ``queue`` in the message model, under its original topic."""
    if isinstance(stored, UnreadableMessage):
        return ReceivedMessage(
            message=Message(queue.topic, b""),
            queue=queue,
            queue_offset=stored.queue_offset,
            stored_at_ms=stored.stored_at_ms,
            offset_id=stored.offset_id,
            unreadable=stored.why,
        )
    message = to_message(stored)
    origin = stored.properties.get(RETRY_TOPIC, "")
    if origin and queue.topic.startswith(RETRY_PREFIX):
        message = replace(message, topic=origin)
    return ReceivedMessage(
        message=message,
        queue=queue,
        queue_offset=stored.queue_offset,
        stored_at_ms=stored.stored_at_ms,
        attempts_failed=stored.attempts_failed,
        offset_id=stored.offset_id,
        size_bytes=stored.size_bytes,
        system={name: value for name, value in stored.properties.items() if name in SYSTEM_PROPERTIES},
    )
