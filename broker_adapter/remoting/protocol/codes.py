"""Operation and result codes of the classic protocol, and the one table that maps result codes to our errors."""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from types import MappingProxyType

from broker_adapter.contracts.errors import BrokerError, BrokerUnavailable, Overloaded, Refused, Rule
from broker_adapter.remoting.protocol.frames import RemotingFrame

_TEXT_CHARS_MAX = 300


class Operation(IntEnum):
    """Operation codes of requests."""

    PULL = 11
    MESSAGES_BY_KEY = 12
    COMMITTED_OFFSET = 14
    COMMIT_OFFSET = 15
    UPDATE_TOPIC = 17
    BROKER_FACTS = 28
    OFFSET_AT = 29
    END_OFFSET = 30
    BEGIN_OFFSET = 31
    MESSAGE_BY_ID = 33
    HEARTBEAT = 34
    LEAVE = 35
    SEND_BACK = 36
    END_TRANSACTION = 37
    MEMBERS = 38
    CHECK_TRANSACTION = 39  # sent by a broker
    MEMBERS_CHANGED = 40  # sent by a broker
    LOCK = 41
    UNLOCK = 42
    CHECK_FILTER = 46
    ROUTE = 105
    CLUSTER = 106
    UPDATE_GROUP = 200
    GROUPS = 201
    TOPIC_STATS = 202
    CONSUMER_CONNECTIONS = 203
    TOPICS = 206
    DELETE_GROUP = 207
    CONSUME_STATS = 208
    DELETE_TOPIC = 215
    FORGET_TOPIC = 216  # sent to a name server
    RESET_OFFSETS_HERE = 220  # sent by a broker
    RESET_OFFSETS = 222
    RUNNING_INFO = 307  # about a member: a broker relays the request to it
    SEND = 310
    SEND_BATCH = 320
    RECALL = 370


class Result(IntEnum):
    """Result codes of answers that are no errors or need special handling."""

    OK = 0
    FAILED = 1
    UNSUPPORTED = 3
    FLUSH_TIMEOUT = 10  # this and the next two to a send: stored
    NO_REPLICA = 11
    REPLICA_TIMEOUT = 12
    FORBIDDEN = 16
    TOPIC_UNKNOWN = 17
    NOTHING_THERE = 19  # to a pull: at the end of the queue
    NOTHING_MATCHED = 20  # to a pull: continue after the messages that the filter skipped
    OFFSET_MOVED = 21  # to a pull: its offset is outside the range of the queue
    NOT_FOUND = 22  # to a request for a committed offset, or for a message by key
    NOBODY_ONLINE = 206
    ILLEGAL = 604
    GO_AWAY = 1500  # the peer is shutting down: reconnect


_TOO_MANY = frozenset({2, 209, 215})  # busy, too many long polls, flow control
_RULES: Mapping[int, Rule] = MappingProxyType(
    {
        3: Rule.UNSUPPORTED,
        13: Rule.MESSAGE_CORRUPTED,
        16: Rule.FORBIDDEN,
        17: Rule.TOPIC_UNKNOWN,
        22: Rule.OFFSET_UNKNOWN,
        23: Rule.FILTER,
        24: Rule.REQUEST,
        25: Rule.REQUEST,
        26: Rule.GROUP_UNKNOWN,
        27: Rule.FILTER,  # the filter of a heartbeat does not compile
        29: Rule.REQUEST,
        206: Rule.NOT_FOUND,
        208: Rule.NOT_FOUND,
        604: Rule.REQUEST,
    }
)
_SIGNATURE_TEXTS = ("AclException", "AuthenticationException", "AuthorizationException", "signature")
_NO_SQL_TEXT = "does not support consumer to filter"


def error_of(answer: RemotingFrame, address: str, operation: int) -> BrokerError:
    """Return the error for an answer; its ``code`` is the result code."""
    code, text = answer.code, " ".join(answer.remark.split())[:_TEXT_CHARS_MAX]
    said = f"{text or 'no reason given'} ({code}, from {address} for operation {int(operation)})"
    if code in _RULES:
        return Refused(_RULES[code], said, code=code)
    if code in _TOO_MANY:
        return Overloaded(f"the cluster refuses: {said}", limit="its own", code=code)
    if any(each in text for each in _SIGNATURE_TEXTS):  # 4.x has no distinct code for it
        return Refused(Rule.UNAUTHORIZED, said, code=code)
    if _NO_SQL_TEXT in text:
        return Refused(Rule.UNSUPPORTED, said, code=code)
    return BrokerUnavailable(f"the cluster failed: {said}", code=code)
