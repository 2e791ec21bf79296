"""Access rules of the public protocol: the permissions that each RPC requires, in one table.

A call without a valid signature is answered 40100. A call whose key lacks a permission is answered 40300. Both use the
response type of the RPC. An RPC that is not in the table is refused. Health and reflection need no key.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import aclosing
from types import MappingProxyType
from typing import Any, Final

from broker_adapter.contracts.limits import MESSAGES_PER_SEND_MAX, REQUEST_BYTES_MAX
from broker_adapter.wire import consumer_v1
from broker_adapter.wire import rocketmq_v2 as wire
from broker_adapter.wire.mapping import full_name
from dmq.acl.gate import Entrance
from dmq.acl.guard import Authenticator
from dmq.acl.rules import ADMIN_KEY, ANY, GROUP, PUB, SUB, TOPIC, AccessKey, Need
from dmq.http2 import Admission
from dmq.rocketmq_server.calls.call import Call
from dmq.rocketmq_server.calls.dispatch import Served
from dmq.rocketmq_server.calls.methods import METHODS

HEALTH: Final = "grpc.health.v1.Health"
REFLECTION: Final = "grpc.reflection.v1alpha.ServerReflection"

Needs = Callable[[Any], Iterable[Need]]


def _pub(topic: wire.Resource) -> Need:
    return Need(PUB, TOPIC, full_name(topic))


def _consume(topic: wire.Resource, group: wire.Resource) -> tuple[Need, ...]:
    return Need(SUB, TOPIC, full_name(topic)), Need(SUB, GROUP, full_name(group))


def _of_topic(request: Any) -> Iterable[Need]:  # noqa: ANN401 - requests of several RPCs, here and below
    return (_pub(request.topic),)


def _of_topic_and_group(request: Any) -> Iterable[Need]:  # noqa: ANN401
    return _consume(request.topic, request.group)


def _of_queue_and_group(request: Any) -> Iterable[Need]:  # noqa: ANN401
    return _consume(request.message_queue.topic, request.group)


def _of_report(request: consumer_v1.ReportFailureRequest) -> Iterable[Need]:
    return (Need(SUB, GROUP, request.group),)


def _of_heartbeat(request: wire.HeartbeatRequest) -> Iterable[Need]:
    # A producer's group is ignored. Others need the permission for a group that they name, if only by its namespace.
    if request.client_type == wire.PRODUCER or not full_name(request.group):
        return ()
    return (Need(SUB, GROUP, full_name(request.group)),)


def _of_goodbye(_: wire.NotifyClientTerminationRequest) -> Iterable[Need]:
    """Require nothing: any key may end its own session, also after its rules have changed."""
    return ()


def _of_route(request: wire.QueryRouteRequest) -> Iterable[Need]:
    return (Need(f"{PUB}|{SUB}", TOPIC, full_name(request.topic)),)


def _of_messages(request: wire.SendMessageRequest) -> Iterable[Need]:
    return {_pub(message.topic) for message in request.messages[: MESSAGES_PER_SEND_MAX + 1]}  # more are refused


def _of_queue(request: wire.QueryOffsetRequest) -> Iterable[Need]:
    return (Need(SUB, TOPIC, full_name(request.message_queue.topic)),)


def _of_command(command: wire.TelemetryCommand) -> Iterable[Need]:
    """Return the permissions for a telemetry frame in either direction; frames of the server may contain a message."""
    match command.WhichOneof("command"):
        case "settings":
            settings = command.settings
            needs = [_pub(topic) for topic in settings.publishing.topics]
            if settings.HasField("subscription"):
                subscription = settings.subscription
                needs.append(Need(SUB, GROUP, full_name(subscription.group)))
                needs += [Need(SUB, TOPIC, full_name(entry.topic)) for entry in subscription.subscriptions]
            return needs
        case "recover_orphaned_transaction_command":
            return (_pub(command.recover_orphaned_transaction_command.message.topic),)
        case "verify_message_command":
            return (Need(SUB, TOPIC, full_name(command.verify_message_command.message.topic)),)
        case _:
            return ()


def _unlisted(_: object) -> Iterable[Need]:
    return (ADMIN_KEY,)


NEEDS: Mapping[str, Needs] = MappingProxyType(
    {
        "QueryRoute": _of_route,
        "Telemetry": _of_command,
        "Heartbeat": _of_heartbeat,
        "NotifyClientTermination": _of_goodbye,
        "SendMessage": _of_messages,
        "RecallMessage": _of_topic,
        "EndTransaction": _of_topic,
        "QueryAssignment": _of_topic_and_group,
        "ReceiveMessage": _of_queue_and_group,
        "AckMessage": _of_topic_and_group,
        "ChangeInvisibleDuration": _of_topic_and_group,
        "ForwardMessageToDeadLetterQueue": _of_topic_and_group,
        "PullMessage": _of_queue_and_group,
        "GetOffset": _of_queue_and_group,
        "UpdateOffset": _of_queue_and_group,
        "QueryOffset": _of_queue,
        "SyncLiteSubscription": _of_topic_and_group,
        "ReportFailure": _of_report,
    }
)


_SEND = (Need(PUB, TOPIC, ANY),)
_READ = (Need(SUB, TOPIC, ANY), Need(SUB, GROUP, ANY))
# Permissions that a key needs on at least one resource, checked from the headers alone. An empty tuple admits any
# key: a connected client that has lost its rules still reports settings and announces its termination.
AT_ALL: Mapping[str, tuple[Need, ...]] = MappingProxyType(
    {
        "QueryRoute": (Need(f"{PUB}|{SUB}", TOPIC, ANY),),
        "Telemetry": (),
        "Heartbeat": (),
        "NotifyClientTermination": (),
        "SendMessage": _SEND,
        "RecallMessage": _SEND,
        "EndTransaction": _SEND,
        "QueryAssignment": _READ,
        "ReceiveMessage": _READ,
        "AckMessage": _READ,
        "ChangeInvisibleDuration": _READ,
        "ForwardMessageToDeadLetterQueue": _READ,
        "PullMessage": _READ,
        "GetOffset": _READ,
        "UpdateOffset": _READ,
        "QueryOffset": (Need(SUB, TOPIC, ANY),),
        "SyncLiteSubscription": _READ,
        "ReportFailure": (Need(SUB, GROUP, ANY),),
    }
)
# Request size limits. A send may contain 1,024 messages; a client's stack trace covers many threads.
_REQUEST_MAX: Mapping[str, int] = MappingProxyType(
    {"SendMessage": REQUEST_BYTES_MAX, "Telemetry": 4 * 1024 * 1024, "ReportFailure": 16 * 1024}
)
_REQUEST_MAX_OTHERS: Final = 1024 * 1024
_REQUEST_MAX_WITHOUT_KEY: Final = 16 * 1024


def all_entrances(others: Mapping[str, Entrance]) -> dict[str, Entrance]:
    """Return the header checks of each RPC by path: the public protocol, health, reflection, and ``others``."""
    messaging = {
        method.path: Entrance(rpc=rpc, request_max=_REQUEST_MAX.get(rpc, _REQUEST_MAX_OTHERS), lacks=_lacking(rpc))
        for rpc, method in METHODS.items()
    }
    watch = Entrance(rpc="Watch", request_max=_REQUEST_MAX_WITHOUT_KEY)
    return {
        **messaging,
        f"/{HEALTH}/Check": Entrance(rpc="Check", request_max=_REQUEST_MAX_WITHOUT_KEY, is_operators=True),
        f"/{HEALTH}/Watch": watch,
        f"/{REFLECTION}/ServerReflectionInfo": watch,
        **others,
    }


def _lacking(rpc: str) -> Callable[[AccessKey], Need | None]:
    needs = AT_ALL.get(rpc, (ADMIN_KEY,))
    return lambda key: key.lacks(*needs)


class Guarded:
    """A service whose calls are authorized by a guard first.

    A client id is scoped to its access key. Another key that sends the same id can neither take over nor end the
    session.
    """

    def __init__(self, service: Served, guard: Authenticator) -> None:
        self._service = service
        self._guard = guard
        self.unary: Mapping[str, Callable[[Any, Call], Awaitable[Any]]] = {
            rpc: self._admitting(rpc, serve) for rpc, serve in service.unary.items()
        }
        self.streaming: Mapping[str, Callable[[Any, Call], Awaitable[Iterator[Any]]]] = {
            rpc: self._admitting(rpc, serve) for rpc, serve in service.streaming.items()
        }

    async def telemetry(
        self, requests: AsyncIterator[wire.TelemetryCommand], call: Call
    ) -> AsyncGenerator[wire.TelemetryCommand, None]:
        """Serve a stream while its key is valid. Check each frame, in both directions, against the current rules."""
        key = self._key_of("Telemetry", call)
        _within(key, call)

        async def checked() -> AsyncIterator[wire.TelemetryCommand]:
            async for frame in requests:
                self._guard.recheck("Telemetry", key, _of_command(frame))
                yield frame

        async with aclosing(self._service.telemetry(checked(), call)) as frames:
            async for frame in frames:
                self._guard.recheck("Telemetry", key, _of_command(frame))
                yield frame

    def _key_of(self, rpc: str, call: Call) -> AccessKey:
        admission = call.admission
        if admission is None:  # its transport does not check headers
            return self._guard.admit(rpc, call.header, ())
        assert isinstance(admission.credential, AccessKey)
        return admission.credential

    def _admitting(self, rpc: str, serve: Callable[[Any, Call], Any]) -> Callable[[Any, Call], Any]:
        needs, admit, check = NEEDS.get(rpc, _unlisted), self._guard.admit, self._guard.check

        def serve_if_admitted(request: Any, call: Call) -> Any:  # noqa: ANN401 - the result of `serve`
            admission = call.admission
            if admission is None:
                key = admit(rpc, call.header, needs(request))
            else:
                key = self._key_of(rpc, call)
                check(rpc, key, needs(request))
            _within(key, call)
            return serve(request, call)

        return serve_if_admitted


def _within(key: AccessKey, call: Call) -> None:
    if call.admission is None:
        call.admission = Admission(address="", key=key.name, credential=key)
    call.client_id = f"{key.name}/{call.client_id}"
