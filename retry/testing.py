"""Tools to test code that uses the hook: an in-memory sink and a scripted producer, without threads.

clock = ManualClock()
sink = MemorySink(clock)
producer = FakeProducer(script=[ConnectionError("away"), "receipt"])
redelivery = Redelivery(sink, autostart=False)
redelivery.add_handler("order", producer.send)

assert isinstance(redelivery.send("order", b"1"), Spooled)
assert advance(redelivery, clock, 3_300) == 1      # the first step of the table, and its jitter
assert producer.sent == [b"1"]
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

from broker_adapter.runtime.clock import Clock, ManualClock, SystemClock
from retry.hook.redelivery import Redelivery
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
)

__all__ = ["FakeProducer", "ManualClock", "MemorySink", "advance", "run_due"]

Call = Literal["put", "has_waiting", "take", "finish", "again", "bury", "dead", "requeue", "stats", "types", "close"]
# A manual clock does not notify the sink, so ``take`` polls for due entries at this interval.
_LOOK_S = 0.01
_REAL = SystemClock()
_T = TypeVar("_T")


@dataclass(slots=True, eq=False)
class _Row:
    entry: Entry
    number: int  # order of arrival
    is_held: bool = False

    @property
    def name(self) -> tuple[str, str]:
        return self.entry.type_name, self.entry.key


class MemorySink:
    """In-memory ``DelaySink``. It keeps the whole contract except durability.

    ``entries_max`` limits the number of entries, to test a full sink. ``fail`` makes calls fail; ``calls`` are the
    names of the calls made. ``can_hold=False`` models a sink that cannot leave entries held by the caller.
    """

    def __init__(self, clock: Clock | None = None, *, entries_max: int = 1_000_000, can_hold: bool = True) -> None:
        self.calls: list[Call] = []
        self._clock = clock or SystemClock()
        self._can_hold = can_hold
        self._entries_max = entries_max
        self._changed = threading.Condition()
        self._rows: dict[int, _Row] = {}
        self._dead: dict[bytes, DeadEntry] = {}
        self._next = 0
        self._faults: dict[Call, deque[BaseException]] = {}
        self._is_closed = False

    @property
    def clock(self) -> Clock:
        return self._clock

    @property
    def can_hold(self) -> bool:
        return self._can_hold

    @property
    def types(self) -> list[str]:
        with self._changed:
            self._enter("types", is_noted=False)
            found = {row.entry.type_name for row in self._rows.values()}
            return sorted(found | {one.entry.type_name for one in self._dead.values()})

    @property
    def is_closed(self) -> bool:
        """Whether ``close`` was called."""
        return self._is_closed

    @property
    def entries(self) -> list[Entry]:
        """All waiting and held entries, in the order of arrival."""
        with self._changed:
            return [row.entry for row in self._rows.values()]

    def fail(self, call: Call, error: BaseException, *, times: int = 1) -> None:
        """Make the next ``times`` calls of this name fail without effect."""
        with self._changed:
            self._faults.setdefault(call, deque()).extend([error] * times)

    def heal(self) -> None:
        """Discard the faults that have not occurred yet."""
        with self._changed:
            self._faults.clear()

    def put(self, entry: Entry, *, is_held: bool = False) -> Future[Held | None]:
        def put() -> Held | None:
            _check(entry)
            if is_held and not self._can_hold:
                raise SinkError("this sink does not support holding")
            name = (entry.type_name, entry.key)
            of_key = [] if entry.is_new and not entry.key else [row for row in self._rows.values() if row.name == name]
            if not entry.is_new and any(row.entry.uid == entry.uid for row in of_key):
                return None
            if len(self._rows) >= self._entries_max:
                raise SinkFull(f"{self._entries_max} entries wait already", limit="entries_max")
            self._next += 1
            is_first = not (entry.key and of_key)
            row = self._rows[self._next] = _Row(entry, self._next, is_held and is_first)
            return Held(entry, row) if row.is_held else None

        return self._answer("put", put)

    def has_waiting(self, type_name: str, key: str) -> bool:
        with self._changed:
            self._enter("has_waiting")
            return any((row.entry.type_name, row.entry.key) == (type_name, key) for row in self._rows.values())

    def take(self, type_name: str, limit: int, timeout_s: float) -> Sequence[Held]:
        ends_at_s = _REAL.monotonic_s() + timeout_s
        with self._changed:
            while True:
                if self._is_closed:
                    return []
                self._enter("take", is_noted=False)
                if taken := self._due(type_name, limit):
                    self.calls.append("take")
                    return taken
                rest_s = ends_at_s - _REAL.monotonic_s()
                if rest_s <= 0:
                    return []
                self._changed.wait(min(rest_s, _LOOK_S))

    def finish(self, held: Held) -> Future[None]:
        return self._answer("finish", lambda: self._remove(held))

    def again(
        self, held: Held, due_at_ms: int, *, is_counted: bool, error: str = "", is_uncertain: bool = False
    ) -> Future[None]:
        def again() -> None:
            row = self._row(held)
            row.is_held = False
            row.entry = replace(
                row.entry,
                due_at_ms=due_at_ms,
                attempts=row.entry.attempts + is_counted,
                error=error[:ERROR_CHARS_MAX],
                is_uncertain=row.entry.is_uncertain or is_uncertain,
            )

        return self._answer("again", again)

    def bury(self, held: Held, death: Death, error: str, *, is_counted: bool = True) -> Future[None]:
        def bury() -> None:
            entry = self._row(held).entry
            entry = replace(entry, attempts=entry.attempts + is_counted, error=error[:ERROR_CHARS_MAX])
            self._remove(held)
            self._dead[entry.uid] = DeadEntry(entry=entry, death=death, died_at_ms=self._clock.now_ms())

        return self._answer("bury", bury)

    def dead(self, type_name: str, *, after: bytes = b"", limit: int = 100) -> Sequence[DeadEntry]:
        with self._changed:
            self._enter("dead")
            of_type = (one for uid, one in sorted(self._dead.items()) if uid > after)
            return [one for one in of_type if one.entry.type_name == type_name][:limit]

    def requeue(self, type_name: str, uids: Sequence[bytes]) -> int:
        with self._changed:
            self._enter("requeue")
            found = [
                self._dead.pop(uid)
                for uid in uids
                if uid in self._dead and self._dead[uid].entry.type_name == type_name
            ]
            for one in found:
                self._next += 1
                entry = replace(one.entry, due_at_ms=self._clock.now_ms(), attempts=0)
                self._rows[self._next] = _Row(entry, self._next)
            self._changed.notify_all()
            return len(found)

    def stats(self, type_name: str = "") -> SinkStats:
        with self._changed:
            self._enter("stats")
            rows = [row for row in self._rows.values() if type_name in {"", row.entry.type_name}]
            waiting = [row.entry for row in rows if not row.is_held]
            return SinkStats(
                waiting=len(waiting),
                waiting_bytes=sum(len(entry.payload) for entry in waiting),
                held=len(rows) - len(waiting),
                dead=sum(type_name in {"", one.entry.type_name} for one in self._dead.values()),
                oldest_at_ms=min((entry.created_at_ms for entry in waiting), default=None),
            )

    def close(self) -> None:
        with self._changed:
            if self._is_closed:
                return
            self._enter("close")
            self._is_closed = True
            self._changed.notify_all()

    def crash(self) -> MemorySink:
        """Return the sink as the next run would find it: the same entries, none held. This sink is closed."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
            heir = MemorySink(self._clock, entries_max=self._entries_max, can_hold=self._can_hold)
            heir._rows = {number: _Row(row.entry, number) for number, row in self._rows.items()}
            heir._dead = dict(self._dead)
            heir._next = self._next
            return heir

    def _due(self, type_name: str, limit: int) -> list[Held]:
        now_ms = self._clock.now_ms()
        keys: set[str] = set()
        ready: list[_Row] = []
        for row in self._rows.values():  # in order of arrival, so the first entry of a key is its head
            entry = row.entry
            if entry.type_name != type_name or (entry.key and entry.key in keys):
                continue
            if entry.key:
                keys.add(entry.key)
            if not row.is_held and entry.due_at_ms <= now_ms:
                ready.append(row)
        ready.sort(key=lambda row: (row.entry.due_at_ms, row.number))
        for row in ready[:limit]:
            row.is_held = True
        return [Held(row.entry, row) for row in ready[:limit]]

    def _answer(self, call: Call, work: Callable[[], _T]) -> Future[_T]:
        future: Future[_T] = Future()
        try:
            with self._changed:
                self._enter(call)
                result = work()
                self._changed.notify_all()
        except Exception as error:  # noqa: BLE001 - the contract: futures carry it
            future.set_exception(error)
        else:
            future.set_result(result)
        return future

    def _enter(self, call: Call, *, is_noted: bool = True) -> None:
        if is_noted:
            self.calls.append(call)
        if faults := self._faults.get(call):
            raise faults.popleft()
        if self._is_closed:
            if call == "take":
                return
            raise SinkClosed("the sink is closed")

    def _row(self, held: Held) -> _Row:
        row = held.ticket
        if not isinstance(row, _Row) or self._rows.get(row.number) is not row or not row.is_held:
            raise SinkError("the entry is not held")
        return row

    def _remove(self, held: Held) -> None:
        del self._rows[self._row(held).number]


class FakeProducer:
    """Producer whose sends follow ``script``, one item per send, and succeed after its end.

    An exception (instance or class) is raised, a function is called with the arguments, any other item is the receipt.
    ``sent`` has the first argument of each successful send, ``calls`` that of every send.
    """

    def __init__(self, script: Iterable[Any] = ()) -> None:
        self._lock = threading.Lock()
        self._script = deque(script)
        self.calls: list[Any] = []
        self.sent: list[Any] = []

    def send(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - any producer's signature
        """Send or fail according to the script."""
        first = args[0] if args else next(iter(kwargs.values()), None)
        with self._lock:
            self.calls.append(first)
            item = self._script.popleft() if self._script else f"receipt-{len(self.calls)}"
        if isinstance(item, BaseException) or (isinstance(item, type) and issubclass(item, BaseException)):
            raise item
        receipt = item(*args, **kwargs) if callable(item) else item
        with self._lock:
            self.sent.append(first)
        return receipt

    async def send_async(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - any producer's signature
        """Coroutine version of ``send``."""
        return self.send(*args, **kwargs)


def run_due(redelivery: Redelivery) -> int:
    """Send all due messages in this thread, until none is left; return the number of attempts."""
    made = 0
    while tried := redelivery.run_due():
        made += tried
    return made


def advance(redelivery: Redelivery, clock: ManualClock, ms: int, *, step_ms: int = 1_000) -> int:
    """Advance the clock by ``ms`` in steps, sending due messages after each; return the number of attempts."""
    assert step_ms >= 1
    made = run_due(redelivery)
    while ms > 0:
        clock.advance(min(step_ms, ms))
        ms -= step_ms
        made += run_due(redelivery)
    return made


def _check(entry: Entry) -> None:
    if len(entry.uid) != UID_BYTES or not entry.type_name or len(entry.key.encode()) > KEY_BYTES_MAX:
        raise SinkError("invalid entry")
