"""Request validation. Pure functions on wire messages; each refusal names the limit and the value.

The order of the checks of a message and their codes are those of Apache RocketMQ's proxy 5.x. The text of a refusal
contains the proxy's words, because programs match them. Where this server is more lenient (long polls shorter than 5 s,
batches of delayed messages, the four delay properties), the function documents it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache

from broker_adapter.contracts.adapter import Subscription
from broker_adapter.contracts.errors import Refused, Rule
from broker_adapter.contracts.limits import (
    BODY_BYTES_MAX,
    ENDPOINTS_BYTES_MAX,
    ENTRIES_PER_ACK_MAX,
    INVISIBLE_MS_MAX,
    INVISIBLE_MS_MIN_RECEIVE,
    MESSAGE_GROUP_BYTES_MAX,
    MESSAGE_ID_BYTES_MAX,
    MESSAGES_PER_SEND_MAX,
    POLLING_MS_MAX,
    PROPERTIES_BYTES_MAX,
    RECEIVE_BATCH_MAX,
    USER_PROPERTIES_MAX,
)
from broker_adapter.contracts.own_keys import ON_SAME_KEY, OWN_KEY, check_own_key_of
from broker_adapter.contracts.schedules import OCCURRENCE, SCHEDULE
from broker_adapter.contracts.topics import RETRY_PREFIX, check_group, check_topic
from broker_adapter.wire import rocketmq_v2 as wire
from broker_adapter.wire.mapping import NOT_AFTER_MS, full_name
from dmq.rocketmq_server.codec.delay import DELAY_PROPERTIES
from dmq.rocketmq_server.codec.mapping import ANY_QUEUE
from retry.dead_letter import WRITTEN

# Property names that RocketMQ reserves: a client that could set them would bypass delay, retry, transactions
# or tracing, here and in a cluster that messages are forwarded to. DELAY, TIMER_DELAY_SEC, TIMER_DELAY_MS and
# TIMER_DELIVER_MS are reserved there and served here (see dmq.rocketmq_server.codec.delay).
RESERVED_PROPERTIES = frozenset(
    {
        "1ST_POP_TIME",
        "ARRIVE_TIME",
        "BORN_TIMESTAMP",
        "BUYER_ID",
        "CLUSTER",
        "CONSUME_START_TIME",
        "CORRECTION_FLAG",
        "CORRELATION_ID",
        "DLQ_ORIGIN_MESSAGE_ID",
        "DLQ_ORIGIN_TOPIC",
        "DUP_INFO",
        "EXTEND_UNIQ_INFO",
        "INNER_MULTI_QUEUE_OFFSET",
        "INSTANCE_ID",
        "KEYS",
        "MAX_OFFSET",
        "MAX_RECONSUME_TIMES",
        "MIN_OFFSET",
        "MQ2_FLAG",
        "MSG_REGION",
        "MSG_TYPE",
        "ORIGIN_MESSAGE_ID",
        "PGROUP",
        "POP_CK",
        "POP_CK_OFFSET",
        "PUSH_REPLY_TIME",
        "REAL_QID",
        "REAL_TOPIC",
        "RECONSUME_TIME",
        "REPLY_TO_CLIENT",
        "RETRY_TOPIC",
        "TAGS",
        "TIMER_DELAY_LEVEL",
        "TIMER_DEL_UNIQKEY",
        "TIMER_DEQUEUE_MS",
        "TIMER_ENQUEUE_MS",
        "TIMER_OUT_MS",
        "TIMER_ROLL_TIMES",
        "TRACE_ON",
        "TRANSACTION_CHECK_TIMES",
        "TRANSFER_FLAG",
        "TRAN_MSG",
        "TRAN_PREPARED_QUEUE_OFFSET",
        "TTL",
        "UNIQ_KEY",
        "WAIT",
        "__BORNHOST",
    }
)

# Properties that a broker removes from a message: the delay, which it serves, and those that only the service writes.
# A consumer may resend a message with all its properties, so they are no reason to refuse it. But they must not
# mislead a reader.
STRIPPED_PROPERTIES = (*DELAY_PROPERTIES, SCHEDULE, OCCURRENCE, *WRITTEN)

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")


def _check_served_topic(name: str) -> str:
    if name.startswith(RETRY_PREFIX):
        why = "a group's retries come to its consumers under the topic that the message was sent to"
        raise Refused(Rule.TOPIC, why, value=name)
    return check_topic(name)


# Every call checks the same few names again. Refused names are not cached, and valid ones are short.
_topic = lru_cache(maxsize=4096)(_check_served_topic)
_group = lru_cache(maxsize=4096)(check_group)
_SERVED_TYPES = frozenset({wire.MESSAGE_TYPE_UNSPECIFIED, wire.NORMAL, wire.FIFO, wire.DELAY, wire.TRANSACTION})
_UNSERVED_TYPES: Mapping[int, str] = {
    wire.LITE: "lite topics are",
    wire.PRIORITY: "message priorities are",
}


def check_send(messages: Sequence[wire.Message]) -> str:
    """Check a send as a whole and return its topic: it has messages, not too many, and all of one topic."""
    if not messages:
        raise Refused(Rule.MESSAGE_CORRUPTED, "no message to send")
    if len(messages) > MESSAGES_PER_SEND_MAX:
        raise Refused(
            Rule.REQUEST, "too many messages in one request", value=len(messages), limit=f"{MESSAGES_PER_SEND_MAX}"
        )
    topic = messages[0].topic
    if len(messages) > 1:
        for message in messages:
            if message.topic != topic:
                both = f"{full_name(topic)}, {full_name(message.topic)}"
                raise Refused(Rule.MESSAGE_CORRUPTED, "topic in message is not same for all of one request", value=both)
    return _topic(full_name(topic))


def check_message(message: wire.Message) -> None:
    """Check one message of a send, except its delivery time."""
    system = message.system_properties
    body_bytes = len(message.body)
    if not body_bytes:
        raise Refused(Rule.BODY_EMPTY, "message body cannot be empty")
    if body_bytes > BODY_BYTES_MAX:
        why = f"message body cannot exceed the max {BODY_BYTES_MAX}"
        raise Refused(Rule.BODY_SIZE, why, value=body_bytes, limit=f"{BODY_BYTES_MAX} bytes")
    properties, tag, keys = message.user_properties, system.tag, system.keys
    if properties or tag or keys:
        _check_properties(properties, tag, "".join(keys))
    if tag:
        _check_text(Rule.TAG, "tag", tag)
        if "|" in tag:
            raise Refused(Rule.TAG, "tag cannot contain '|'", value=tag)
    for key in keys:
        if key:
            _check_text(Rule.KEY, "key", key)
    message_id = system.message_id
    if not (message_id.isalnum() and message_id.isascii()) or len(message_id) > MESSAGE_ID_BYTES_MAX:
        _check_message_id(message_id)
    if system.message_group:
        _check_message_group(system.message_group)
    message_type = system.message_type
    if message_type not in _SERVED_TYPES:
        if message_type in _UNSERVED_TYPES:
            raise Refused(Rule.UNSUPPORTED, f"{_UNSERVED_TYPES[message_type]} not served yet")
        raise Refused(Rule.MESSAGE_TYPE, "the message type is unknown", value=int(message_type))


def check_recurring(message: wire.Message) -> None:
    """Check the message of a schedule like a sent one; only the schedule determines its send time."""
    check_message(message)
    for name in DELAY_PROPERTIES:
        if name in message.user_properties:
            raise Refused(Rule.DELIVERY_TIME, "a schedule has no delivery time", value=name)
    if NOT_AFTER_MS in message.user_properties:
        raise Refused(Rule.DELIVERY_TIME, "a schedule uses DMQ_END instead of this property", value=NOT_AFTER_MS)
    for name in (OWN_KEY, ON_SAME_KEY):
        if name in message.user_properties:
            raise Refused(Rule.PROPERTY_KEY, "a schedule cannot have an own key", value=name)


def check_undelayed(message: wire.Message) -> None:
    """Refuse type DELAY for a message without a delivery time: its producer forgot the time."""
    if message.system_properties.message_type == wire.DELAY:
        raise Refused(Rule.MESSAGE_TYPE, "the message has the type DELAY and no delivery time", value="DELAY")


def _check_properties(properties: Mapping[str, str], tag: str, keys: str) -> None:
    names = values = ""
    if properties:
        if len(properties) > USER_PROPERTIES_MAX:
            why, limit = f"too many user properties, max is {USER_PROPERTIES_MAX}", f"{USER_PROPERTIES_MAX}"
            raise Refused(Rule.PROPERTIES_SIZE, why, value=len(properties), limit=limit)
        names, values = "".join(properties), "".join(properties.values())
    size = _utf8_bytes(names) + _utf8_bytes(values) + _utf8_bytes(tag) + _utf8_bytes(keys)
    if size > PROPERTIES_BYTES_MAX:
        why = f"the total size of user property is too large, max is {PROPERTIES_BYTES_MAX}, tag and keys included"
        raise Refused(Rule.PROPERTIES_SIZE, why, value=size, limit=f"{PROPERTIES_BYTES_MAX} bytes")
    if not RESERVED_PROPERTIES.isdisjoint(properties):
        reserved = sorted(RESERVED_PROPERTIES.intersection(properties))
        raise Refused(Rule.PROPERTY_KEY, f"property is used by system: {reserved[0]}", value=", ".join(reserved))
    if _has_control(names) or _has_control(values):
        name = next(name for name, value in properties.items() if _has_control(name + value))
        part = "key" if _has_control(name) else "value"
        raise Refused(Rule.PROPERTY_KEY, f"the {part} of property cannot contain control character", value=name)
    if OWN_KEY in properties or ON_SAME_KEY in properties:
        check_own_key_of(properties)


def _check_text(rule: Rule, what: str, text: str) -> None:
    """Check a non-empty text: it has visible characters and no control characters."""
    if text.isspace():
        raise Refused(rule, f"{what} cannot be the char sequence of whitespace", value=text)
    if _has_control(text):
        raise Refused(rule, f"{what} cannot contain control character", value=text)


def _check_message_id(text: str) -> None:
    if not text or text.isspace():
        raise Refused(Rule.MESSAGE_ID, "message id cannot be empty", value=text)
    if _utf8_bytes(text) > MESSAGE_ID_BYTES_MAX:
        raise Refused(Rule.MESSAGE_ID, "message id is too long", value=text, limit=f"{MESSAGE_ID_BYTES_MAX} bytes")
    _check_text(Rule.MESSAGE_ID, "message id", text)


def _check_message_group(text: str) -> None:
    if _utf8_bytes(text) > MESSAGE_GROUP_BYTES_MAX:  # RocketMQ counts from the first size that is refused
        why, limit = f"message group exceed the max size {MESSAGE_GROUP_BYTES_MAX + 1}", MESSAGE_GROUP_BYTES_MAX
        raise Refused(Rule.MESSAGE_GROUP, why, value=text, limit=f"{limit} bytes")
    _check_text(Rule.MESSAGE_GROUP, "message group", text)


def _utf8_bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())


def _has_control(text: str) -> bool:
    # A printable text has no control characters; this check is cheaper than the search.
    return not text.isprintable() and _CONTROL.search(text) is not None


def topic_of(resource: wire.Resource) -> str:
    """Return the checked topic name."""
    return _topic(full_name(resource))


def resource_of(resource: wire.Resource) -> wire.Resource:
    """Return a copy of a resource for an answer, without fields that are unknown to the protocol."""
    return wire.Resource(resource_namespace=resource.resource_namespace, name=resource.name)


def endpoints_of(endpoints: wire.Endpoints) -> wire.Endpoints:
    """Return the endpoints that the client dialled, if they are short enough to repeat in an answer."""
    size = endpoints.ByteSize()
    if size > ENDPOINTS_BYTES_MAX:
        raise Refused(Rule.ACCESS_POINT, "the endpoints have too many bytes", value=size, limit=ENDPOINTS_BYTES_MAX)
    return endpoints


def group_of(resource: wire.Resource) -> str:
    """Return the checked name of a consumer group."""
    return _group(full_name(resource))


def subscription_of(request: wire.ReceiveMessageRequest) -> Subscription:
    """Return the subscription of a receive.

    A push consumer receives from the queue of its assignment. The queue id of a simple consumer is ignored, as in
    RocketMQ: it cycles through the queues of the route with one long poll each. It would wait at an empty queue while
    another queue has messages.
    """
    queue_id = max(ANY_QUEUE, request.message_queue.id) if request.auto_renew else ANY_QUEUE
    return _subscription(topic_of(request.message_queue.topic), queue_id, request.filter_expression)


def pulled_queue_of(request: wire.PullMessageRequest) -> Subscription:
    """Return the queue and the filter of a pull."""
    queue = request.message_queue
    return _subscription(topic_of(queue.topic), queue.id, request.filter_expression)


def _subscription(topic: str, queue_id: int, expression: wire.FilterExpression) -> Subscription:
    if expression.type == wire.SQL:
        from dmq.broker.filters import compile_sql  # its parser is slow to load, and rarely needed

        return Subscription(topic, queue_id, sql=compile_sql(expression.expression).text)
    return Subscription(topic, queue_id, tags_of(expression))


def tags_of(expression: wire.FilterExpression) -> frozenset[str]:
    """Return the tags of ``a || b``; the empty set stands for every tag (``*`` or an empty expression)."""
    if expression.type not in {wire.TAG, wire.FILTER_TYPE_UNSPECIFIED}:
        raise Refused(Rule.FILTER, "the filter type is unknown", value=int(expression.type))
    text = expression.expression
    if text.strip(" ") == "*" or not text:
        return frozenset()
    if len(text) > PROPERTIES_BYTES_MAX:
        limit = f"{PROPERTIES_BYTES_MAX} characters"
        raise Refused(Rule.FILTER, "the filter expression is too long", value=len(text), limit=limit)
    tags = frozenset(tag for part in text.split("||") if (tag := part.strip()))
    if not tags:
        raise Refused(Rule.FILTER, "the filter expression contains no tag", value=text)
    for tag in tags:
        if "|" in tag or _has_control(tag):
            raise Refused(Rule.FILTER, "a tag cannot contain | or a control character", value=tag)
    return tags


def batch_of(request: wire.ReceiveMessageRequest | wire.PullMessageRequest) -> int:
    """Return the maximum number of messages to hand out: the requested one, clamped to the protocol's bounds."""
    return min(max(request.batch_size, 1), RECEIVE_BATCH_MAX)


def receive_invisible_ms(request: wire.ReceiveMessageRequest) -> int:
    """Return the invisible duration of a receive without automatic renewal."""
    return _invisible_ms(request.invisible_duration, INVISIBLE_MS_MIN_RECEIVE)


def change_invisible_ms(request: wire.ChangeInvisibleDurationRequest) -> int:
    """Return the new invisible duration in ms; 0 makes the message visible at once."""
    return _invisible_ms(request.invisible_duration, 0)


def _invisible_ms(duration: wire.Duration, ms_min: int) -> int:
    wanted_ms = duration_ms(duration, Rule.INVISIBLE_TIME)
    if ms_min <= wanted_ms <= INVISIBLE_MS_MAX:
        return wanted_ms
    bound = f"small. min is {ms_min}" if wanted_ms < ms_min else f"large. max is {INVISIBLE_MS_MAX}"
    limit = f"{ms_min}..{INVISIBLE_MS_MAX} ms"
    raise Refused(Rule.INVISIBLE_TIME, f"the invisibleTime is too {bound}", value=wanted_ms, limit=limit)


def wait_ms(request: wire.ReceiveMessageRequest | wire.PullMessageRequest, deadline_s: float | None) -> int:
    """Return the maximum wait of a receive in ms, short enough for an answer well before the call's deadline.

    This is more lenient than RocketMQ, which refuses less than 5 s and fails without a deadline: any non-negative wait
    is accepted. As in RocketMQ, half of the clients' request timeout of 3 s remains for the answer.
    """
    wanted_ms = POLLING_MS_MAX
    if request.HasField("long_polling_timeout"):
        wanted_ms = duration_ms(request.long_polling_timeout, Rule.POLLING_TIME)
        if wanted_ms < 0:
            raise Refused(Rule.POLLING_TIME, "the long polling timeout is negative", value=wanted_ms, limit="0 ms")
    if deadline_s is not None:
        remaining_ms = int(deadline_s * 1000)
        # Messages in an answer after the deadline would stay hidden for their whole invisible duration.
        wanted_ms = min(wanted_ms, remaining_ms - max(250, min(1500, remaining_ms // 2)))
    return max(0, min(wanted_ms, POLLING_MS_MAX))


def stored_at_ms(request: wire.QueryOffsetRequest) -> int:
    """Return the time of an offset query, rounded up to whole ms. Any time is valid, also one before 1970."""
    if not request.HasField("timestamp"):
        raise Refused(Rule.REQUEST, "the policy TIMESTAMP needs a timestamp")
    timestamp = request.timestamp
    if not 0 <= timestamp.nanos < 1_000_000_000:
        raise Refused(Rule.REQUEST, "the nanos of the timestamp are out of range", value=timestamp.nanos)
    return timestamp.seconds * 1000 - (-timestamp.nanos // 1_000_000)


def check_entries(entries: Sequence[wire.AckMessageEntry]) -> None:
    """Check that an acknowledgement has entries, and not too many."""
    if not entries:
        raise Refused(Rule.REQUEST, "the request acknowledges nothing")
    if len(entries) > ENTRIES_PER_ACK_MAX:
        raise Refused(Rule.REQUEST, "too many entries in one request", value=len(entries), limit=ENTRIES_PER_ACK_MAX)


def duration_ms(duration: wire.Duration, rule: Rule) -> int:
    """Return any Duration in whole ms, rounded up. Nanos of a second or more are refused with ``rule``."""
    if not -1_000_000_000 < duration.nanos < 1_000_000_000:
        raise Refused(rule, "the nanos of the duration are out of range", value=duration.nanos)
    return duration.seconds * 1000 - (-duration.nanos // 1_000_000)
