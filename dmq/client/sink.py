"""A client of the daemon that implements ``retry.sink.DelaySink``, so that many processes share one store.

put      SendMessage, delayed until the entry is due         take    ReceiveMessage of a simple consumer
finish   AckMessage                                          again   ChangeInvisibleDuration
bury     ForwardMessageToDeadLetterQueue                     dead, requeue, stats   the admin service
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any, Self

import structlog

from broker_adapter.contracts.errors import Refused
from broker_adapter.contracts.limits import BODY_BYTES_MAX, INVISIBLE_MS_MAX, POLLING_MS_MAX, RECEIVE_BATCH_MAX
from broker_adapter.contracts.topics import check_topic
from broker_adapter.runtime.clock import Clock, SystemClock
from broker_adapter.wire import rocketmq_v2 as wire
from broker_adapter.wire.mapping import set_duration
from broker_adapter.wire.signature import Signer
from dmq.client.calls import DaemonCalls, HoldLost, check
from dmq.client.dead import DeadSet
from dmq.client.entries import GROUP, EntryFacts, decode, encode, topic_of
from dmq.client.holds import HOLD_MS, Holds, LeaseHold, hide
from dmq.client.setup import Setup
from dmq.config.contexts import ClientTls, target_of
from retry.sink import (
    ERROR_CHARS_MAX,
    KEY_BYTES_MAX,
    UID_BYTES,
    DeadEntry,
    Death,
    Entry,
    Held,
    SinkClosed,
    SinkError,
    SinkFull,
    SinkStats,
    SinkUnavailable,
)

log = structlog.get_logger("dmq.client")

TIMEOUT_S = 5.0
_FORKED = "the client was made before this process was forked: make it in the worker"


class SidecarClient:
    """A sink that stores entries in the daemon at ``address``; ``DelaySink`` has the contracts of its methods.

    Differences from other sinks:

    - ``can_hold`` is False: for a write-ahead, the daemon would have to return a message that no consumer received.
    - ``has_waiting`` is True for every key. Only the daemon has the entries of other processes, so all ordered sends
      pass through it. It keeps the order: entries of a key are accepted in order, and the next one is handed out
      after the previous one is finished or dead.
    - The daemon stores an entry as it was put, and counts its attempts. Only the process that postponed an entry has
      its last error and the exact due time of the retry. The flag that an attempt may have succeeded is stored for
      entries without a key. The cause of death is stored.
    - Entries of one type come from several queues. Within one ``take`` they are ordered by due time. Across calls
      the order is within the bound of GUARANTEES_LIMITS, section 2.
    - A retry of an entry with a key is hidden for at most 12 h at a time. If its process ends meanwhile, another one
      may receive it after that.
    - The death of a process within a second of receiving an entry may cost it an attempt.
    - ``stats`` counts entries that are not due since their put, or since this process postponed them. Due entries that
      no consumer holds are not counted, because the daemon does not report them. Bytes and the oldest entry are
      unknown as well.

    The client connects at the first call. Every call has a deadline of ``timeout_s``. After an outage of the daemon it
    reconnects on its own. The import of this package raises ImportError if the extra ``client`` is missing.
    """

    can_hold = False

    def __init__(
        self,
        address: str,
        *,
        timeout_s: float = TIMEOUT_S,
        clock: Clock | None = None,
        access_key: str = "",
        secret_key: str = "",
        tls: ClientTls | None = None,
    ) -> None:
        """Daemons with access control need ``access_key`` and ``secret_key``; without ``tls`` the connection is plain
        text.

        Raises ``dmq.config.contexts.ContextError`` if a file of ``tls`` cannot be used.
        """
        self.address = address
        self._clock = clock or SystemClock()
        self._pid = os.getpid()
        signer = Signer(access_key, secret_key, self._clock) if access_key else None
        self._calls = DaemonCalls(address, timeout_s=timeout_s, signer=signer, tls=tls)
        self._holds = Holds(self._calls, self._clock)
        self._dead = DeadSet(self._clock, self._calls)
        self._setup = Setup(self._calls, timeout_s)
        self._batches: dict[str, int] = {}  # batch size by topic
        self._is_closed = False

    @classmethod
    def from_context(cls, name: str = "", *, timeout_s: float = TIMEOUT_S, clock: Clock | None = None) -> Self:
        """Return a client for the daemon of a context, which ``dmq context add`` created.

        Without a name, the context is the one of ``DMQ_CONTEXT``, or else the current one. Other environment variables
        are ignored. Raises ``dmq.config.contexts.ContextError`` if there is no context, or if it cannot be used.
        """
        target = target_of(name)
        return cls(
            target.address,
            timeout_s=timeout_s,
            clock=clock,
            access_key=target.access_key,
            secret_key=target.secret,
            tls=target.tls,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def clock(self) -> Clock:
        """This host's clock. The daemon's clock determines when a put entry is due; a postponed one waits for a
        duration.
        """
        return self._clock

    @property
    def lost_total(self) -> int:
        """The number of held entries that other consumers received, because the daemon was unreachable for too long."""
        return self._holds.lost_total

    # -- keeping ------------------------------------------------------------------------------------------------------

    def put(self, entry: Entry, *, is_held: bool = False) -> Future[Held | None]:  # noqa: ARG002 - see can_hold
        """Store ``entry``; the result is ``None`` even with ``is_held``."""
        done: Future[Held | None] = _future()
        failure = self._refusal() or _refusal_of(entry)
        if failure is not None:
            done.set_exception(failure)
            return done
        request = wire.SendMessageRequest(messages=[encode(entry, 0)])

        def send(failure: SinkError | None) -> None:
            if failure is not None:
                done.set_exception(failure)
                return
            self._calls.ask("SendMessage", request, partial(self._told, done))

        self._setup.prepare(topic_of(entry.type_name), send)
        return done

    def has_waiting(self, type_name: str, key: str) -> bool:  # noqa: ARG002 - see the class
        self._check_usable()
        return bool(key)

    def finish(self, held: Held) -> Future[None]:
        return self._end(held, self._finish)

    def again(
        self, held: Held, due_at_ms: int, *, is_counted: bool, error: str = "", is_uncertain: bool = False
    ) -> Future[None]:
        entry = replace(
            held.entry,
            due_at_ms=due_at_ms,
            attempts=held.entry.attempts + is_counted,
            error=error[:ERROR_CHARS_MAX] or held.entry.error,
            is_uncertain=is_uncertain or held.entry.is_uncertain,
        )
        # State that must be stored needs a new message; an entry with a key would lose its place in the order.
        is_new = due_at_ms - self._clock.now_ms() > INVISIBLE_MS_MAX or entry.is_uncertain > held.entry.is_uncertain
        if is_new and not entry.key:
            return self._end(held, partial(self._put_anew, entry))
        return self._end(held, partial(self._hide, entry, is_counted=is_counted))

    def bury(self, held: Held, death: Death, error: str, *, is_counted: bool = True) -> Future[None]:
        entry = replace(
            held.entry,
            attempts=held.entry.attempts + is_counted,
            error=error[:ERROR_CHARS_MAX] or held.entry.error,
        )
        return self._end(held, partial(self._bury, entry, death))

    # -- taking -------------------------------------------------------------------------------------------------------

    def take(self, type_name: str, limit: int, timeout_s: float) -> Sequence[Held]:
        until_s = self._clock.monotonic_s() + timeout_s
        topic = topic_of(type_name)
        if os.getpid() != self._pid:
            raise SinkClosed(_FORKED)
        while not self._is_closed:
            try:
                self._setup.prepare_now(topic)
                left_s = max(0.0, until_s - self._clock.monotonic_s())
                taken = self._receive(type_name, topic, limit, min(left_s, POLLING_MS_MAX / 1000))
            except SinkUnavailable:
                self._setup.reset()
                if self._refusal() is None:
                    raise
                break  # closed during the call
            if taken or self._clock.monotonic_s() >= until_s:
                return taken
        return []

    def _receive(self, type_name: str, topic: str, limit: int, wait_s: float) -> list[Held]:
        batch = self._batches.get(topic, RECEIVE_BATCH_MAX)
        request = wire.ReceiveMessageRequest(batch_size=max(1, min(limit, batch, RECEIVE_BATCH_MAX)))
        request.group.name, request.message_queue.topic.name = GROUP, topic
        request.filter_expression.type, request.filter_expression.expression = wire.TAG, "*"
        set_duration(request.invisible_duration, HOLD_MS)
        set_duration(request.long_polling_timeout, int(wait_s * 1000))
        messages: list[wire.Message] = []
        try:
            for frame in self._calls.poll(request, wait_s):
                if frame.HasField("status"):
                    check(frame)
                elif frame.HasField("message"):
                    messages.append(frame.message)
        except SinkUnavailable:
            if not messages:
                raise
        taken: list[Held] = []
        keys: set[str] = set()
        followers = 0
        for message in messages:
            hold = _hold_of(type_name, topic, message)
            entry = self._entry_of(hold, message)
            if entry is None:
                continue
            if entry.key and entry.key in keys:
                followers += 1
                self._holds.give_back(hold)
                continue
            keys.add(entry.key)
            early_ms = entry.due_at_ms - self._clock.now_ms()
            if self._is_closed:
                self._holds.give_back(hold)
            elif early_ms > 0:
                hide(self._calls, hold, min(early_ms, INVISIBLE_MS_MAX), is_suspended=True, told=_ignore)
            elif self._holds.add(hold):
                taken.append(Held(entry, hold))
        # The daemon hands out several entries of one key at once. A smaller batch avoids releasing most of them.
        self._batches[topic] = max(1, batch // 4) if followers else min(2 * batch, RECEIVE_BATCH_MAX)
        taken.sort(key=lambda each: each.entry.due_at_ms)
        return taken

    def _entry_of(self, hold: LeaseHold, message: wire.Message) -> Entry | None:
        """Return the current entry of a delivery; dead-letter a message without an entry at once, with its bytes."""
        system = message.system_properties
        stored_at = system.store_timestamp
        stored_at_ms = stored_at.seconds * 1000 + stored_at.nanos // 1_000_000
        try:
            stored = decode(hold.type_name, dict(message.user_properties), message.body, stored_at_ms=stored_at_ms)
        except (KeyError, ValueError) as error:
            log.error("entry_unreadable", topic=hold.topic, message_id=hold.message_id, error=str(error))  # noqa: TRY400
            self._dead.forward(hold, 0, _ignore)
            return None
        hold.turn = stored.turn
        entry = replace(stored.entry, attempts=stored.entry.attempts + system.delivery_attempt - 1)
        facts = self._holds.facts(hold.topic, hold.message_id)
        if facts is not None:
            entry = replace(entry, error=facts.error, is_uncertain=facts.is_uncertain, due_at_ms=facts.due_at_ms)
        return entry

    # -- ending a hold ------------------------------------------------------------------------------------------------

    def _end(self, held: Held, how: Callable[[LeaseHold, Future[None]], None]) -> Future[None]:
        done: Future[None] = _future()
        hold = held.ticket
        assert isinstance(hold, LeaseHold)
        failure = self._refusal()
        if failure is not None:
            done.set_exception(failure)
        elif not self._holds.end(hold, lambda: how(hold, done)):
            done.set_result(None)
        return done

    def _finish(self, hold: LeaseHold, done: Future[None]) -> None:
        request = wire.AckMessageRequest()
        request.group.name, request.topic.name = GROUP, hold.topic
        request.entries.add(message_id=hold.message_id, receipt_handle=hold.handle)

        def told(_: object, failure: SinkError | None) -> None:
            if failure is None:
                self._holds.forget(hold.topic, hold.message_id)
            self._ended(hold, done, failure)

        self._calls.ask("AckMessage", request, told)

    def _hide(self, entry: Entry, hold: LeaseHold, done: Future[None], *, is_counted: bool) -> None:
        # Before the call: another thread may receive the message before the answer is processed.
        facts = EntryFacts(entry.error, entry.is_uncertain, entry.due_at_ms)
        self._holds.remember(hold.topic, hold.message_id, facts)
        if is_counted:
            self._calls.report(GROUP, hold.handle, entry.error)
        wait_ms = min(max(0, entry.due_at_ms - self._clock.now_ms()), INVISIBLE_MS_MAX)
        hide(
            self._calls,
            hold,
            wait_ms,
            is_suspended=not is_counted,
            told=lambda _, failure: self._ended(hold, done, failure),
        )

    def _put_anew(self, entry: Entry, hold: LeaseHold, done: Future[None]) -> None:
        """Put the current entry, then acknowledge its old message; after a crash in between both are delivered."""
        request = wire.SendMessageRequest(messages=[encode(entry, hold.turn + 1)])

        def told(_: object, failure: SinkError | None) -> None:
            if failure is None:
                self._finish(hold, done)
            else:
                self._ended(hold, done, failure)

        self._calls.ask("SendMessage", request, told)

    def _bury(self, entry: Entry, death: Death, hold: LeaseHold, done: Future[None]) -> None:
        def told(_: object, failure: SinkError | None) -> None:
            if failure is None:
                self._holds.forget(hold.topic, hold.message_id)
            self._ended(hold, done, failure)

        self._calls.report(GROUP, hold.handle, entry.error)
        self._dead.bury(hold, entry, death, told)

    def _ended(self, hold: LeaseHold, done: Future[None], failure: SinkError | None) -> None:
        self._holds.ended(hold, failure)
        if isinstance(failure, HoldLost):
            log.warning("hold_lost", topic=hold.topic, message_id=hold.message_id, error=str(failure))
            failure = None  # the new holder is responsible for the entry
        self._told(done, None, failure)

    def _told(self, done: Future[Any], _: object, failure: SinkError | None) -> None:
        if isinstance(failure, SinkUnavailable):
            self._setup.reset()
        if failure is not None:
            done.set_exception(failure)
        else:
            done.set_result(None)

    # -- the dead set and figures -------------------------------------------------------------------------------------

    def dead(self, type_name: str, *, after: bytes = b"", limit: int = 100) -> Sequence[DeadEntry]:
        self._check_usable()
        return self._dead.page(type_name, after, limit)

    def requeue(self, type_name: str, uids: Sequence[bytes]) -> int:
        self._check_usable()
        return self._dead.requeue(type_name, uids)

    def stats(self, type_name: str = "") -> SinkStats:
        self._check_usable()
        topic = topic_of(type_name) if type_name else ""
        return self._dead.stats(type_name, held=self._holds.count(topic), hidden=self._holds.hidden(topic))

    @property
    def types(self) -> Sequence[str]:
        self._check_usable()
        return self._dead.types()

    def close(self) -> None:
        """Release all holds, so that they are visible at once. Wait for calls in flight, up to their deadline."""
        if os.getpid() != self._pid or self._is_closed:
            return
        self._is_closed = True
        self._calls.end_polls()
        self._dead.close()
        self._setup.close()
        self._holds.close()
        self._calls.close()

    # -- parts --------------------------------------------------------------------------------------------------------

    def _refusal(self) -> SinkClosed | None:
        if os.getpid() != self._pid:
            return SinkClosed(_FORKED)
        return SinkClosed("the client is closed") if self._is_closed else None

    def _check_usable(self) -> None:
        failure = self._refusal()
        if failure is not None:
            raise failure


def _future() -> Future[Any]:
    """Return a future that cannot be cancelled, because its call is in flight."""
    made: Future[Any] = Future()
    made.set_running_or_notify_cancel()
    return made


def _refusal_of(entry: Entry) -> SinkError | None:
    """Return the error of an invalid entry, found before any call."""
    if len(entry.uid) != UID_BYTES:
        return SinkError(f"a uid has {UID_BYTES} bytes, not {len(entry.uid)}")
    if len(entry.key.encode(errors="surrogatepass")) > KEY_BYTES_MAX:
        return SinkError(f"a key has at most {KEY_BYTES_MAX} bytes: {entry.key[:40]!r}...")
    if len(entry.payload) > BODY_BYTES_MAX:
        return SinkFull(f"a payload has at most {BODY_BYTES_MAX} bytes, not {len(entry.payload)}", limit="payload")
    try:
        check_topic(entry.type_name)
    except Refused as error:
        return SinkError(f"this cannot be the name of a type: {error}")
    return None


def _hold_of(type_name: str, topic: str, message: wire.Message) -> LeaseHold:
    system = message.system_properties
    return LeaseHold(
        type_name=type_name,
        place=(topic, system.queue_id, system.queue_offset),
        message_id=system.message_id,
        handle=system.receipt_handle,
    )


def _ignore(_answer: object, _failure: SinkError | None) -> None:
    """Ignore the answer: after an error the message is redelivered when its invisible duration expires."""
