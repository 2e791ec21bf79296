"""Deliveries that a client holds, and the thread that extends their invisible durations.

A receive hides a message for ``HOLD_MS``. A longer hold is extended repeatedly, with the protocol's *suspended* flag:
if the process then dies, the message is redelivered and its delivery attempt is not counted.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import structlog

from broker_adapter.runtime.clock import Clock
from broker_adapter.wire import rocketmq_v2 as wire
from broker_adapter.wire.mapping import set_duration
from dmq.client.calls import DaemonCalls, HoldLost, Told
from dmq.client.entries import GROUP, EntryFacts
from retry.sink import SinkError

log = structlog.get_logger("dmq.client")

HOLD_MS = 30_000
FACTS_MAX = 10_000
_PROTECT_AFTER_S = 1.0  # most entries are finished earlier, without a further call
_EXTEND_EVERY_S = HOLD_MS / 1000 / 3
_AGAIN_S = 1.0  # after a failed extension
_TICK_S = 0.25

Place = tuple[str, int, int]  # topic, queue, offset: the fixed position of a message


@dataclass(slots=True, eq=False)
class LeaseHold:
    """A delivery that this client holds: the ticket of an entry. Changed under the lock of ``Holds``."""

    type_name: str
    place: Place
    message_id: str
    handle: str
    turn: int = 0
    extend_at_s: float = 0.0
    is_extending: bool = False
    is_ending: bool = False
    is_over: bool = False
    after: Callable[[], None] | None = None  # called after the extension in flight

    @property
    def topic(self) -> str:
        """The topic of the message."""
        return self.place[0]


class Holds:
    """All holds of a client. Thread-safe."""

    def __init__(self, calls: DaemonCalls, clock: Clock) -> None:
        self._calls = calls
        self._clock = clock
        self._changed = threading.Condition()
        self._holds: dict[Place, LeaseHold] = {}
        self._facts: OrderedDict[tuple[str, str], EntryFacts] = OrderedDict()
        self._is_closing = False
        self.lost_total = 0
        self._keeper = threading.Thread(target=self._keep, name="dmq-sidecar-keeper", daemon=True)
        self._keeper.start()

    def count(self, topic: str = "") -> int:
        """Return the number of held entries of a topic, or of all."""
        with self._changed:
            return sum(topic in {"", hold.topic} for hold in self._holds.values())

    def hidden(self, topic: str = "") -> int:
        """Return the number of entries of a topic, or of all, that this client postponed to a future time."""
        now_ms = self._clock.now_ms()
        with self._changed:
            return sum(topic in {"", key[0]} and facts.due_at_ms > now_ms for key, facts in self._facts.items())

    def add(self, hold: LeaseHold) -> bool:
        """Add a delivery. Return False if its message is already held; only the handle is then updated."""
        with self._changed:
            if self._is_closing:
                self.give_back(hold)
                return False
            known = self._holds.get(hold.place)
            hold.extend_at_s = self._clock.monotonic_s() + _PROTECT_AFTER_S
            if known is not None and not known.is_ending:
                known.handle = hold.handle
                known.extend_at_s = hold.extend_at_s
                return False
            if known is not None:  # just released, and delivered again before the answer
                known.is_over = True
            self._holds[hold.place] = hold
            self._changed.notify_all()
            return True

    def end(self, hold: LeaseHold, then: Callable[[], None]) -> bool:
        """Call ``then`` to end a hold, now or after the extension in flight. Return False if it has already ended."""
        with self._changed:
            if hold.is_over:
                return False
            hold.is_ending = True
            if hold.is_extending:
                hold.after = then
                return True
        then()
        return True

    def ended(self, hold: LeaseHold, failure: SinkError | None) -> None:
        """Record the result of an ending; after a failure the entry is held as before."""
        with self._changed:
            hold.is_ending = False
            if failure is None or isinstance(failure, HoldLost):
                self._drop(hold)
                self.lost_total += failure is not None
            else:
                hold.extend_at_s = self._clock.monotonic_s()

    def close(self) -> None:
        """Stop extending, and release all holds: messages are visible at once, and no attempt is counted."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
            left: list[LeaseHold] = []
            for hold in list(self._holds.values()):
                self._drop(hold)
                if hold.is_ending:
                    continue
                if hold.is_extending:
                    hold.after = partial(self.give_back, hold)
                else:
                    left.append(hold)
        for hold in left:
            self.give_back(hold)
        if threading.current_thread() is not self._keeper:
            self._keeper.join(2 * _TICK_S)

    def give_back(self, hold: LeaseHold) -> None:
        """Make a message visible at once. The answer is ignored: after an error its invisible duration expires."""
        hide(self._calls, hold, 0, is_suspended=True, told=_ignore)

    # -- facts that the daemon cannot store ---------------------------------------------------------------------------

    def remember(self, topic: str, message_id: str, facts: EntryFacts) -> None:
        """Store facts about a postponed message; above ``FACTS_MAX`` the oldest are evicted."""
        with self._changed:
            self._facts[topic, message_id] = facts
            self._facts.move_to_end((topic, message_id))
            if len(self._facts) > FACTS_MAX:
                self._facts.popitem(last=False)

    def facts(self, topic: str, message_id: str) -> EntryFacts | None:
        """Return the facts about a message, or None."""
        with self._changed:
            return self._facts.get((topic, message_id))

    def forget(self, topic: str, message_id: str) -> None:
        """Remove the facts of a message that is finished or dead."""
        with self._changed:
            self._facts.pop((topic, message_id), None)

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _keep(self) -> None:
        while True:
            with self._changed:
                self._changed.wait(_TICK_S if self._holds else None)
                if self._is_closing:
                    return
                now_s = self._clock.monotonic_s()
                due = [
                    hold
                    for hold in self._holds.values()
                    if hold.extend_at_s <= now_s and not hold.is_ending and not hold.is_extending
                ]
                for hold in due:
                    hold.is_extending = True
            self._extend(due)

    def _extend(self, due: Iterable[LeaseHold]) -> None:
        for hold in due:
            handle = hold.handle
            hide(self._calls, hold, HOLD_MS, is_suspended=True, told=self._extended(hold, handle))

    def _extended(self, hold: LeaseHold, handle: str) -> Told:
        def told(answer: wire.ChangeInvisibleDurationResponse | None, failure: SinkError | None) -> None:
            with self._changed:
                hold.is_extending = False
                after, hold.after = hold.after, None
                is_current = hold.handle == handle  # False if it was delivered to us again meanwhile
                if answer is not None and failure is None and is_current:
                    hold.handle = answer.receipt_handle or handle
                is_good = failure is None or not is_current
                hold.extend_at_s = self._clock.monotonic_s() + (_EXTEND_EVERY_S if is_good else _AGAIN_S)
                is_lost = isinstance(failure, HoldLost) and is_current and not hold.is_over and after is None
                if is_lost:
                    self._drop(hold)
                    self.lost_total += 1
            if is_lost:
                log.warning("hold_lost", topic=hold.topic, message_id=hold.message_id, error=str(failure))
            if after is not None:
                after()

        return told

    def _drop(self, hold: LeaseHold) -> None:
        hold.is_over = True
        if self._holds.get(hold.place) is hold:
            del self._holds[hold.place]


def hide(calls: DaemonCalls, hold: LeaseHold, invisible_ms: int, *, is_suspended: bool, told: Told) -> None:
    """Set the invisible duration of a message; if suspended, its next delivery is not a further attempt."""
    request = wire.ChangeInvisibleDurationRequest(
        receipt_handle=hold.handle, message_id=hold.message_id, suspend=is_suspended
    )
    request.group.name, request.topic.name = GROUP, hold.topic
    set_duration(request.invisible_duration, invisible_ms)
    calls.ask("ChangeInvisibleDuration", request, told)


def _ignore(_answer: object, _failure: SinkError | None) -> None:
    """Ignore the answer."""
