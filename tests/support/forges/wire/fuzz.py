"""Requests that nobody sends: good ones of every RPC, with fields or bytes of them changed, from a seeded source."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message
from support.clients.wire.client import WireClient, a_message, a_receive

from broker_adapter.wire import rocketmq_v2 as wire

TOPIC, GROUP = "fuzzed", "fuzzers"
LANGUAGES = ("JAVA", "PYTHON", "RUST", "HTTP", "GO", "", "\u00fc" * 5, "x" * 5000)
_TEXTS = (
    *(
        "",
        " ",
        "\0",
        "\u202e\u2602",
        "%RETRY%x",
        "%DLQ%fuzzers",
        "a|b",
        "../..",
        "-1",
        "9" * 30,
        "*",
        "||",
        "\n",
        "a > 1",
    ),
    *("x" * 300, "\u00e9" * 20_000, "(" * 3000, "a = 1 OR " * 500 + "a = 1", "TRUE", "SCHEDULE_TOPIC_XXXX"),
    *(TOPIC, GROUP),
)
_NUMBERS = (
    *(0, 1, -1, 2, 7, 33, 2**31 - 1, -(2**31), 2**32 - 1, 2**63 - 1, -(2**63)),
    *(253_402_300_799, 253_402_300_800, -62_135_596_801, 999_999_999, 1_000_000_000, 3600, 43_201, 315_576_000_001),
)
_TOLD = ("receipt_handle", "recall_handle", "transaction_id")
_COPIED_BYTES_MAX = 4 * 1024 * 1024  # well below what a request may have
_COPIES = (2, 3, 33, 130, 1025, 3000)


class Request(NamedTuple):
    """One call: its bytes, and who makes it."""

    rpc: str
    body: bytes
    client_id: str
    language: str


class Fuzzer:
    """Makes requests from good ones that a daemon answered, so that handles and ids in them mean something."""

    def __init__(self, seed: int, client: WireClient) -> None:
        self._dice = random.Random(seed)
        self._good = {rpc: [request.SerializeToString() for request in made] for rpc, made in _good(client).items()}
        # What answers told, by the name of the field of a later request that says it again.
        self._told: dict[str, deque[str]] = {name: deque(maxlen=100) for name in _TOLD}
        self._sends = 0
        self._named: set[frozenset[str]] = set()
        self._is_settled = False
        # Mostly what has much to check and keeps something.
        self._rpcs = [*self._good, *["SendMessage"] * 6, *["ReceiveMessage", "Telemetry"] * 2]

    def settle(self) -> None:
        """Make no more requests that name topics and groups in a new combination: each is a little state for good."""
        self._is_settled = True

    def request(self) -> Request:
        """Return the next one."""
        while True:
            made = self._make()
            names = _names(made)
            if not self._is_settled:
                self._named.add(names)
            if names in self._named:
                return made

    def _make(self) -> Request:
        dice = self._dice
        rpc = dice.choice(self._rpcs)
        good = self._fresh(rpc, dice.choice(self._good[rpc]))
        kind = dice.random()
        if kind < 0.7:
            body = self._changed(rpc, good)
        elif kind < 0.9:
            body = self._damaged(good)
        else:
            body = good
        client_id = f"fuzz-{dice.randrange(40)}" if dice.random() < 0.98 else dice.choice(("", "x" * 600, "\u00e9"))
        return Request(rpc, body, client_id, dice.choice(LANGUAGES))

    def learn(self, answers: Sequence[Any]) -> None:
        """Take handles and ids out of answers, for later requests."""
        for answer in answers:
            for entry in getattr(answer, "entries", ()):
                for name in ("recall_handle", "transaction_id"):
                    if getattr(entry, name, "") not in {"", entry.message_id}:
                        self._told[name].append(getattr(entry, name))
            if isinstance(answer, wire.ReceiveMessageResponse) and answer.HasField("message"):
                self._told["receipt_handle"].append(answer.message.system_properties.receipt_handle)

    def _fresh(self, rpc: str, good: bytes) -> bytes:
        """Give messages new ids, and let what names a message name a newer one."""
        dice = self._dice
        request: Any = wire.METHODS[rpc].request_class.FromString(good)
        if dice.random() < 0.3:
            return good
        if rpc == "SendMessage":
            for message in request.messages:
                self._sends += 1
                message.system_properties.message_id = f"id-{self._sends}"
        for target in (request, *getattr(request, "entries", ())):
            for name, told in self._told.items():
                if told and name in target.DESCRIPTOR.fields_by_name:
                    setattr(target, name, dice.choice(told))
        return bytes(request.SerializeToString())

    def _damaged(self, good: bytes) -> bytes:
        """Flip, cut, insert, repeat; put bytes that are no UTF-8 into a text; or make all of it up."""
        dice = self._dice
        if dice.random() < 0.1:
            return dice.randbytes(dice.randint(0, 300))
        damaged = bytearray(good)
        for _ in range(dice.choice((1, 1, 2, 8))):
            at = dice.randrange(len(damaged) + 1)
            match dice.randrange(6):
                case 0 if at < len(damaged):
                    damaged[at] ^= 1 << dice.randrange(8)
                case 1 if at < len(damaged):
                    damaged[at] = dice.choice((0, 1, 0x7F, 0x80, 0xFF))
                case 2:
                    del damaged[at : at + dice.randint(1, 20)]
                case 3:
                    damaged[at:at] = dice.randbytes(dice.randint(1, 20))
                case 4:
                    text = dice.choice((TOPIC, GROUP)).encode()
                    damaged = bytearray(
                        bytes(damaged).replace(text, b"\xff\xc0\xed\xa0\x80"[: len(text)].ljust(len(text)), 1)
                    )
                case _:
                    damaged[at:at] = damaged[at : at + 40]
        return bytes(damaged)

    def _changed(self, rpc: str, good: bytes) -> bytes:
        request = wire.METHODS[rpc].request_class.FromString(good)
        for _ in range(self._dice.choice((1, 1, 1, 2, 5))):
            self._change(request)
        return bytes(request.SerializeToString())

    def _change(self, target: Any) -> None:  # noqa: ANN401 - any message
        """Change one field somewhere below."""
        dice = self._dice
        while target.DESCRIPTOR.fields:
            field = dice.choice(target.DESCRIPTOR.fields)
            if field.is_repeated:
                items = getattr(target, field.name)
                if field.message_type is not None and not _is_map(field) and items and dice.random() < 0.8:
                    target = dice.choice(items)
                    continue
                self._change_items(items, field)
                return
            if dice.random() < 0.1:
                target.ClearField(field.name)
                return
            if field.message_type is None:
                self._set(target, field)
                return
            target = getattr(target, field.name)
            target.SetInParent()

    def _change_items(self, items: Any, field: FieldDescriptor) -> None:  # noqa: ANN401 - any repeated field
        """Change a list or map as such: empty it, or make it longer, now and then by very much."""
        dice = self._dice
        if dice.random() < 0.2:
            items.clear()
        elif _is_map(field):
            many = dice.choice((1, 1, 1, 130))
            for number in range(many):
                items[dice.choice(_TEXTS) + str(number) * (many > 1)] = dice.choice(_TEXTS)
        elif field.message_type is not None:
            item = items[0] if items else items.add()
            copies = dice.choice(_COPIES) if dice.random() < 0.1 else 1
            items.extend([item] * min(copies, _COPIED_BYTES_MAX // (item.ByteSize() + 1)))
        elif field.type == field.TYPE_STRING:
            items.extend([dice.choice(_TEXTS)] * dice.choice((1, 1, 50)))
        else:
            items.append(dice.choice((0, 1, 2**31 - 1, -1)))

    def _set(self, target: Message, field: FieldDescriptor) -> None:
        dice = self._dice
        with suppress(ValueError):  # the number is out of the field's range: the next one may not be
            match field.type:
                case field.TYPE_STRING:
                    setattr(target, field.name, dice.choice(_TEXTS))
                case field.TYPE_BYTES:
                    size = dice.choice((0, 1, 50, 5000)) if dice.random() < 0.99 else 4 * 1024 * 1024 + 1
                    setattr(target, field.name, bytes(size))
                case field.TYPE_BOOL:
                    setattr(target, field.name, dice.random() < 0.5)
                case field.TYPE_FLOAT | field.TYPE_DOUBLE:
                    setattr(target, field.name, dice.choice((0.0, -1.0, 1e308, float("inf"), float("nan"))))
                case _:
                    setattr(target, field.name, dice.choice(_NUMBERS))


def _names(request: Request) -> frozenset[str]:
    """Every topic and group that a request names; none if it cannot be read."""
    try:
        found = wire.METHODS[request.rpc].request_class.FromString(request.body)
    except DecodeError:
        return frozenset()
    return frozenset(_names_in(found))


def _names_in(message: Message) -> Iterator[str]:
    if isinstance(message, wire.Resource):
        yield f"{message.resource_namespace}%{message.name}"
    for field, value in message.ListFields():
        if field.message_type is not None and not _is_map(field):
            for item in value if field.is_repeated else (value,):
                yield from _names_in(item)


def _is_map(field: FieldDescriptor) -> bool:
    return field.message_type is not None and field.message_type.GetOptions().map_entry


def _good(client: WireClient) -> dict[str, list[Message]]:
    """Good requests of every RPC; those that name a message name one that is there."""
    topic, group = wire.Resource(name=TOPIC), wire.Resource(name=GROUP)
    plain = a_message(TOPIC, "plain", b"b" * 60, tag="tag", properties={"key": "v\u00e4lue"})
    plain.system_properties.keys.append("key-1")
    later = a_message(TOPIC, "0102FC0000000152250B1310EC00000001", deliver_at_ms=4_000_000_000_123)
    soon = a_message(TOPIC, "soon", properties={"TIMER_DELAY_MS": "5"})
    ordered = a_message(TOPIC, "ordered", message_group="group")
    half = a_message(TOPIC, "half")
    half.system_properties.message_type = wire.TRANSACTION
    half.system_properties.orphaned_transaction_recovery_duration.seconds = 60
    sent = {message.system_properties.message_id: client.send(message) for message in (plain, later, ordered, half)}
    (delivery, *_) = client.receive(TOPIC, GROUP, wait_s=5, invisible_s=3600)
    handle, message_id = delivery.receipt_handle, delivery.message_id
    named: dict[str, Any] = {"topic": topic, "group": group, "receipt_handle": handle, "message_id": message_id}
    push = a_receive(TOPIC, GROUP, wait_s=0.05)
    push.auto_renew = True
    sql = a_receive(TOPIC, GROUP, tags="key = 'x' AND n BETWEEN 1 AND 5 OR tag IS NULL")
    sql.filter_expression.type = wire.SQL
    known: dict[str, list[Message]] = {
        "SendMessage": [
            *(wire.SendMessageRequest(messages=[message]) for message in (plain, later, soon, ordered, half)),
            wire.SendMessageRequest(messages=[plain, soon, later]),
        ],
        "ReceiveMessage": [a_receive(TOPIC, GROUP, wait_s=0.05), push, sql],
        "AckMessage": [
            wire.AckMessageRequest(
                topic=topic, group=group, entries=[wire.AckMessageEntry(message_id=message_id, receipt_handle=handle)]
            )
        ],
        "ChangeInvisibleDuration": [
            wire.ChangeInvisibleDurationRequest(**named, invisible_duration=wire.Duration(seconds=10))
        ],
        "ForwardMessageToDeadLetterQueue": [
            wire.ForwardMessageToDeadLetterQueueRequest(**named, delivery_attempt=1, max_delivery_attempts=17)
        ],
        "RecallMessage": [
            wire.RecallMessageRequest(
                topic=topic, recall_handle=sent[later.system_properties.message_id].entries[0].recall_handle
            )
        ],
        "EndTransaction": [
            wire.EndTransactionRequest(
                topic=topic,
                message_id="half",
                transaction_id=sent["half"].entries[0].transaction_id,
                resolution=resolution,
            )
            for resolution in (wire.COMMIT, wire.ROLLBACK)
        ],
        **_about_clients(),
    }
    for name, method in wire.METHODS.items():
        if name not in known:  # what it is made of, each named after its kind
            request: Any = method.request_class()
            for field in request.DESCRIPTOR.fields:
                values = {"group": group, "topic": topic, "message_queue": wire.MessageQueue(topic=topic, id=1)}
                if field.name in values:
                    getattr(request, field.name).CopyFrom(values[field.name])
            known[name] = [request]
    return known


def _about_clients() -> dict[str, list[Message]]:
    """What a client says of itself, and asks for before it does anything."""
    topic, group = wire.Resource(name=TOPIC), wire.Resource(name=GROUP)
    settings = wire.Settings(client_type=wire.PUSH_CONSUMER, subscription=wire.Subscription(group=group))
    settings.subscription.subscriptions.add(topic=topic).expression.expression = "*"
    publishing = wire.Settings(client_type=wire.PRODUCER, publishing=wire.Publishing(topics=[topic]))
    return {
        "QueryRoute": [wire.QueryRouteRequest(topic=topic, endpoints=_endpoints())],
        "QueryAssignment": [wire.QueryAssignmentRequest(topic=topic, group=group, endpoints=_endpoints())],
        "Heartbeat": [
            wire.HeartbeatRequest(group=group, client_type=kind)
            for kind in (wire.PUSH_CONSUMER, wire.SIMPLE_CONSUMER, wire.PRODUCER)
        ],
        "NotifyClientTermination": [wire.NotifyClientTerminationRequest(group=group)],
        "Telemetry": [
            wire.TelemetryCommand(settings=settings),
            wire.TelemetryCommand(settings=publishing),
            wire.TelemetryCommand(thread_stack_trace=wire.ThreadStackTrace(nonce="n", thread_stack_trace="main")),
            wire.TelemetryCommand(verify_message_result=wire.VerifyMessageResult(nonce="n")),
        ],
    }


def _endpoints() -> wire.Endpoints:
    return wire.Endpoints(scheme=wire.IPv4, addresses=[wire.Address(host="127.0.0.1", port=8081)])
