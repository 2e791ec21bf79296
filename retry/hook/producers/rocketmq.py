"""Messages of the official RocketMQ client (``rocketmq-python-client`` 5.x), which is imported only on first use.

The stored form of a message is a JSON head and the unchanged body, joined by ``codecs.join``. The uid is sent as the
property ``DMQ_UID``, because the client generates a new message id for every attempt.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from broker_adapter.contracts.own_keys import own_key_of
from retry.hook.producers.codecs import Arguments, Encoded, join, split
from retry.hook.verdicts import Permanent, Retry, Throttled, Unreadable, Verdict, hides_attempts, passed
from retry.hook.verdicts import classify as classify_by_default

UID_PROPERTY = "DMQ_UID"
THROTTLED_AFTER_S = 1.0

_VERSION = 1
# Fields restored by one assignment. Keys and properties are collections, the body is stored after the head.
_FIELDS = ("topic", "tag", "message_group", "delivery_timestamp", "priority", "lite_topic")

# Exceptions of the client by class name. Permissions, payment and missing topics are not properties of one message.
# Those errors are retried, so that an expired credential does not move a whole spool to the dead set.
_PERMANENT = frozenset(
    {
        "BadRequestException",
        "IllegalArgumentException",
        "PayloadEmptyException",
        "PayloadTooLargeException",
        "RequestHeaderFieldsTooLargeException",
    }
)
_THROTTLED = frozenset({"TooManyRequestsException", "LiteTopicQuotaExceededException"})
_RETRY = frozenset(
    {
        "ForbiddenException",
        "IllegalStateException",
        "NotFoundException",
        "PaymentRequiredException",
        "UnauthorizedException",
        "UnsupportedException",
    }
)
_SEND_RESULT = "__handle_send_result"  # a function of the client's producer, as named in tracebacks
_RETRY_UNCERTAIN = frozenset({"InternalErrorException", "ProxyTimeoutException"})


# Modules of the producer in published versions: earlier builds used them in the names of kept calls.
PRODUCER_MODULES = ("rocketmq.v5.producer.producer",)


def is_rocketmq(producer: object) -> bool:
    """Return True if ``producer`` is a producer of the official client."""
    return any(_is_of_client(parent) for parent in type(producer).__mro__)


def over_fresh_connections(producer: Any, send: Callable[..., Any]) -> Callable[..., Any]:  # noqa: ANN401 - a class of the client
    """Return a ``send`` for repetitions that first replaces failed connections.

    gRPC increases the wait between two connection attempts up to two minutes, and the client has no setting for it. A
    broker that returns after a long outage would wait for its clients. A new connection is attempted at once.
    """

    def repeat(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - types of send
        _drop_failed_connections(producer)
        return send(*args, **kwargs)

    return repeat


def _drop_failed_connections(producer: Any) -> None:  # noqa: ANN401 - a class of the client
    """Make the client close its failed connections in the same way as idle ones, so that they do not wait before a
    retry.
    """
    with suppress(Exception):  # a client without these attributes keeps its connections; the send reports errors
        client = producer.rpc_client
        failed = [each for each in client.channels.values() if _has_failed(each)]
        for connection in failed:
            connection.update_time = 0  # the time of its last use
        if failed:
            client.clear_idle_rpc_channels()


def _has_failed(connection: Any) -> bool:  # noqa: ANN401 - a class of the client
    state = connection.channel_state(False)  # False: do not connect
    return state is not None and state.name == "TRANSIENT_FAILURE"


def classify(error: BaseException) -> Verdict | None:
    """Return the verdict on an error of the client, ``None`` for an error of another origin.

    The client makes several attempts per send and raises the error of the last one. An earlier attempt that may have
    succeeded makes the whole send uncertain.
    """
    verdict = _verdict(error)
    if verdict is not None and not verdict.is_uncertain and hides_attempts(error, _is_in_doubt):
        verdict.is_uncertain = True
    return verdict


def _verdict(error: BaseException) -> Verdict | None:
    """Return the verdict on the error of one attempt."""
    for parent in type(error).__mro__:
        if not _is_of_client(parent):
            continue
        text, name = f"{parent.__name__}: {error}", parent.__name__
        if name == "IllegalArgumentException" and passed(error, "select_next_queue"):
            return Retry(text)  # also raised without a queue to send to; passes when a broker returns
        if name in _PERMANENT:
            return Permanent(text)
        if name in _THROTTLED:
            return Throttled(text, after_s=THROTTLED_AFTER_S)
        if name in _RETRY:
            return Retry(text)
        if name in _RETRY_UNCERTAIN:
            return Retry(text, is_uncertain=True)
    if type(error) is Exception and _raised_by_client(error):  # no route, or client not running: no class of its own
        return Retry(f"Exception: {error}", is_uncertain=not passed(error, "retrieve_topic_route_data"))
    return classify_by_default(error) if passed(error, _SEND_RESULT) else None


def _is_in_doubt(earlier: BaseException) -> bool:
    verdict = _verdict(earlier)
    return verdict is not None and verdict.is_uncertain


class RocketMqCodec:
    """Codec of ``producer.send(message)``. A transaction cannot be kept: its second half would refer to another
    message.
    """

    def encode(self, uid: bytes, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Encoded:
        message = _only_message(args, kwargs)
        topic, body = message.topic, message.body
        if not topic or not body:
            raise ValueError("the message has no topic or no body")
        message.add_property(UID_PROPERTY, uid.hex())
        head: dict[str, Any] = {"v": _VERSION}
        head |= {name: value for name in _FIELDS if (value := getattr(message, name, None)) is not None}
        head["keys"] = sorted(message.keys)
        head["properties"] = dict(message.properties)
        key = message.message_group or own_key_of(head["properties"])
        return Encoded(payload=join(head, bytes(body)), key=key)

    def decode(self, uid: bytes, payload: bytes) -> Arguments:  # noqa: ARG002 - signature of Codec
        head, body = split(payload, _VERSION)
        message = importlib.import_module("rocketmq").Message()
        try:
            message.body = body
            for name in _FIELDS:
                if name in head:
                    setattr(message, name, head[name])
            for key in head["keys"]:
                message.keys = key  # each assignment adds one key
            for name, value in head["properties"].items():
                message.add_property(name, value)
        except Exception as error:
            raise Unreadable(f"the client does not accept the stored message: {error}") from error
        return Arguments(args=(message,))


def _only_message(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # noqa: ANN401 - a class of the client
    given = dict(kwargs)
    message = args[0] if args else given.pop("message", None)
    transaction = args[1] if len(args) > 1 else given.pop("transaction", None)
    if transaction is not None:
        raise TypeError("a message of a transaction cannot be kept: send it without the hook")
    if message is None or given or len(args) > 2:
        raise TypeError("durable() supports send(message) of this producer")
    return message


def _is_of_client(kind: type) -> bool:
    return kind.__module__.partition(".")[0] == "rocketmq"


def _raised_by_client(error: BaseException) -> bool:
    trace, last = error.__traceback__, ""
    while trace is not None:
        last = str(trace.tb_frame.f_globals.get("__name__", ""))
        trace = trace.tb_next
    return last.partition(".")[0] == "rocketmq"
