"""One send: attempt it, keep the message in the sink, or reject it.

Imports: destinations, verdicts and the runtime. Interface: handlers and the counts of their types, both drivers of a
send, calls of the sink with a time limit, reports of results to the sink, uids.
"""

from __future__ import annotations

from retry.hook.sending.async_sender import AsyncSender
from retry.hook.sending.handlers import (
    MODES,
    WORKERS_MAX,
    Attempt,
    Handler,
    HandlerExists,
    HandlerFunction,
    Mode,
    UnknownType,
    check_type_name,
    is_async,
    receipt_of,
    takes_attempt,
)
from retry.hook.sending.sender import FORKED, Call, OutgoingMessage, Sender, make_message
from retry.hook.sending.settlement import STEPS_S, Settler, SinkHealth
from retry.hook.sending.sink_calls import CallPatience, SinkCalls
from retry.hook.sending.tally import HookTally
from retry.hook.sending.uid import make_uid

__all__ = [
    "FORKED",
    "MODES",
    "STEPS_S",
    "WORKERS_MAX",
    "AsyncSender",
    "Attempt",
    "Call",
    "CallPatience",
    "Handler",
    "HandlerExists",
    "HandlerFunction",
    "HookTally",
    "Mode",
    "OutgoingMessage",
    "Sender",
    "Settler",
    "SinkCalls",
    "SinkHealth",
    "UnknownType",
    "check_type_name",
    "is_async",
    "make_message",
    "make_uid",
    "receipt_of",
    "takes_attempt",
]
