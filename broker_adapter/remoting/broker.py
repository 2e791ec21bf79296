"""``ClassicBroker`` for a cluster of RocketMQ 4 or 5 over the classic protocol.

Requests go to masters. Pulls go to a slave if its master suggests it, as in RocketMQ's clients. Brokers before
RocketMQ 5 support delay levels but ignore delivery times and deliver at once, so such a send is refused here.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import groupby
from typing import TypeVar

from broker_adapter.contracts.adapter import QueueRange
from broker_adapter.contracts.classic import (
    AskedListener,
    Decision,
    Filter,
    Listener,
    Outgoing,
    Presence,
    PulledMessages,
    QueueReceipt,
    ReceivedMessage,
    ResetListener,
    Route,
    SendStatus,
)
from broker_adapter.contracts.classic import TransactionCheck as Check
from broker_adapter.contracts.errors import BrokerError, BrokerUnavailable, Refused, Rule
from broker_adapter.contracts.message_queue import MessageQueue
from broker_adapter.remoting.calls import RemotingCalls, RemotingOptions
from broker_adapter.remoting.connection import not_served
from broker_adapter.remoting.protocol.codes import Operation, Result, error_of
from broker_adapter.remoting.protocol.frames import FrameBroken, RemotingFrame, number_of
from broker_adapter.remoting.protocol.ids import broker_of_handle, unique_keys
from broker_adapter.remoting.protocol.packing import Compression
from broker_adapter.remoting.protocol.requests.bodies import (
    check_body,
    decode_locked,
    decode_members,
    decode_offsets,
    heartbeat_body,
    lock_body,
)
from broker_adapter.remoting.protocol.requests.pulling import PULLED, offset_fields, pull_fields, pulled, received
from broker_adapter.remoting.protocol.requests.routes import MASTER, route_of
from broker_adapter.remoting.protocol.requests.running import running_body
from broker_adapter.remoting.protocol.requests.sending import (
    STORED,
    Send,
    receipt_of,
    send_back_fields,
    send_batch,
    send_one,
)
from broker_adapter.remoting.protocol.requests.transactions import check_of, end_fields
from broker_adapter.remoting.reach import Reach
from broker_adapter.remoting.searching import offset_at
from broker_adapter.runtime.clock import Clock, SystemClock
from broker_adapter.runtime.log import LibraryLog

_log = LibraryLog("broker_adapter.remoting")
# A broker checks long polls for their end every 5 s. RocketMQ 5.5: a poll of 15 s may last 30 s in all.
_LATE_S = 12.0
TIMERS_FROM_VERSION = 413  # 5.0.0; older brokers ignore delivery times
_Found = TypeVar("_Found")
_LOOK_S = 1.0
_LOOK_AT_ALL_EVERY = 5  # calls of ``look``
_NOBODY_TEXT = "no consumer for this group"  # the answer has no distinct code


class RemotingBroker:
    """Implementation of ``ClassicBroker``. Belongs to one event loop; connects on first use of an address."""

    def __init__(
        self,
        options: RemotingOptions,
        *,
        client_id: str = "",
        compression: Compression | None = Compression.ZLIB,
        clock: Clock | None = None,
        told: Callable[..., None] = lambda *_, **__: None,
    ) -> None:
        """Store the options.

        ``compression`` applies to bodies from 4 KiB; brokers and clients of RocketMQ 4 support zlib only. ``told`` is a
        log function; it is called when a broker or name server stops or resumes answering.
        """
        self._client_id = client_id or f"{socket.gethostname()}@{os.getpid()}#{os.urandom(8).hex()}"
        self._compression = compression
        self._clock = clock or SystemClock()
        self._reach = Reach(told)
        self._calls = RemotingCalls(
            options, on_request=self._asked, greeting=self._greeting, on_answer=self._reach.answered
        )
        self._keys = unique_keys()
        self._looks = 0
        self._listener: Listener | None = None
        self._heartbeat = b""  # body of the last heartbeat
        self._filters: dict[tuple[str, str], tuple[Filter, int]] = {}  # registered, with versions, by group and topic
        self._read_from: dict[MessageQueue, int] = {}  # broker number that the master suggested for reads

    @property
    def client_id(self) -> str:
        return self._client_id

    def attach(self, listener: Listener) -> None:
        """Register the listener for requests and notifications of brokers."""
        self._listener = listener

    async def close(self) -> None:
        """Close all connections; pending calls fail."""
        await self._calls.close()

    @property
    def is_away(self) -> bool:
        """True if no known master of the cluster answers."""
        return self._reach.is_away(self._masters, self._calls.names)

    @property
    def _masters(self) -> list[str]:
        return [each[MASTER] for each in self._calls.brokers.values() if MASTER in each]

    @property
    def errors(self) -> Mapping[str, str]:
        """Failure reasons of unreachable brokers and name servers, by address."""
        return self._reach.errors

    async def look(self) -> None:
        """Probe all unreachable addresses. A broker address that has not answered for an hour of probes is forgotten.

        Every fifth call also probes all name servers and masters, so that an idle client detects an outage. While no
        broker is known, every call probes the name servers.
        """
        looks_at_all = self._looks % _LOOK_AT_ALL_EVERY == 0
        self._looks += 1
        names = self._calls.names if looks_at_all or not self._calls.brokers else ()
        masters = self._masters if looks_at_all else ()
        await asyncio.gather(*(self._look_at(each) for each in {*self._reach.errors, *names, *masters}))

    async def _look_at(self, address: str) -> None:
        is_name_server = address in self._calls.names
        is_silent = address in self._reach.errors
        if is_silent and self._reach.looked(address) and not is_name_server:
            self._reach.forget(address)
            self._calls.forget(address)
            return
        body = b"" if is_name_server else self._heartbeat or heartbeat_body(self._client_id, (), (), self._version_of)
        timeout_s = _LOOK_S if is_silent else None  # it may only be busy: use the default timeout
        operation = Operation.CLUSTER if is_name_server else Operation.HEARTBEAT
        with suppress(BrokerUnavailable):
            answer = await self._calls.ask(address, operation, {}, body, accepted=None, timeout_s=timeout_s)
            if is_name_server:
                why = f"{address} answers code {answer.code} to a request that every name server serves"
                self._reach.judged(address, "" if answer.code == Result.OK else why)

    # -- routes and groups ----------------------------------------------------------------------------------------

    async def route(self, topic: str) -> Route:
        """Return the current route of a topic from a name server."""
        return route_of(topic, await self._calls.route(topic))

    async def heartbeat(self, producers: Sequence[str], consumers: Sequence[Presence]) -> None:
        """Send a heartbeat to every master and slave of every known broker."""
        self._heartbeat = heartbeat_body(self._client_id, producers, consumers, self._version_of)
        await self._everywhere(Operation.HEARTBEAT, {}, self._heartbeat)

    async def leave(self, *, producer: str = "", consumer: str = "") -> None:
        """Unregister this client from a group at every known broker."""
        named = {"producerGroup": producer, "consumerGroup": consumer}
        fields = {"clientID": self._client_id, **{name: group for name, group in named.items() if group}}
        self._heartbeat = b""  # a returning broker must not see the group that was left
        self._filters = {key: each for key, each in self._filters.items() if key[0] != consumer}
        try:
            await self._everywhere(Operation.LEAVE, fields)
        except BrokerError as error:
            _log.info("unregister_failed", group=producer or consumer, error=str(error))

    async def members(self, group: str, topic: str) -> Sequence[str]:
        """Return the client ids of a group, sorted, from the first master of ``topic`` that answers."""
        fields, failure = {"consumerGroup": group}, BrokerUnavailable(f"no broker of topic {topic} has a master now")
        for part in await self._calls.route(topic):
            if MASTER not in part.addresses:
                continue
            try:
                address = part.addresses[MASTER]
                answer = await self._calls.ask(address, Operation.MEMBERS, fields, accepted=(Result.OK, Result.FAILED))
                if answer.code == Result.OK:
                    return decode_members(answer.body)
                if _NOBODY_TEXT in answer.remark:
                    return ()
                raise error_of(answer, address, Operation.MEMBERS)
            except BrokerUnavailable as error:
                failure = error
        raise failure

    # -- sends ----------------------------------------------------------------------------------------

    async def send(
        self, group: str, queue: MessageQueue, messages: Sequence[Outgoing], *, timeout_ms: int, one_way: bool = False
    ) -> QueueReceipt:
        """Store messages in one queue, in one attempt. ``Refused(UNSUPPORTED)``: delivery time at a broker before
        RocketMQ 5.
        """
        now_ms, timeout_s = self._clock.now_ms(), timeout_ms / 1000
        ids = [each.message.message_id or self._keys.new(now_ms) for each in messages]
        if len(messages) == 1:
            compression = self._compression
            send = send_one(group, queue, messages[0], message_id=ids[0], now_ms=now_ms, compression=compression)
        else:
            send = send_batch(group, queue, messages, message_ids=ids, now_ms=now_ms)
        address = await self._calls.master(queue.broker, queue.topic)
        if send.has_delivery_time:
            await self._check_timers(address, queue, timeout_s)
        if one_way:
            await self._calls.tell(address, send.operation, send.fields, send.body, timeout_s=timeout_s)
            return QueueReceipt(SendStatus.STORED, ",".join(ids), queue, -1)
        return await self._stored(address, queue, send, ",".join(ids), timeout_s)

    async def _stored(
        self, address: str, queue: MessageQueue, send: Send, message_id: str, timeout_s: float
    ) -> QueueReceipt:
        answer = await self._calls.ask(
            address, send.operation, send.fields, send.body, accepted=tuple(STORED), timeout_s=timeout_s
        )
        return receipt_of(answer, queue, message_id, address)

    async def _check_timers(self, address: str, queue: MessageQueue, timeout_s: float) -> None:
        """Refuse a delivery time at a broker that ignores it. Every answer of a broker contains its version."""
        version, fields = self._calls.version(address), offset_fields(queue)
        if not version:
            asked = self._calls.ask(address, Operation.END_OFFSET, fields, accepted=None, timeout_s=timeout_s)
            version = (await asked).version
        if version < TIMERS_FROM_VERSION:
            why = (
                f"broker {queue.broker} is older than RocketMQ 5.0.0 and would deliver the message at once: "
                "use a delay level there"
            )
            raise Refused(Rule.UNSUPPORTED, why, value=f"version {version}", limit=f"from {TIMERS_FROM_VERSION} on")

    async def end_transaction(
        self, group: str, receipt: QueueReceipt, decision: Decision, *, check: Check | None = None
    ) -> None:
        """Report the decision of a transaction to the broker of its half message."""
        broker = check.broker if check is not None else receipt.queue.broker
        address = await self._calls.master(broker, receipt.queue.topic)
        await self._calls.tell(address, Operation.END_TRANSACTION, end_fields(group, receipt, decision, check))

    async def recall(self, topic: str, recall_handle: str) -> str:
        """Recall a delayed message. A broker also reports success for a message that it does not have."""
        broker = broker_of_handle(recall_handle)
        address = await self._calls.master(broker, topic)
        fields = {"producerGroup": self._client_id, "topic": topic, "recallHandle": recall_handle, "bname": broker}
        try:
            return (await self._calls.ask(address, Operation.RECALL, fields)).fields.get("msgId", "")
        except Refused as refused:
            if refused.code == Result.FORBIDDEN:  # recallMessageEnable is off by default
                raise Refused(Rule.UNSUPPORTED, refused.why, code=refused.code) from None
            if refused.code == Result.ILLEGAL and "timestamp" in refused.why:  # the message is due
                raise Refused(Rule.NOT_FOUND, refused.why, code=refused.code) from None
            raise

    # -- reading ----------------------------------------------------------------------------------------

    async def pull(
        self, group: str, queue: MessageQueue, wanted: Filter, queue_offset: int, *, batch_max: int, wait_ms: int
    ) -> PulledMessages:
        """Return messages of a queue from an offset on. The request includes a filter that no heartbeat registered."""
        told, version = self._filters.get((group, queue.topic), (None, 0))
        brought = None if told in {None, wanted} else wanted
        address = await self._reads_at(queue)
        if brought is not None and brought.is_sql:  # a pull with an invalid filter returns all messages
            body = check_body(self._client_id, group, queue.topic, brought)
            await self._calls.ask(address, Operation.CHECK_FILTER, {}, body)
        fields = pull_fields(
            group,
            queue,
            queue_offset,
            batch_max=batch_max,
            wait_ms=wait_ms,
            brought=brought,
            version=version,
        )
        wait_s = wait_ms / 1000 + _LATE_S if wait_ms else 0.0
        try:
            answer = await self._calls.ask(address, Operation.PULL, fields, accepted=PULLED, wait_s=wait_s)
        except BrokerUnavailable:
            self._read_from.pop(queue, None)  # the slave may be gone: pull from the master next
            raise
        found, next_offset = pulled(answer, queue_offset, address)
        if "suggestWhichBrokerId" in answer.fields:
            self._read_from[queue] = number_of(answer, "suggestWhichBrokerId", address)
        moved = answer.code == Result.OFFSET_MOVED
        return PulledMessages([received(each, queue) for each in found], next_offset, moved)

    async def queue_range(self, queue: MessageQueue) -> QueueRange:
        """Return the range of readable offsets of a queue."""
        address = await self._calls.master(queue.broker, queue.topic)
        fields = offset_fields(queue)
        begin = await self._calls.offset(address, Operation.BEGIN_OFFSET, fields)
        end = await self._calls.offset(address, Operation.END_OFFSET, fields)
        return QueueRange(begin, max(begin, end))

    async def offset_at(self, queue: MessageQueue, stored_at_ms: int) -> int:
        """Return the offset of the first message stored at or after a time, or the end offset if there is none."""
        address = await self._calls.master(queue.broker, queue.topic)
        return await offset_at(self._calls, address, queue, stored_at_ms)

    async def committed_offset(self, group: str, queue: MessageQueue) -> int | None:
        """Return the committed offset of the group in a queue, or ``None`` if there is none.

        A broker before RocketMQ 5 returns 0 for no committed offset if the queue begins at 0 and is in its memory.
        """
        address = await self._calls.master(queue.broker, queue.topic)
        fields = {"consumerGroup": group, **offset_fields(queue), "setZeroIfNotFound": "false"}
        accepted = (Result.OK, Result.NOT_FOUND)
        answer = await self._calls.ask(address, Operation.COMMITTED_OFFSET, fields, accepted=accepted)
        return None if answer.code == Result.NOT_FOUND else number_of(answer, "offset", address)

    async def commit_offset(self, group: str, queue: MessageQueue, queue_offset: int) -> None:
        """Commit the offset at which the group continues in a queue."""
        address = await self._calls.master(queue.broker, queue.topic)
        fields = {"consumerGroup": group, **offset_fields(queue), "commitOffset": str(queue_offset)}
        await self._calls.ask(address, Operation.COMMIT_OFFSET, fields)

    # -- queue locks and retries ----------------------------------------------------------------------------------

    async def lock(self, group: str, queues: Sequence[MessageQueue]) -> frozenset[MessageQueue]:
        """Lease queues to this client for 60 s; return the queues that it holds."""

        async def at(address: str, body: bytes) -> frozenset[MessageQueue]:
            return decode_locked((await self._calls.ask(address, Operation.LOCK, {}, body)).body)

        given = await asyncio.gather(
            *(at(*each) for each in await self._by_broker(group, queues)), return_exceptions=True
        )
        return frozenset(queues) & frozenset(queue for each in _answers(given, "lock") for queue in each)

    async def unlock(self, group: str, queues: Sequence[MessageQueue]) -> None:
        """Release the leases of queues."""
        asks = (
            self._calls.ask(address, Operation.UNLOCK, {}, body)
            for address, body in await self._by_broker(group, queues)
        )
        _answers(await asyncio.gather(*asks, return_exceptions=True), "unlock")

    async def send_back(
        self,
        group: str,
        received: ReceivedMessage,
        *,
        delay_level: int,
        attempts_max: int,
        error: BaseException | str = "",
    ) -> None:
        """Return a message to the broker, for a retry through ``%RETRY%<group>`` or as a dead letter."""
        del error  # the protocol has no field for it
        address = await self._calls.master(received.queue.broker, received.queue.topic)
        fields = send_back_fields(group, received, delay_level=delay_level, attempts_max=attempts_max)
        await self._calls.ask(address, Operation.SEND_BACK, fields)

    # -- inside ----------------------------------------------------------------------------------------

    def _version_of(self, group: str, topic: str, wanted: Filter) -> int:
        told, version = self._filters.get((group, topic), (None, 0))
        if told != wanted:
            version = max(version + 1, self._clock.now_ms())
            self._filters[group, topic] = (wanted, version)
        return version

    def _greeting(self) -> RemotingFrame | None:
        """Return the last heartbeat as first request of a reconnection: a broker drops a client with its connection."""
        return self._calls.request(Operation.HEARTBEAT, {}, self._heartbeat) if self._heartbeat else None

    async def _everywhere(self, operation: Operation, fields: dict[str, str], body: bytes = b"") -> None:
        addresses = {address for each in self._calls.brokers.values() for address in each.values()}
        asks = (self._calls.ask(address, operation, fields, body) for address in sorted(addresses))
        answers = await asyncio.gather(*asks, return_exceptions=True)
        failures = [each for each in answers if isinstance(each, BaseException)]
        _answers(answers, operation.name.lower())
        if failures and len(failures) == len(answers):
            raise failures[0]

    async def _by_broker(self, group: str, queues: Sequence[MessageQueue]) -> Sequence[tuple[str, bytes]]:
        found = []
        for broker, own in groupby(sorted(queues, key=lambda each: each.broker), lambda each: each.broker):
            held = list(own)
            try:
                address = await self._calls.master(broker, held[0].topic)
            except BrokerUnavailable as error:
                _log.warning("master_not_found", broker=broker, error=str(error))
                continue
            found.append((address, lock_body(group, self._client_id, held)))
        return found

    async def _reads_at(self, queue: MessageQueue) -> str:
        number = self._read_from.get(queue, MASTER)
        slave = self._calls.brokers.get(queue.broker, {}).get(number) if number != MASTER else None
        return slave or await self._calls.master(queue.broker, queue.topic)

    def _asked(self, address: str, request: RemotingFrame) -> RemotingFrame | None:
        """Handle a request or notification of a broker."""
        listener, fields = self._listener, request.fields
        try:
            if listener is not None and request.code == Operation.MEMBERS_CHANGED:
                listener.members_changed(fields.get("consumerGroup", ""))
            elif listener is not None and request.code == Operation.CHECK_TRANSACTION:
                listener.check(check_of(request, self._calls.broker_at(address)))
            elif isinstance(listener, ResetListener) and request.code == Operation.RESET_OFFSETS_HERE:
                listener.offsets_reset(fields.get("group", ""), decode_offsets(request.body))
            elif isinstance(listener, AskedListener) and request.code == Operation.RUNNING_INFO:
                group = fields.get("consumerGroup", "")
                if (state := listener.state_of(group)) is None:
                    return RemotingFrame(code=Result.FAILED, remark=f"this client has no consumer of group {group}")
                return RemotingFrame(code=Result.OK, body=running_body(state, self._calls.names))
            else:
                return not_served(request)
        except FrameBroken as error:
            _log.warning("request_unreadable", broker=address, operation=request.code, error=str(error))
        return None


def _answers(found: Sequence[_Found | BaseException], what: str) -> Sequence[_Found]:
    """Return the answers of several brokers; log the brokers that failed."""
    for each in found:
        if isinstance(each, BrokerError):
            _log.warning("broker_skipped", what=what, error=str(each))
        elif isinstance(each, BaseException):
            raise each
    return [each for each in found if not isinstance(each, BaseException)]
