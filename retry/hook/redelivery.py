"""``Redelivery``: keeps a failed send and repeats it until it succeeds or visibly ends in the dead set.

    redelivery = Redelivery(Spool("var/spool"))

    @redelivery.handler("order-created")
    def send_order(payload: bytes) -> None:      # raises on failure
        producer.send(...)

    outcome = redelivery.send("order-created", payload)   # Delivered | Spooled | Rejected

Delivery is at least once: a message whose attempt timed out may arrive twice, with the same uid. In mode
``on_failure`` a message is durable once ``send`` has returned. ``write_ahead`` makes it durable before the first
attempt.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from random import Random
from types import TracebackType
from typing import Any, Self, TypeVar

from broker_adapter.runtime.clock import Clock
from retry.hook.destinations import Destination
from retry.hook.draining import Attempts, Closed, Drain, close, stop_beginning
from retry.hook.environment import described_by
from retry.hook.health import CHECK_TYPE, Ages, Health, HookHealth, dry_run, judge_health
from retry.hook.metrics import HookMetrics, snapshot
from retry.hook.runtime import HookLog, Loops, close_on_sigterm, guard, keep_alive, release
from retry.hook.sending import (
    FORKED,
    MODES,
    WORKERS_MAX,
    AsyncSender,
    Call,
    Handler,
    HandlerExists,
    HandlerFunction,
    HookTally,
    Mode,
    OutgoingMessage,
    Sender,
    Settler,
    SinkHealth,
    UnknownType,
    check_type_name,
    is_async,
    make_message,
    takes_attempt,
)
from retry.hook.verdicts import Classifier, describe
from retry.outcome import Outcome, Spooled
from retry.policy import SPOOL_STEPS_MS, RetryPolicy, Table, to_plain
from retry.sink import DeadEntry, DelaySink, SinkClosed

# One attempt at once and one after each step of the table. The message is dead if the last of them fails.
SPOOL_POLICY = RetryPolicy(backoff=Table(SPOOL_STEPS_MS), max_attempts=len(SPOOL_STEPS_MS) + 1, jitter=0.1)

UNCLAIMED_AFTER_S = 10.0  # after the last registration: an application registers its handlers one by one
TIMEOUT_S_MAX = 365 * 86_400  # waits of the platform have a limit above this
Payload = bytes | bytearray | memoryview
_Function = TypeVar("_Function", bound=HandlerFunction)


class Redelivery:
    """Sends messages through handlers, and keeps failed messages in ``sink``. Thread-safe.

    ``policy``, ``mode`` and ``workers_per_type`` are the defaults for handlers. ``queue_max`` limits the fetched
    entries of a type. ``on_exhausted`` is called for each entry that moved to the dead set, ``on_spooled`` for each
    kept send. Both run in a thread of the hook or of a sender, and their errors are logged. With ``autostart`` the
    threads start at the first send, or when a handler is added that has waiting messages.

    ``drain_per_s`` limits the rate of kept messages per destination. With ``owns_sink``, ``close`` closes the sink.
    ``oldest_max_s`` is the maximum waiting time before ``health`` reports it. ``keep_timeout_s`` limits the total time
    that one send waits for the sink. ``close_timeout_s`` limits ``close``, also at the end of the process.
    """

    def __init__(
        self,
        sink: DelaySink,
        *,
        policy: RetryPolicy = SPOOL_POLICY,
        mode: Mode = "on_failure",
        workers_per_type: int = 2,
        queue_max: int = 256,
        on_exhausted: Callable[[DeadEntry], None] | None = None,
        on_spooled: Callable[[str, Spooled], None] | None = None,
        classify: Classifier | None = None,
        drain_per_s: float | None = None,
        autostart: bool = True,
        owns_sink: bool = True,
        oldest_max_s: float = 300.0,
        keep_timeout_s: float = 30.0,
        close_timeout_s: float = 5.0,
        install_signal_handlers: bool = False,
        rng: Random | None = None,
    ) -> None:
        _check_settings(mode, workers_per_type)
        if queue_max < 1:
            raise ValueError(f"queue_max is {queue_max}, it must be at least 1")
        for name, timeout_s in (("keep_timeout_s", keep_timeout_s), ("close_timeout_s", close_timeout_s)):
            if not 0 <= timeout_s <= TIMEOUT_S_MAX:
                raise ValueError(f"{name} is {timeout_s}, allowed are 0 to {TIMEOUT_S_MAX:,} seconds, a year")
        self._sink = sink
        self._policy, self._mode, self._workers = policy, mode, workers_per_type
        self._classify = classify
        self._drain_per_s = drain_per_s
        self._autostart, self._owns_sink = autostart, owns_sink
        self._oldest_max_s, self._close_timeout_s = oldest_max_s, close_timeout_s
        self._lock = threading.Lock()
        self._handlers: dict[str, Handler] = {}
        self._destinations: dict[str, Destination] = {}
        self._began_s = sink.clock.monotonic_s()
        self._is_started = False
        self._registered_s = 0.0  # time of the last registration
        self._is_child = False
        self._closed: Closed | None = None
        self._closing = threading.Lock()
        rng = rng or Random()
        self._log = HookLog(sink.clock)
        self._health = SinkHealth()
        self._settler = Settler(sink.clock, self._log, self._health)
        self._sender = Sender(
            sink,
            log=self._log,
            health=self._health,
            settler=self._settler,
            rng=rng,
            on_spooled=on_spooled,
            keep_timeout_s=keep_timeout_s,
        )
        self._loops = Loops()
        self._async_sender = AsyncSender(self._sender, self._loops)
        self._attempts = Attempts(
            *(sink, self._sender, self._settler), log=self._log, rng=rng, loops=self._loops, on_exhausted=on_exhausted
        )
        self._drain = Drain(sink, self._attempts, self._settler, self._log, self._health, queue_max)
        self._queue_max = queue_max
        guard(self)
        if install_signal_handlers:
            close_on_sigterm(self, close_timeout_s)

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None, **options: Any) -> Self:  # noqa: ANN401 - options of the constructor
        """Return a hook configured by environment variables: its sink and its options; see docs/how-to/frameworks.md.

        ``options`` are arguments that override variables. Raise ``EnvironmentInvalid`` with the variable, its value and
        the allowed values. Errors from opening a spool are raised unchanged.
        """
        sink, described = described_by(os.environ if environ is None else environ)
        try:
            return cls(sink, **{**described, **options})
        except BaseException:
            sink.close()
            raise

    @property
    def clock(self) -> Clock:
        """The clock of the sink."""
        return self._sink.clock

    def handler(
        self,
        type_name: str,
        *,
        policy: RetryPolicy | None = None,
        destination: str = "",
        classify: Classifier | None = None,
        workers: int | None = None,
        mode: Mode | None = None,
        earlier_names: Sequence[str] = (),
    ) -> Callable[[_Function], _Function]:
        """Register the decorated function as the handler of ``type_name``; return it unchanged."""

        def register(function: _Function) -> _Function:
            self.add_handler(
                type_name,
                function,
                policy=policy,
                destination=destination,
                classify=classify,
                workers=workers,
                mode=mode,
                earlier_names=earlier_names,
            )
            return function

        return register

    def add_handler(
        self,
        type_name: str,
        function: HandlerFunction,
        *,
        policy: RetryPolicy | None = None,
        destination: str = "",
        classify: Classifier | None = None,
        workers: int | None = None,
        mode: Mode | None = None,
        earlier_names: Sequence[str] = (),
    ) -> None:
        """Register ``function`` as the handler of ``type_name``, called with the payload, or with payload and
        ``Attempt``.

        The function returns once the message is sent, and raises if it was not. Types that share a ``destination``
        share its breaker. The handler also sends entries kept under ``earlier_names``, in the order of each key. A new
        entry is kept under an earlier name only to queue after entries of its key. Raise ``HandlerExists`` if a name is
        already used, ``ValueError`` for an invalid name or setting.
        """
        workers = self._workers if workers is None else workers
        mode = mode or self._mode
        _check_settings(mode, workers)
        earlier = tuple(dict.fromkeys(name for name in earlier_names if name != type_name))
        for name in (type_name, *earlier):
            if check_type_name(name) == CHECK_TYPE:
                raise ValueError(f"the type {name!r} is used by check()")
        place = destination or type_name
        with self._lock:
            self._check_free((type_name, *earlier))
            if place not in self._destinations:
                self._destinations[place] = Destination(place, self._sink.clock, self._log, self._drain_per_s)
            added = self._handlers[type_name] = Handler(
                type_name=type_name,
                function=function,
                is_async=is_async(function),
                takes_attempt=takes_attempt(function),
                policy=policy or self._policy,
                destination=self._destinations[place],
                classifier=classify or self._classify,
                workers=workers,
                is_write_ahead=mode == "write_ahead",
                tally=HookTally(),
                earlier_names=earlier,
            )
            self._registered_s = self._sink.clock.monotonic_s()
            if self._closed is not None:
                added.tally.close()
        if self._is_started:
            self._drain.start([added])
        elif self._autostart and self._has_backlog(type_name):
            self.start()

    def send(self, type_name: str, payload: Payload, *, key: str | None = None, uid: bytes | None = None) -> Outcome:
        """Send ``payload`` now, or keep it; return the outcome. Raise only for programming errors.

        Messages of one ``key`` are sent in the order in which a thread sends them: while one waits, later ones queue
        after it. ``uid`` (16 bytes) is generated if omitted; it is the same in every attempt.
        """
        handler = self._find(type_name)
        if handler.is_async:
            raise TypeError(f"the handler of {type_name!r} is async: await send_async(...)")
        return self._sender.send(handler, self.message(payload, key, uid))

    async def send_async(
        self, type_name: str, payload: Payload, *, key: str | None = None, uid: bytes | None = None
    ) -> Outcome:
        """Send as ``send`` does, on this event loop; a sync handler runs in a thread.

        If the task is cancelled while the handler runs, the message is kept first: its delivery is in doubt.
        """
        handler = self._find(type_name)
        return await self._async_sender.send(handler, self.message(payload, key, uid))

    def message(
        self, payload: Payload, key: str | None = None, uid: bytes | None = None, call: Call | None = None
    ) -> OutgoingMessage:
        """Return a validated message; raise ``TypeError`` or ``ValueError`` if an argument is invalid."""
        return make_message(payload, key, uid, self._sink.clock.now_ms(), call)

    def send_message(self, type_name: str, message: OutgoingMessage) -> Outcome:
        """Send a message returned by ``message``; for wrappers of producers, see ``durable``."""
        return self._sender.send(self._find(type_name), message)

    async def send_message_async(self, type_name: str, message: OutgoingMessage) -> Outcome:
        """Send a message returned by ``message``, on this event loop."""
        return await self._async_sender.send(self._find(type_name), message)

    def start(self) -> None:
        """Start the threads that send waiting messages; do nothing if they run already.

        If called on an event loop, async handlers are repeated on that loop, until a later send from another loop.
        """
        self._loops.note_running()
        with self._lock:
            if self._closed is not None or self._is_child:
                return
            is_first, self._is_started = not self._is_started, True
            handlers = list(self._handlers.values())
        keep_alive(self)
        self._sender.calls.threads.start()
        self._drain.start(handlers, self._log_unclaimed if is_first else None)

    def run_due(self, limit: int = 1_000) -> int:
        """Send due messages in this thread, for programs and tests without the hook's threads; return the number of
        attempts.

        The breaker applies, the drain's ramp does not. Errors of the sink are raised.
        """
        if self._is_child:
            raise SinkClosed(FORKED)
        return self._drain.run_due(list(self._handlers.values()), limit)

    def dead(self, type_name: str, *, after: bytes = b"", limit: int = 100) -> Sequence[DeadEntry]:
        """Return the dead set of a type in the order of uids, starting after ``after``."""
        names = self._names_of(type_name)
        found = [dead for name in names for dead in self._sink.dead(name, after=after, limit=limit)]
        return sorted(found, key=lambda dead: dead.entry.uid)[:limit] if len(names) > 1 else found

    def requeue(self, type_name: str, uids: Sequence[bytes]) -> int:
        """Make dead messages wait again, starting with their first attempt; return how many of ``uids`` existed."""
        return sum(self._sink.requeue(name, uids) for name in self._names_of(type_name))

    def metrics(self) -> HookMetrics:
        """Return the counts since the start, and the contents of the sink."""
        return snapshot(
            self._handlers,
            self._destinations,
            sink=self._sink,
            sender=self._sender,
            settler=self._settler,
            health=self._health,
            running=self._drain.running,
            is_closed=self._closed is not None,
        )

    def render_prometheus(self) -> str:
        """Return the metrics in Prometheus's text format."""
        return self.metrics().render_prometheus()

    def health(self) -> Health:
        """Return the health of the hook: healthy, starting with the backlog of an earlier run, or degraded with
        reasons.
        """
        destinations = list(self._destinations.values())
        successes = [one.last_success_s for one in destinations if one.last_success_s is not None]
        kept = [one.kept_since_s for one in destinations if one.kept_since_s is not None]
        now_s = self._sink.clock.monotonic_s()
        ages = Ages(
            running_s=now_s - self._began_s,
            last_success_s=now_s - max(successes) if successes else None,
            kept_s=now_s - min(kept) if kept else None,
        )
        error = "opened before the fork" if self._is_child else self._health.error
        return judge_health(self.metrics(), error, ages, self._oldest_max_s)

    def check(self) -> HookHealth:
        """Return the effective settings, and whether a message could be kept now (one is written and removed)."""
        error = ""
        try:
            if self._is_child:
                raise SinkClosed(FORKED)
            self._sender.ask(lambda: dry_run(self._sink))
        except Exception as failure:  # noqa: BLE001 - the error is the result of the check
            error = describe(failure)
        return HookHealth(is_ok=not error, error=error, settings=self._settings())

    def close(self, timeout_s: float | None = None) -> Closed:
        """Stop accepting sends, wait for running handlers, and close the sink if owned: within ``timeout_s`` in all.

        The last second of it (at most a quarter) is reserved for the sink, which always gets at least half a second.
        Unsent messages stay in the sink. Later sends are rejected. Closing again returns the same result.
        """
        timeout_s = self._close_timeout_s if timeout_s is None else timeout_s
        if self._is_child or not self._closing.acquire(timeout=max(0.0, timeout_s)):  # another thread is closing it
            return self._closed or Closed()
        try:
            if self._closed is None:
                with self._lock:
                    handlers = list(self._handlers.values())
                self._closed = close(
                    handlers,
                    drain=self._drain,
                    settler=self._settler,
                    attempts=self._attempts,
                    sink=self._sink,
                    calls=self._sender.calls,
                    health=self._health,
                    log=self._log,
                    timeout_s=timeout_s,
                    owns_sink=self._owns_sink,
                )
                self._async_sender.close()
                self._sender.calls.threads.close()
                release(self)
            return self._closed
        finally:
            self._closing.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.close)

    @property
    def close_timeout_s(self) -> float:
        """Default time limit of ``close``."""
        return self._close_timeout_s

    def begin_nothing(self) -> None:
        """Start no further send or repetition, because the process ends."""
        if not self._is_child:
            stop_beginning([handler.tally for handler in list(self._handlers.values())], self._drain)

    def close_at_exit(self, timeout_s: float) -> None:
        """Close the hook at the end of the process."""
        self.close(timeout_s)

    def after_fork(self) -> None:
        """Reset the hook in a forked child: sends still call their handlers, but nothing can be kept."""
        self._is_child = self._sender.is_child = True
        self._lock = threading.Lock()
        self._closing = threading.Lock()
        parts = (
            self._log,
            self._health,
            self._settler,
            self._sender.calls,
            self._async_sender,
            self._attempts,
            self._drain,
        )
        for part in parts:
            part.after_fork()
        for handler in self._handlers.values():
            handler.tally.after_fork()
        for destination in self._destinations.values():
            destination.after_fork()

    def _check_free(self, names: Sequence[str]) -> None:
        for name in names:
            other = next((each for each in self._handlers.values() if name in each.names), None)
            if other is not None and other.type_name == name:
                raise HandlerExists(f"the type {name!r} has a handler already")
            if other is not None:
                raise HandlerExists(f"the type {name!r} is an earlier name of {other.type_name!r}, which has a handler")

    def _find(self, type_name: str) -> Handler:
        handler = self._handlers.get(type_name)
        if handler is None:
            known = ", ".join(sorted(self._handlers)) or "none"
            raise UnknownType(f"no handler is registered for the type {type_name!r:.80}; there are: {known}")
        if not self._is_started and self._autostart:
            self.start()
        return handler

    def _names_of(self, type_name: str) -> tuple[str, ...]:
        handler = self._handlers.get(type_name)
        return (type_name,) if handler is None else handler.names_in(self._sink)

    def _waiting(self, type_name: str) -> int:
        return sum(self._sink.stats(name).waiting for name in self._names_of(type_name))

    def _has_backlog(self, type_name: str) -> bool:
        try:
            return self._sender.ask(lambda: self._waiting(type_name)) > 0
        except Exception as error:  # noqa: BLE001 - the first send starts the threads then
            self._health.failed(error)
            return False

    def _log_unclaimed(self) -> bool:
        """Log messages without a handler; return False while further handlers may still be registered."""
        if self._sink.clock.monotonic_s() - self._registered_s < UNCLAIMED_AFTER_S:
            return False
        unclaimed = self.metrics().unclaimed
        if unclaimed:
            self._log.warning("messages_unclaimed", waiting=unclaimed, types_known=sorted(self._handlers))
        return True

    def _settings(self) -> dict[str, object]:
        return {
            "sink": type(self._sink).__name__,
            "can_hold": self._sink.can_hold,
            "mode": self._mode,
            "workers_per_type": self._workers,
            "queue_max": self._queue_max,
            "drain_per_s": self._drain_per_s,
            "autostart": self._autostart,
            "owns_sink": self._owns_sink,
            "oldest_max_s": self._oldest_max_s,
            "policy": to_plain(self._policy),
            **{f"handler {name}": handler.settings() for name, handler in self._handlers.items()},
        }


def _check_settings(mode: str, workers: int) -> None:
    if mode not in MODES:
        raise ValueError(f"mode is {mode!r}, allowed are {' and '.join(MODES)}")
    if not 1 <= workers <= WORKERS_MAX:
        raise ValueError(f"workers is {workers}, allowed is 1 to {WORKERS_MAX}")
