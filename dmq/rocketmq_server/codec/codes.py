"""The only table from errors to the protocol's codes."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from broker_adapter.contracts.errors import BrokerUnavailable, Overloaded, Refused, Rule
from broker_adapter.wire import rocketmq_v2 as wire

CODES: Mapping[Rule, wire.Code] = MappingProxyType(
    {
        Rule.TOPIC: wire.ILLEGAL_TOPIC,
        Rule.TOPIC_UNKNOWN: wire.TOPIC_NOT_FOUND,
        Rule.GROUP: wire.ILLEGAL_CONSUMER_GROUP,
        Rule.GROUP_UNKNOWN: wire.CONSUMER_GROUP_NOT_FOUND,
        Rule.TAG: wire.ILLEGAL_MESSAGE_TAG,
        Rule.KEY: wire.ILLEGAL_MESSAGE_KEY,
        Rule.MESSAGE_GROUP: wire.ILLEGAL_MESSAGE_GROUP,
        Rule.PROPERTY_KEY: wire.ILLEGAL_MESSAGE_PROPERTY_KEY,
        Rule.PROPERTIES_SIZE: wire.MESSAGE_PROPERTIES_TOO_LARGE,
        Rule.MESSAGE_ID: wire.ILLEGAL_MESSAGE_ID,
        Rule.BODY_EMPTY: wire.MESSAGE_BODY_EMPTY,
        Rule.BODY_SIZE: wire.MESSAGE_BODY_TOO_LARGE,
        Rule.DELIVERY_TIME: wire.ILLEGAL_DELIVERY_TIME,
        Rule.INVISIBLE_TIME: wire.ILLEGAL_INVISIBLE_TIME,
        Rule.POLLING_TIME: wire.ILLEGAL_POLLING_TIME,
        Rule.FILTER: wire.ILLEGAL_FILTER_EXPRESSION,
        Rule.RECEIPT_HANDLE: wire.INVALID_RECEIPT_HANDLE,
        Rule.TRANSACTION_ID: wire.INVALID_TRANSACTION_ID,
        Rule.MESSAGE_TYPE: wire.MESSAGE_PROPERTY_CONFLICT_WITH_TYPE,
        Rule.MESSAGE_CORRUPTED: wire.MESSAGE_CORRUPTED,
        Rule.CLIENT_ID: wire.CLIENT_ID_REQUIRED,
        Rule.CLIENT_TYPE: wire.UNRECOGNIZED_CLIENT_TYPE,
        Rule.ACCESS_POINT: wire.ILLEGAL_ACCESS_POINT,
        Rule.REQUEST: wire.BAD_REQUEST,
        Rule.NOT_FOUND: wire.MESSAGE_NOT_FOUND,
        Rule.UNAUTHORIZED: wire.UNAUTHORIZED,
        Rule.FORBIDDEN: wire.FORBIDDEN,
        Rule.OFFSET: wire.ILLEGAL_OFFSET,
        Rule.OFFSET_UNKNOWN: wire.OFFSET_NOT_FOUND,
        Rule.UNSUPPORTED: wire.NOT_IMPLEMENTED,
    }
)

# The Rust client 5.0.0 panics on these codes. The text of the substitute status still names the error.
_RUST_PANICS = frozenset(
    {
        wire.ILLEGAL_OFFSET,
        wire.ILLEGAL_LITE_TOPIC,
        wire.INVALID_CLIENT_PROPERTIES,
        wire.OFFSET_NOT_FOUND,
        wire.MESSAGE_BODY_EMPTY,
        wire.LITE_TOPIC_QUOTA_EXCEEDED,
        wire.LITE_SUBSCRIPTION_QUOTA_EXCEEDED,
    }
)

OK_STATUS = wire.Status(code=wire.OK, message="OK")


def status_of(error: Exception, language: str = "") -> wire.Status:
    """Return the protocol's answer to ``error``; an unknown exception becomes an internal error without details.

    ``language`` is the client's ``x-mq-language``. Rust clients never get a code that would make them panic.
    """
    if isinstance(error, Refused):
        code = CODES[error.rule]
        if language == "RUST" and code in _RUST_PANICS:
            code = wire.BAD_REQUEST
        return wire.Status(code=code, message=str(error))
    if isinstance(error, Overloaded):
        return wire.Status(code=wire.TOO_MANY_REQUESTS, message=str(error))
    if isinstance(error, BrokerUnavailable):
        text = f"{error}; whether the call took effect is in doubt: repeat it with the same message id"
        return wire.Status(code=wire.INTERNAL_SERVER_ERROR, message=text)
    return wire.Status(code=wire.INTERNAL_SERVER_ERROR, message="internal error; the server's log has the details")


def common_status(statuses: list[wire.Status]) -> wire.Status:
    """Return the status that all entries share, or MULTIPLE_RESULTS. ``statuses`` is not empty."""
    codes = {status.code for status in statuses}
    if len(codes) == 1:
        return statuses[0]
    return wire.Status(code=wire.MULTIPLE_RESULTS, message="see the status of each entry")
