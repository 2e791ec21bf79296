"""The one table from the codes of the classic protocol to our errors, and the numbers of its operations."""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from types import MappingProxyType

from broker_adapter.errors import BrokerError, BrokerUnavailable, Overloaded, Refused, Rule
from broker_adapter.remoting.frames import Frame

_TEXT_CHARS_MAX = 300


class Operation(IntEnum):
    """What is asked. Codes of requests."""

    PULL = 11
    UPDATE_TOPIC = 17
    OFFSET_AT = 29
    END_OFFSET = 30
    BEGIN_OFFSET = 31
    ROUTE = 105
    UPDATE_GROUP = 200


class Result(IntEnum):
    """What is answered, where it is no error. Codes of answers."""

    OK = 0
    NOTHING_THERE = 19  # to a pull: at the end of the queue
    NOTHING_MATCHED = 20  # to a pull: go on behind what the filter passed over
    OFFSET_MOVED = 21  # to a pull: its offset lies outside of the queue


_TOO_MANY = frozenset({2, 215})  # busy, flow control
_RULES: Mapping[int, Rule] = MappingProxyType(
    {
        3: Rule.UNSUPPORTED,
        16: Rule.FORBIDDEN,
        17: Rule.TOPIC_UNKNOWN,
        23: Rule.FILTER,
        24: Rule.REQUEST,
        25: Rule.REQUEST,
        26: Rule.GROUP_UNKNOWN,
        22: Rule.OFFSET_UNKNOWN,
        208: Rule.NOT_FOUND,
        604: Rule.REQUEST,
    }
)
_SIGNATURE_TEXTS = ("AclException", "AuthenticationException", "AuthorizationException", "signature")


def error_of(answer: Frame, address: str, operation: int) -> BrokerError:
    """Return the error that an answer stands for."""
    text = " ".join(answer.remark.split())[:_TEXT_CHARS_MAX]
    said = f"{text or 'no reason given'} ({answer.code}, said by {address} to operation {int(operation)})"
    if answer.code in _RULES:
        return Refused(_RULES[answer.code], said, code=answer.code)
    if answer.code in _TOO_MANY:
        return Overloaded(f"the cluster refuses: {said}", limit="its own")
    if any(each in text for each in _SIGNATURE_TEXTS):  # it has no code of its own in 4.x
        return Refused(Rule.UNAUTHORIZED, said, code=answer.code)
    return BrokerUnavailable(f"the cluster failed: {said}")
