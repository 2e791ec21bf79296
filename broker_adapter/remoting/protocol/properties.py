r"""Properties of a message: their wire format, and the fields of the message model in them. Pure.

Each property is ``name \\x01 value \\x02``. RocketMQ stores its own fields under reserved names.
"""

from __future__ import annotations

from collections.abc import Mapping

from broker_adapter.contracts.errors import Refused, Rule
from broker_adapter.contracts.message import Message

PROPERTIES_BYTES_MAX = 32_767  # the length field is a signed 16-bit number
MESSAGE_ID = "UNIQ_KEY"
RETRY_TOPIC = "RETRY_TOPIC"
PRODUCER_GROUP = "PGROUP"
DELAY_LEVEL, DELIVER_AT_MS = "DELAY", "TIMER_DELIVER_MS"
IS_HALF = "TRAN_MSG"
_KEYS, _TAGS, _MESSAGE_GROUP, _WAIT = "KEYS", "TAGS", "__SHARDINGKEY", "WAIT"
_BORN_HOST, _BORN_AT = "__BORNHOST", "BORN_TIMESTAMP"
_NAME_ENDS, _VALUE_ENDS = "\x01", "\x02"
# Names reserved by RocketMQ.
SYSTEM_PROPERTIES = frozenset(
    {
        *(
            MESSAGE_ID,
            _KEYS,
            _TAGS,
            _MESSAGE_GROUP,
            _BORN_HOST,
            _BORN_AT,
            _WAIT,
            DELAY_LEVEL,
            RETRY_TOPIC,
            "REAL_TOPIC",
        ),
        *("REAL_QID", IS_HALF, PRODUCER_GROUP, "MIN_OFFSET", "MAX_OFFSET", "BUYER_ID", "ORIGIN_MESSAGE_ID"),
        *("TRANSFER_FLAG", "CORRECTION_FLAG", "MQ2_FLAG", "RECONSUME_TIME", "MAX_RECONSUME_TIMES", "MSG_REGION"),
        *("TRACE_ON", "CONSUME_START_TIME", "POP_CK", "POP_CK_OFFSET", "1ST_POP_TIME", "EXTEND_UNIQ_INFO"),
        *("TRAN_PREPARED_QUEUE_OFFSET", "TRANSACTION_CHECK_TIMES", "CHECK_IMMUNITY_TIME_IN_SECONDS", "DUP_INFO"),
        *("__transactionId__", "INSTANCE_ID", "CORRELATION_ID", "REPLY_TO_CLIENT", "TTL", "ARRIVE_TIME"),
        *("PUSH_REPLY_TIME", "CLUSTER", "MSG_TYPE", "INNER_NUM", "INNER_BASE", "INNER_MULTI_DISPATCH"),
        *("INNER_MULTI_QUEUE_OFFSET", "TIMER_DELAY_MS", "TIMER_DELAY_SEC", DELIVER_AT_MS, "TIMER_OUT_MS"),
        *("TIMER_ENQUEUE_MS", "TIMER_DEQUEUE_MS", "TIMER_ROLL_TIMES", "TIMER_DEL_UNIQKEY", "TIMER_DEL_MS"),
        *("__STARTDELIVERTIME", "DLQ_ORIGIN_TOPIC", "DLQ_ORIGIN_MESSAGE_ID", "__CRC32#"),
    }
)


def encode_properties(properties: Mapping[str, str]) -> bytes:
    """Return properties in their wire format.

    ``Refused(PROPERTY_KEY)`` for an empty name or a separator, ``Refused(PROPERTIES_SIZE)`` over 32767 bytes.
    """
    for name, value in properties.items():
        if not name or any(each in name or each in value for each in (_NAME_ENDS, _VALUE_ENDS)):
            why = "a name is not empty, and neither a name nor a value has the characters 1 and 2, which separate them"
            raise Refused(Rule.PROPERTY_KEY, why, value=f"{name}={value}")
    text = "".join(f"{name}{_NAME_ENDS}{value}{_VALUE_ENDS}" for name, value in properties.items())
    try:
        encoded = text.encode()
    except UnicodeEncodeError as error:
        raise Refused(Rule.PROPERTY_KEY, f"incomplete character in a property: {error.reason}") from None
    if len(encoded) > PROPERTIES_BYTES_MAX:
        why = "all properties of a message together, its tag and keys too"
        raise Refused(Rule.PROPERTIES_SIZE, why, value=len(encoded), limit=f"{PROPERTIES_BYTES_MAX} bytes")
    return encoded


def decode_properties(text: bytes) -> dict[str, str]:
    """Decode properties from their wire format; raise ``ValueError`` if the bytes are not UTF-8."""
    pairs = (each.split(_NAME_ENDS, 1) for each in text.decode().split(_VALUE_ENDS) if each)
    return {pair[0]: pair[1] for pair in pairs if len(pair) == 2}


def of_message(message: Message, message_id: str) -> dict[str, str]:
    """Return the properties of a message in RocketMQ's form; ``Refused(PROPERTY_KEY)`` for a reserved name."""
    taken = SYSTEM_PROPERTIES.intersection(message.properties)
    if taken:
        raise Refused(Rule.PROPERTY_KEY, "this name is reserved by RocketMQ", value=min(taken))
    own = {_TAGS: message.tag, _KEYS: " ".join(message.keys), _MESSAGE_GROUP: message.message_group}
    return {
        **message.properties,
        **{name: value for name, value in own.items() if value},
        _WAIT: "true",  # wait for disk and replicas as the broker is configured
        MESSAGE_ID: message_id,
    }


def to_message(
    topic: str, body: bytes, properties: Mapping[str, str], *, message_id: str, born_at_ms: int, born_host: str
) -> Message:
    """Return a message in the message model, without RocketMQ's system properties."""
    return Message(
        topic=topic,
        message_id=message_id,
        body=body,
        tag=properties.get(_TAGS, ""),
        keys=tuple(properties.get(_KEYS, "").split()),
        properties={name: value for name, value in properties.items() if name not in SYSTEM_PROPERTIES},
        message_group=properties.get(_MESSAGE_GROUP, ""),
        born_at_ms=max(0, born_at_ms),
        born_host=properties.get(_BORN_HOST) or born_host,
    )
