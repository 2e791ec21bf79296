"""Transactions: half messages, their resolution, and checks sent to producers.

Refused as in RocketMQ: a message group (40014), a recovery duration over one hour (40000), an invalid transaction id
(40008). A half message may be delayed, which the real server does not support. A delay level and a relative delay start
at the commit. A delivery timestamp is unchanged.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import structlog
from google.protobuf.message import DecodeError

from broker_adapter.contracts.errors import Refused, Rule
from broker_adapter.contracts.message import Envelope
from broker_adapter.contracts.schedules import makes_schedule
from broker_adapter.contracts.transactions import Check, Half, HalfReceipt, TransactionalBroker
from broker_adapter.wire import rocketmq_v2 as wire
from broker_adapter.wire.mapping import full_name, with_wishes
from dmq.acl.gate import holders_of
from dmq.acl.quotas import Quota, Quotas
from dmq.rocketmq_server.calls.call import Call
from dmq.rocketmq_server.codec import mapping, validate
from dmq.rocketmq_server.codec.codes import OK_STATUS, common_status, status_of
from dmq.rocketmq_server.codec.delay import check_not_after, deliver_at_ms, is_relative, timestamp_ms
from dmq.rocketmq_server.sessions.sessions import ClientSession, Sessions, TelemetryOutbox
from dmq.rocketmq_server.sessions.settings import SidecarConfig

log = structlog.get_logger("dmq.rocketmq_server")

RECOVERY_MS_MAX = 3_600_000  # RocketMQ's maxTransactionRecoverySecond
SENT_TOPICS_MAX = 1024  # of one client: as many as its settings may name
ASK_S_MAX = 5.0  # timeout for a producer to read its earlier frames


class Producers:
    """The connected producers by topic; implements ``Checker``. The event loop owns it; only ``is_live`` is safe
    elsewhere.

    A client is a producer of the topics in its last settings and of those to which it sent half messages. Checks go to
    its newest stream.
    """

    def __init__(self) -> None:
        self._by_topic: dict[str, dict[str, TelemetryOutbox]] = {}
        # By client, so that the removal of a client does not scan all topics. Topics of sent messages: last used, last.
        self._told: dict[str, set[str]] = {}
        self._sent: dict[str, dict[str, None]] = {}

    def told(self, session: ClientSession) -> None:
        """Replace the topics that a client publishes by those of its current settings."""
        if session.settings is None or session.outbox is None:
            return
        client_id = session.client_id
        topics = {full_name(topic) for topic in session.settings.publishing.topics}
        sent = self._sent.get(client_id, {})
        for topic in self._told.pop(client_id, set()) - topics - sent.keys():
            self._unlist(topic, client_id)
        if topics:
            self._told[client_id] = topics
        for topic in (*topics, *sent):
            self._by_topic.setdefault(topic, {})[client_id] = session.outbox

    def sent(self, client_id: str, topic: str, outbox: TelemetryOutbox) -> None:
        """Record that a client sent half messages to a topic and accepts checks on ``outbox``."""
        sent = self._sent.setdefault(client_id, {})
        sent.pop(topic, None)
        sent[topic] = None
        self._by_topic.setdefault(topic, {})[client_id] = outbox
        if len(sent) > SENT_TOPICS_MAX:
            oldest = next(iter(sent))
            del sent[oldest]
            if oldest not in self._told.get(client_id, ()):
                self._unlist(oldest, client_id)

    def left(self, client_id: str, outbox: TelemetryOutbox) -> None:
        """Remove the client from every topic whose checks use the ended stream."""
        for topic in self._topics_of(client_id):
            if self._by_topic[topic][client_id] is outbox:
                self._forget(topic, client_id)

    def gone(self, client_id: str) -> None:
        """Remove a client that announced its termination: it gets no checks, even if its streams are still open."""
        for topic in self._topics_of(client_id):
            self._forget(topic, client_id)

    def _topics_of(self, client_id: str) -> set[str]:
        return self._told.get(client_id, set()) | self._sent.get(client_id, {}).keys()

    def _forget(self, topic: str, client_id: str) -> None:
        self._unlist(topic, client_id)
        if client_id in self._told:
            self._told[client_id].discard(topic)
            if not self._told[client_id]:
                del self._told[client_id]
        if client_id in self._sent:
            self._sent[client_id].pop(topic, None)
            if not self._sent[client_id]:
                del self._sent[client_id]

    def _unlist(self, topic: str, client_id: str) -> None:
        clients = self._by_topic[topic]
        del clients[client_id]
        if not clients:
            del self._by_topic[topic]

    def is_live(self, topic: str) -> bool:
        """Return True if a connected producer publishes the topic, as ``Checker.is_live``."""
        return topic in self._by_topic

    async def check(self, check: Check) -> bool:
        """Send a check to the next producer in rotation; if it does not read its stream in time, to the others."""
        try:
            message = wire.Message.FromString(check.payload)
        except DecodeError:
            log.exception("half_message_unreadable", topic=check.topic, message_id=check.message_id)
            return False
        mapping.make_readable(message)
        command = wire.RecoverOrphanedTransactionCommand(message=message, transaction_id=check.transaction_id)
        frame = wire.TelemetryCommand(status=OK_STATUS, recover_orphaned_transaction_command=command)
        for _ in range(len(self._by_topic.get(check.topic, ()))):
            outbox = self._next(check.topic)
            if outbox is None:
                return False
            if outbox.offer(frame) or await _put(outbox, frame):
                return True
        return False

    def _next(self, topic: str) -> TelemetryOutbox | None:
        """Return the stream of the producer that was checked longest ago."""
        clients = self._by_topic.get(topic)
        if not clients:
            return None
        client_id = next(iter(clients))
        outbox = clients[client_id]
        if len(clients) > 1:
            del clients[client_id]
            clients[client_id] = outbox
        return outbox


async def _put(outbox: TelemetryOutbox, frame: wire.TelemetryCommand) -> bool:
    try:
        async with asyncio.timeout(ASK_S_MAX):
            await outbox.put(frame)
    except TimeoutError:
        return False
    return not outbox.is_closed


class TransactionCalls:
    """The part of ``MessagingService`` that serves transactions."""

    def __init__(
        self, broker: TransactionalBroker | None, config: SidecarConfig, sessions: Sessions, quotas: Quotas
    ) -> None:
        self._quotas = quotas
        self._is_served = broker is not None
        self._config = config
        self._sessions = sessions
        self.producers = Producers()
        if broker is not None:
            self._broker = broker
            broker.attach(self.producers)

    async def send(self, messages: Sequence[wire.Message], call: Call, now_ms: int) -> wire.SendMessageResponse:
        """Accept all half messages of the request or none; the answer is sent once they are durable."""
        halves: list[Half] = []
        try:
            self._check_served()
            validate.check_send(messages)
            for message in messages:
                validate.check_message(message)
                halves.append(self._half(message, now_ms))
            self._quotas.about_to_make(Quota.TOPICS, holders_of(call.admission), halves[0].envelope.topic)
        except Refused as error:
            return mapping.send_refusal(messages, len(halves), status_of(error, call.language))
        session = self._sessions.seen(call.client_id, wire.PRODUCER, "", call.language, call.version)
        if session.outbox is not None:
            self.producers.sent(call.client_id, halves[0].envelope.topic, session.outbox)
        return _response(await self._broker.prepare(halves))

    async def end(self, request: wire.EndTransactionRequest, call: Call) -> wire.EndTransactionResponse:
        """Commit or roll back; OK once that is durable, and also if the transaction already had that outcome.

        The transaction id identifies the message; the message id in the request is ignored.
        """
        self._check_served()
        topic = validate.topic_of(request.topic)
        self._sessions.seen(call.client_id, wire.PRODUCER, "", call.language, call.version)
        if request.resolution == wire.COMMIT:
            await self._broker.commit(topic, request.transaction_id)
        elif request.resolution == wire.ROLLBACK:
            await self._broker.roll_back(topic, request.transaction_id)
        else:
            why = "a transaction is committed or rolled back"
            raise Refused(Rule.REQUEST, why, value=int(request.resolution))
        return wire.EndTransactionResponse(status=OK_STATUS)

    def _check_served(self) -> None:
        if not self._is_served:
            raise Refused(Rule.UNSUPPORTED, "this broker does not serve transactional messages")

    def _half(self, message: wire.Message, now_ms: int) -> Half:
        system, properties = message.system_properties, message.user_properties
        if system.message_type != wire.TRANSACTION:
            why = "half messages and others cannot be in one request"
            raise Refused(Rule.MESSAGE_TYPE, why, value=wire.MessageType.Name(system.message_type))
        if system.message_group:
            why = "a half message cannot have a message group"
            raise Refused(Rule.MESSAGE_TYPE, why, value=system.message_group)
        if makes_schedule(properties):
            raise Refused(Rule.MESSAGE_TYPE, "a half message cannot make a schedule: send it without a transaction")
        check_after_ms = validate.duration_ms(system.orphaned_transaction_recovery_duration, Rule.REQUEST)
        if not 0 <= check_after_ms <= RECOVERY_MS_MAX:
            bound = f"large, max is {RECOVERY_MS_MAX // 1000}" if check_after_ms > 0 else "small, min is 0"
            why, limit = f"the max transaction recovery time of message is too {bound}", f"0..{RECOVERY_MS_MAX} ms"
            raise Refused(Rule.REQUEST, why, value=check_after_ms, limit=limit)
        timestamp = system.delivery_timestamp
        due_ms = deliver_at_ms(
            timestamp_ms(timestamp.seconds, timestamp.nanos) if system.HasField("delivery_timestamp") else None,
            properties,
            now_ms=now_ms,
            levels_ms=self._config.delay_levels_ms,
            delay_max_ms=self._config.delay_max_ms,
        )
        check_not_after(properties, due_ms, now_ms)
        delay_ms = due_ms - now_ms if due_ms is not None and is_relative(properties) else 0
        for name in validate.STRIPPED_PROPERTIES:
            properties.pop(name, None)
        if delay_ms:
            system.ClearField("delivery_timestamp")
        envelope = Envelope(
            full_name(message.topic),
            system.message_id,
            message.SerializeToString(),
            system.tag,
            deliver_at_ms=0 if delay_ms else due_ms or 0,
        )
        return Half(with_wishes(envelope, properties), delay_ms, check_after_ms)


def _response(receipts: Sequence[HalfReceipt]) -> wire.SendMessageResponse:
    """Return one entry per receipt; it is not OK if the transaction of that message id has already ended."""
    entries: list[wire.SendResultEntry] = []
    for receipt in receipts:
        status = OK_STATUS
        if receipt.ended:
            why = f"illegal message id: a transaction with this message id {receipt.ended}; send it under a new one"
            status = wire.Status(code=wire.ILLEGAL_MESSAGE_ID, message=why)
        entries.append(
            wire.SendResultEntry(status=status, message_id=receipt.message_id, transaction_id=receipt.transaction_id)
        )
    return wire.SendMessageResponse(status=common_status([entry.status for entry in entries]), entries=entries)
