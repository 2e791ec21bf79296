"""Errors of the broker side.

    BrokerError
     +- Refused            the caller's input, or its moment, is wrong: says which rule, which value, which limit
     +- Overloaded         a bound is reached; nothing was done, the same call may succeed later
     +- BrokerUnavailable  the broker cannot answer now; whether the call took effect is not known
         +- BrokerAway     it is away, and that was known before anything was sent
         +- CallGivenUp    this process ends, and the call with it

Fields instead of prose: the wire code is chosen from ``Refused.rule`` in one table
(``dmq.rocketmq_server.codec.codes``).
"""

from __future__ import annotations

from enum import StrEnum
from typing import ClassVar

_VALUE_CHARS_MAX = 80


class Rule(StrEnum):
    """Which rule a refused call broke."""

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


# What no operator can mend without touching the message.
_OF_THE_MESSAGE = frozenset(
    {
        *(Rule.TOPIC, Rule.TAG, Rule.KEY, Rule.MESSAGE_GROUP, Rule.PROPERTY_KEY, Rule.PROPERTIES_SIZE),
        *(Rule.MESSAGE_ID, Rule.BODY_EMPTY, Rule.BODY_SIZE, Rule.DELIVERY_TIME, Rule.MESSAGE_TYPE),
        Rule.MESSAGE_CORRUPTED,
    }
)


class BrokerError(Exception):
    """Something between an application and its broker failed."""

    retriable: ClassVar[bool] = False


class Refused(BrokerError):
    """The call breaks a rule; nothing was done, and the same call will be refused again."""

    def __init__(self, rule: Rule, why: str, *, value: object = None, limit: object = None, code: int = 0) -> None:
        super().__init__(rule, why, value, limit, code)
        self.rule = rule
        self.why = why
        self.value = value
        self.limit = limit
        self.code = code  # that another broker gave; 0: it was not another one

    @property
    def is_of_the_message(self) -> bool:
        """Whether the refusal of a send will stay as long as the message is what it is.

        A bad request will, if another broker said so by a code of its protocol; from who does not speak it, it says
        nothing.
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
    """A bound is reached; nothing was done, and the same call may succeed later."""

    retriable = True

    def __init__(self, what: str, *, limit: object, code: int = 0) -> None:
        super().__init__(what, limit)
        self.what = what
        self.limit = limit
        self.code = code  # that another broker gave; 0: it was not another one

    def __str__(self) -> str:
        return f"{self.what} (limit {self.limit}); try again later"


class BrokerUnavailable(BrokerError):
    """The broker cannot answer; whether the call took effect is not known, so repeat it with the same message id."""

    retriable = True

    def __init__(self, why: str = "", *, code: int = 0) -> None:
        super().__init__(why)
        self.code = code  # that another broker gave; 0: there was no answer


class BrokerAway(BrokerUnavailable):
    """The broker is away, and that was known before anything was sent: so nothing is in doubt."""


class CallGivenUp(BrokerUnavailable):
    """The call was given up before its end, as when the process that serves it ends: nobody's fault."""
