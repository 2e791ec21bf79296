"""Names of topics and consumer groups, by the rules of Apache RocketMQ 4.9 and 5.x."""

from __future__ import annotations

import re
import struct

from broker_adapter.contracts.errors import Refused, Rule
from broker_adapter.contracts.limits import DERIVED_NAME_CHARS_MAX, GROUP_CHARS_MAX, TOPIC_CHARS_MAX

RETRY_PREFIX = "%RETRY%"
DEAD_LETTER_PREFIX = "%DLQ%"

_NAME = re.compile(r"[%|a-zA-Z0-9_-]+")
_ALLOWED = "^[%|a-zA-Z0-9_-]+$"  # RocketMQ's wording: programs match the text of refusals
_SHOWN_CHARS_MAX = 255

# System topics of RocketMQ; writes of clients would bypass delays and transactions.
_SYSTEM_TOPICS = frozenset(
    {
        "SCHEDULE_TOPIC_XXXX",
        "TBW102",
        "BenchmarkTest",
        "OFFSET_MOVED_EVENT",
        "SELF_TEST_TOPIC",
        "RMQ_SYS_TRANS_HALF_TOPIC",
        "RMQ_SYS_TRANS_OP_HALF_TOPIC",
        "TRANS_CHECK_MAX_TIME_TOPIC",
    }
)
_SYSTEM_PREFIXES = ("rmq_sys_", "RMQ_SYS_", "CID_RMQ_SYS_")


def check_topic(name: str) -> str:
    """Return ``name`` if a client may send to it and consume it; raise ``Refused(Rule.TOPIC)`` otherwise."""
    if not name or name.isspace():
        raise Refused(Rule.TOPIC, "The specified topic is blank", value=name)
    derived = name.startswith((RETRY_PREFIX, DEAD_LETTER_PREFIX))
    chars_max = DERIVED_NAME_CHARS_MAX if derived else TOPIC_CHARS_MAX
    if len(name) > chars_max:
        why = f"The specified topic is longer than topic max length {chars_max}."
        raise Refused(Rule.TOPIC, why, value=name, limit=f"{chars_max} characters")
    if _NAME.fullmatch(name) is None:
        shown = name[:_SHOWN_CHARS_MAX]
        why = f"The specified topic[{shown}] contains illegal characters, allowing only {_ALLOWED}"
        raise Refused(Rule.TOPIC, why, value=name)
    if name in _SYSTEM_TOPICS or name.startswith(_SYSTEM_PREFIXES):
        raise Refused(Rule.TOPIC, "cannot access system topic", value=name)
    return name


def check_group(name: str) -> str:
    """Return ``name`` if it is a valid consumer group; raise ``Refused(Rule.GROUP)`` otherwise."""
    if not name or name.isspace():
        raise Refused(Rule.GROUP, "the specified group is blank", value=name)
    if len(name) > GROUP_CHARS_MAX:
        why = f"the specified group[{name[:_SHOWN_CHARS_MAX]}] is longer than group max length: {GROUP_CHARS_MAX}."
        raise Refused(Rule.GROUP, why, value=name, limit=f"{GROUP_CHARS_MAX} characters")
    if _NAME.fullmatch(name) is None:
        shown = name[:_SHOWN_CHARS_MAX]
        why = f"the specified group[{shown}] contains illegal characters, allowing only {_ALLOWED}"
        raise Refused(Rule.GROUP, why, value=name)
    if name.startswith("CID_RMQ_SYS_"):
        raise Refused(Rule.GROUP, "cannot use system consumer group", value=name)
    return name


def retry_topic(group: str) -> str:
    """Return the topic of a group's retries."""
    return RETRY_PREFIX + group


def dead_letter_topic(group: str) -> str:
    """Return the topic of a group's dead letters."""
    return DEAD_LETTER_PREFIX + group


def java_hash_code(text: str) -> int:
    """Return the value of Java's ``String.hashCode``, from -2**31 to 2**31 - 1; must never change."""
    code = 0
    units = text.encode("utf-16-be", "surrogatepass")
    for unit in struct.unpack(f">{len(units) // 2}H", units):
        code = (31 * code + unit) & 0xFFFFFFFF
    return code - (code >> 31 << 32)


def queue_of_message_group(message_group: str, queues: int) -> int:
    """Return the queue of a FIFO message group: its hash code without the sign, modulo ``queues``.

    The result must never change.
    """
    return (java_hash_code(message_group) & 0x7FFFFFFF) % queues
