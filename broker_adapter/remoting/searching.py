"""Search for the offset of a store time in a queue."""

from __future__ import annotations

from broker_adapter.contracts.classic import Filter
from broker_adapter.contracts.message_queue import MessageQueue
from broker_adapter.remoting.calls import RemotingCalls
from broker_adapter.remoting.protocol.codes import Operation, Result
from broker_adapter.remoting.protocol.requests.pulling import PULLED, offset_fields, pull_fields, pulled

# RocketMQ's built-in group for tools: no group is created, and no committed offset changes.
READER_GROUP = "TOOLS_CONSUMER"
PULL_MAX = 32  # default limit of a broker for one pull
_EXACT_FROM_VERSION = 413  # 5.0.0; older brokers return the message nearest to the time, before or after it
_BACK = 16


async def offset_at(calls: RemotingCalls, address: str, queue: MessageQueue, stored_at_ms: int) -> int:
    """Return the offset of the first message stored at or after a time, or the end offset if there is none.

    Times are those of the broker's clock. The result is only correct if that clock was never stepped back.
    """
    fields = {**offset_fields(queue), "timestamp": str(stored_at_ms)}
    found = await calls.offset(address, Operation.OFFSET_AT, fields)
    if calls.version(address) >= _EXACT_FROM_VERSION:
        return found
    begin = await calls.offset(address, Operation.BEGIN_OFFSET, offset_fields(queue))
    at, border = max(begin, found - _BACK), begin  # all messages before ``border`` were stored earlier
    while True:
        asked = pull_fields(READER_GROUP, queue, at, batch_max=PULL_MAX, brought=Filter())
        answer = await calls.ask(address, Operation.PULL, asked, accepted=PULLED)
        messages, next_offset = pulled(answer, at, address)
        late = next((each.queue_offset for each in messages if each.stored_at_ms >= stored_at_ms), None)
        if late is None and answer.code != Result.OK:
            return next_offset
        if late is None:
            at = border = next_offset
        elif late > at or at <= border:
            return late
        else:
            at = max(begin, at - _BACK)
