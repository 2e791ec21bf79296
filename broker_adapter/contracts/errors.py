"""Errors of the broker side.

    BrokerError
     +- Refused            invalid input, or a call at the wrong time: with the rule, the value and the limit
     +- Overloaded         a limit is reached; nothing was done, and the same call may succeed later
     +- BrokerUnavailable  the broker cannot answer now; it is unknown whether the call took effect
         +- BrokerAway     the broker is away, and nothing was sent
         +- CallGivenUp    this process ends before the call completes

Errors have fields instead of prose: one table maps ``Refused.rule`` to the wire code
(``dmq.rocketmq_server.codec.codes``).
"""

from __future__ import annotations

from enum import StrEnum
from typing import ClassVar

_VALUE_CHARS_MAX = 80


class Rule(StrEnum):
    """Rule that a refused call violates."""

    TOPIC = "illegal topic"
    TOPIC_UNKNOWN = "topic not found"
    GROUP = "illegal consumer group"
    GROUP_UNKNOWN = "consumer group not found"
    TAG = "illegal message tag"
    KEY = "illegal message key"
    MESSAGE_GROUP = "illegal message group"
    PROPERTY_KEY = "illegal message property"
    PROPERTIES_SIZE = "message properties too large"
    MESSAGE_ID = "illegal message id"
    BODY_EMPTY = "message body is empty"
    BODY_SIZE = "message body too large"
    DELIVERY_TIME = "illegal delivery time"
    INVISIBLE_TIME = "illegal invisible duration"
    POLLING_TIME = "illegal polling time"
    FILTER = "illegal filter expression"
    RECEIPT_HANDLE = "receipt handle is expired or invalid"
    TRANSACTION_ID = "invalid transaction id"
    MESSAGE_TYPE = "message properties conflict with the message type"
    MESSAGE_CORRUPTED = "message is corrupted"
    CLIENT_ID = "client id required"
    CLIENT_TYPE = "unrecognized client type"
    ACCESS_POINT = "illegal access point"
    REQUEST = "bad request"
    NOT_FOUND = "not found"
    UNAUTHORIZED = "unauthorized"
    FORBIDDEN = "forbidden"
    OFFSET = "illegal offset"
    OFFSET_UNKNOWN = "offset not found"
    UNSUPPORTED = "not implemented"


# Rules that an unchanged message always violates, regardless of the cluster's configuration.
_OF_THE_MESSAGE = frozenset(
    {
        *(Rule.TOPIC, Rule.TAG, Rule.KEY, Rule.MESSAGE_GROUP, Rule.PROPERTY_KEY, Rule.PROPERTIES_SIZE),
        *(Rule.MESSAGE_ID, Rule.BODY_EMPTY, Rule.BODY_SIZE, Rule.DELIVERY_TIME, Rule.MESSAGE_TYPE),
        Rule.MESSAGE_CORRUPTED,
    }
)


class BrokerError(Exception):
    """Failure between an application and its broker."""

    retriable: ClassVar[bool] = False


class Refused(BrokerError):
    """The call violates a rule; nothing was done, and the same call will be refused again."""

    def __init__(self, rule: Rule, why: str, *, value: object = None, limit: object = None, code: int = 0) -> None:
        super().__init__(rule, why, value, limit, code)
        self.rule = rule
        self.why = why
        self.value = value
        self.limit = limit
        self.code = code  # result code of another broker; 0: refused here

    @property
    def is_of_the_message(self) -> bool:
        """True if the refusal of a send is permanent for an unchanged message.

        A bad request is permanent if another broker reported it with a code of its protocol. From a peer that does not
        speak the protocol it has no meaning.
        """
        return self.rule in _OF_THE_MESSAGE or (self.rule is Rule.REQUEST and self.code > 0)

    def __str__(self) -> str:
        text = f"{self.rule.value}: {self.why}"
        if self.value is not None:
            shown = repr(self.value)
            if len(shown) > _VALUE_CHARS_MAX:
                shown = shown[:_VALUE_CHARS_MAX] + "..."
            text += f", got {shown}"
        if self.limit is not None:
            text += f", limit {self.limit}"
        return text


def topic_unknown(name: str) -> Refused:
    """Return the refusal of a topic that does not exist."""
    return Refused(Rule.TOPIC_UNKNOWN, "there is none of this name", value=name)


def group_unknown(name: str) -> Refused:
    """Return the refusal of a consumer group that does not exist."""
    return Refused(Rule.GROUP_UNKNOWN, "there is none of this name", value=name)


class Overloaded(BrokerError):
    """A limit is reached; nothing was done, and the same call may succeed later."""

    retriable = True

    def __init__(self, what: str, *, limit: object, code: int = 0) -> None:
        super().__init__(what, limit)
        self.what = what
        self.limit = limit
        self.code = code  # result code of another broker; 0: refused here

    def __str__(self) -> str:
        return f"{self.what} (limit {self.limit}); try again later"


class BrokerUnavailable(BrokerError):
    """The broker cannot answer, and the outcome of the call is unknown: repeat it with the same message id."""

    retriable = True

    def __init__(self, why: str = "", *, code: int = 0) -> None:
        super().__init__(why)
        self.code = code  # result code of another broker; 0: no answer


class BrokerAway(BrokerUnavailable):
    """The broker is away, and nothing was sent: the call is not in doubt."""


class CallGivenUp(BrokerUnavailable):
    """The call ended without a result, for example at the shutdown of its process; the broker did not fail."""
