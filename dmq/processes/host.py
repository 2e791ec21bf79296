"""The store process's end of one front: makes the calls for messages that it asks for, and answers them."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import structlog

from broker_adapter.contracts.adapter import Subscription
from broker_adapter.contracts.deferred import Deferred
from broker_adapter.contracts.errors import BrokerError, Overloaded
from broker_adapter.contracts.message import Envelope, SendReceipt
from broker_adapter.runtime.clock import Clock
from dmq.http2 import Accounts
from dmq.processes import frames
from dmq.processes.clocks import NEAR_MS, wall_less_boot_ms
from dmq.processes.link import Link
from dmq.processes.relays import Relays
from dmq.rocketmq_server.calls.exchange import Caller, MessagePort, Receive
from dmq.rocketmq_server.transport.http2_server import Port

ACKED_PER_TURN: Final = 1024  # receipt handles, about: one call may have as many
_IN_DOUBT_S: Final = 1.0  # so long after a front wrote an answer to a socket its client may not have read it

log = structlog.get_logger("dmq.processes")


class _Handed(NamedTuple):
    """Deliveries that are not known to be taken: how they end, and whether they are renewed."""

    over: Callable[[bool], None]
    give_back: Callable[[], None]
    is_renewed: bool


class _Taken(NamedTuple):
    """Renewed deliveries that a client's socket took."""

    at_s: float
    over: Callable[[bool], None]


class Host:
    """Serves one front. Belongs to the event loop; ``lose`` it when its link has ended."""

    def __init__(
        self,
        link: Link,
        port: Port,
        accounts: Accounts,
        clock: Clock,
        others: Mapping[type, Callable[[Any], None]] = MappingProxyType({}),
    ) -> None:
        """``others`` take the kinds of frames that are no calls."""
        self._link = link
        self._say = link.say
        link.on_unsaid = self._unsaid
        self._exchange: MessagePort = port.service.exchange
        self._relays = relays = Relays(link, port, accounts)
        self._accounts = accounts
        self._clock = clock
        self._tasks: dict[int, asyncio.Task[None]] = {}  # of receives
        self._handed: dict[int, _Handed] = {}
        self._taken: deque[_Taken] = deque()
        self._acks: dict[tuple[str, str], deque[frames.Ack]] = {}  # by group and topic, each in its turn
        self._is_acking = False  # in the loop's next turn
        self._wall_less_boot_ms = 0  # as it is believed while a batch is read
        self._takes: dict[type, Callable[[Any], None]] = {
            frames.SendMessages: self._send,
            frames.ReceiveMessages: self._receive,
            frames.Taken: self._over,
            frames.NotTaken: self._not_taken,
            frames.Ack: lambda frame: self._acks.setdefault((frame.group, frame.topic), deque()).append(frame),
            frames.ChangeInvisible: self._change_invisible,
            frames.Cancel: self._cancel,
            **relays.takes,
            **others,
        }

    def on_frames(self, batch: Sequence[frames.Frame]) -> None:
        """Take what the front said in one turn of its loop."""
        self._wall_less_boot_ms = wall_less_boot_ms(self._clock)
        takes = self._takes
        for frame in batch:
            try:
                takes[type(frame)](frame)
            except Exception as error:  # noqa: BLE001 - a fault of ours fails one call, and all others go on
                self._fault(frame, error)
        if self._acks and not self._is_acking:
            self._ack_some()

    def _ack_some(self) -> None:
        """Acknowledge what came, so much of it in a turn of the loop: its answer may be a thousand times as large."""
        handles = 0
        while self._acks and handles < ACKED_PER_TURN:
            place = next(iter(self._acks))
            waiting, asked = self._acks.pop(place), list[frames.Ack]()
            while waiting and handles < ACKED_PER_TURN:
                asked.append(waiting.popleft())
                handles += len(asked[-1].receipt_handles)
            if waiting:
                self._acks[place] = waiting
            try:
                self._ack(*place, asked)
            except Exception as error:  # noqa: BLE001 - a fault of ours fails these calls, and all others go on
                for each in asked:
                    self._fault(each, error)
        self._is_acking = bool(self._acks)
        if self._is_acking:
            asyncio.get_running_loop().call_soon(self._ack_some)

    def end(self) -> None:
        """End all calls: the daemon ends, and leases end with it, at the cost of no attempt."""
        for task in list(self._tasks.values()):
            task.cancel()
        self._relays.lose()

    def lose(self) -> None:
        """End all calls of a front that is gone, and give back what its clients may not have."""
        self.end()
        for handed in self._handed.values():
            handed.over(False)
        since_s = self._clock.monotonic_s() - _IN_DOUBT_S
        for taken in self._taken:
            if taken.at_s >= since_s:
                taken.over(False)
        self._handed.clear()
        self._taken.clear()

    def _fault(self, frame: Any, error: Exception) -> None:  # noqa: ANN401 - of any kind
        call = getattr(frame, "call", 0)
        if not call:
            log.error("frame_failed", kind=type(frame).__name__, exc_info=error)
        elif not self._relays.fail(call, error):
            self._fail(call, error, type(frame).__name__)

    def _unsaid(self, frame: Any) -> None:  # noqa: ANN401 - of any kind
        if not self._relays.fail(frame.call):
            self._say(frames.Failed(frame.call, frames.Failure("unexpected", "an answer that cannot be told")))

    def _fail(self, call: int, error: Exception, rpc: str) -> None:
        self._say(frames.Failed(call, self._failure(error, rpc)))

    @staticmethod
    def _failure(error: Exception, rpc: str) -> frames.Failure:
        if not isinstance(error, BrokerError):  # the front is not told why
            log.error("call_failed", rpc=rpc, exc_info=error)
        return frames.failure_of(error)

    # -- messages -----------------------------------------------------------------------------------------------------

    def _send(self, frame: frames.SendMessages) -> None:
        sending = self._exchange.send(self._timed(frame), frame.holders)
        Deferred.of(sending).then(partial(self._sent, frame.call))

    def _timed(self, frame: frames.SendMessages) -> list[Envelope]:
        """Count delays from the time that is believed here: the front may not have heard of a step yet."""
        behind_ms = self._wall_less_boot_ms - frame.wall_less_boot_ms
        if -NEAR_MS <= behind_ms <= NEAR_MS:
            return frame.envelopes
        return [
            each._replace(deliver_at_ms=each.deliver_at_ms + behind_ms) if each.is_relative else each
            for each in frame.envelopes
        ]

    def _sent(self, call: int, sent: Deferred[Sequence[SendReceipt]]) -> None:
        if sent.error is not None:
            self._fail(call, sent.error, "SendMessage")
        else:
            self._say(frames.Sent(call, sent.value))  # type: ignore[arg-type]  # any sequence will do

    def _receive(self, frame: frames.ReceiveMessages) -> None:
        wanted = Receive(
            frame.group,
            Subscription(frame.topic, frame.queue_id, frozenset(frame.tags), frame.sql),
            *(frame.batch_max, frame.invisible_ms, frame.wait_ms, frame.is_renewed),
        )
        task = self._tasks[frame.call] = asyncio.get_running_loop().create_task(self._received(frame, wanted))
        task.add_done_callback(lambda _: self._tasks.pop(frame.call, None))

    async def _received(self, frame: frames.ReceiveMessages, wanted: Receive) -> None:
        call = frame.call
        try:
            received = await self._exchange.receive(wanted, frame.client_id, frame.holders)
        except Exception as error:  # noqa: BLE001 - it is told
            self._fail(call, error, "ReceiveMessage")
            return
        deliveries, over, give_back = received
        size = 0
        if deliveries:
            size = sum(len(each.payload) for each in deliveries)
            try:
                if self._link.is_behind:
                    await self._wait_for_link(size)
            except BaseException as error:
                give_back()
                if not isinstance(error, BrokerError):
                    raise
                self._fail(call, error, "ReceiveMessage")
                return
            self._handed[call] = _Handed(over, give_back, frame.is_renewed)
        self._say(frames.DeliveredMessages(call, deliveries), size)  # type: ignore[arg-type]  # any sequence will do

    async def _wait_for_link(self, size: int) -> None:
        """Wait until the front has room; raises Overloaded if too much waits for that already."""
        waiting = self._accounts.open("link", "", lambda _: None)
        waiting.hold(size)
        try:
            if waiting.crowded() is not None and waiting.address.bytes_held > size:
                raise Overloaded("bytes of messages that wait for a front process", limit=waiting.address.bytes_max)
            await self._link.room()
        finally:
            waiting.hold(-size)
            self._accounts.close(waiting)

    def _over(self, frame: frames.Taken) -> None:
        handed = self._handed.pop(frame.call, None)
        if handed is None:
            return
        handed.over(True)
        if handed.is_renewed:
            now_s = self._clock.monotonic_s()
            self._taken.append(_Taken(now_s, handed.over))
            while self._taken[0].at_s < now_s - _IN_DOUBT_S:
                self._taken.popleft()

    def _not_taken(self, frame: frames.NotTaken) -> None:
        handed = self._handed.pop(frame.call, None)
        if handed is None:
            return
        if frame.was_wanted:
            handed.over(False)
        else:
            handed.give_back()

    def _ack(self, group: str, topic: str, asked: Sequence[frames.Ack]) -> None:
        """Acknowledge what several calls ask for together: they share a look at the group, and a unit of work."""
        handles = [handle for each in asked for handle in each.receipt_handles]
        Deferred.of(self._exchange.ack(group, topic, handles)).then(partial(self._acked, asked))

    def _acked(self, asked: Sequence[frames.Ack], acked: Deferred[Sequence[Exception | None]]) -> None:
        if acked.error is not None:
            for each in asked:
                self._fail(each.call, acked.error, "AckMessage")
            return
        results = acked.value
        if not any(results):
            for each in asked:
                self._say(frames.Acked(each.call, []))
            return
        at = 0
        for each in asked:
            own, at = results[at : at + len(each.receipt_handles)], at + len(each.receipt_handles)
            failures = [None if one is None else self._failure(one, "AckMessage") for one in own]
            self._say(frames.Acked(each.call, failures))

    def _change_invisible(self, frame: frames.ChangeInvisible) -> None:
        hiding = self._exchange.change_invisible(
            frame.group,
            frame.topic,
            frame.receipt_handle,
            frame.invisible_ms,
            suspend=frame.suspend,
            caller=Caller(frame.client_id, frame.address),
        )
        Deferred.of(hiding).then(partial(self._hidden, frame.call))

    def _hidden(self, call: int, hidden: Deferred[str]) -> None:
        if hidden.error is not None:
            self._fail(call, hidden.error, "ChangeInvisibleDuration")
        else:
            self._say(frames.Hidden(call, hidden.value))

    def _cancel(self, frame: frames.Cancel) -> None:
        task = self._tasks.get(frame.call)
        if task is not None:
            task.cancel()
        else:
            self._relays.cancel(frame.call)
