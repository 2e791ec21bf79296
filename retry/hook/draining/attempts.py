"""One repetition: call the handler with an entry of the sink, and report the result to the sink."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from random import Random

from retry.hook.destinations import Permit
from retry.hook.runtime import HookLog, LoopEnded, Loops
from retry.hook.sending import Attempt, Handler, Sender, Settler, receipt_of
from retry.hook.verdicts import Permanent, Throttled, Unreadable, Verdict, describe
from retry.policy import DeadLetter, Reason, RetryAt, RetryPolicy, decide
from retry.sink import DeadEntry, Death, DelaySink, Entry, Held

_DEATHS = {Reason.EXHAUSTED: Death.EXHAUSTED, Reason.TOO_OLD: Death.TOO_OLD}


def after_failed_attempt(
    policy: RetryPolicy, entry: Entry, verdict: Verdict, now_ms: int, rng: Random, *, wait_ms: int | None
) -> RetryAt | Death:
    """Return the next step after a failed repetition of ``entry``.

    With ``wait_ms`` the attempt is not counted (a probe, or a throttled destination), and the entry is due again after
    that time. Otherwise the policy decides.
    """
    if isinstance(verdict, Permanent):
        return Death.PERMANENT
    if isinstance(verdict, Unreadable):
        return Death.UNREADABLE
    if wait_ms is not None:
        at_ms = now_ms + wait_ms
        is_too_old = policy.max_age_ms is not None and at_ms - entry.created_at_ms > policy.max_age_ms
        return Death.TOO_OLD if is_too_old else RetryAt(at_ms)
    step = decide(policy, entry.attempts + 1, now_ms, rng, since_ms=entry.created_at_ms)
    return _DEATHS[step.reason] if isinstance(step, DeadLetter) else step


class Attempts:
    """Makes repetitions. Thread-safe; no lock is held while a handler or a callback runs."""

    def __init__(
        self,
        sink: DelaySink,
        sender: Sender,
        settler: Settler,
        *,
        log: HookLog,
        rng: Random,
        loops: Loops,
        on_exhausted: Callable[[DeadEntry], None] | None,
    ) -> None:
        self._sink = sink
        self._sender = sender
        self._settler = settler
        self._log = log
        self._rng = rng
        self._on_exhausted = on_exhausted
        self._loops = loops
        self._to_tell: deque[DeadEntry] = deque()

    def make(self, handler: Handler, held: Held, permit: Permit) -> None:
        """Send ``held`` once more. Handle every error of the handler; raise only an interrupt of the main thread."""
        entry = held.entry
        try:
            self._call(handler, entry)
        except BaseException as error:  # a worker survives every error of a handler, including sys.exit
            is_ours = isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread()
            if is_ours or isinstance(error, LoopEnded):
                handler.destination.on_void(permit)
                self._again(held, self._sink.clock.now_ms(), f"interrupted: {describe(error)}", is_uncertain=True)
                if is_ours:
                    raise
                return
            self._failed(handler, held, permit, error)
            return
        handler.destination.on_success()
        handler.tally.note_redelivered()
        self._settler.settle("finish", entry.type_name, lambda: self._sink.finish(held))

    def give_back(self, held: Held) -> None:
        """Return ``held`` to the sink unchanged."""
        self.giving_back(held)()

    def giving_back(self, held: Held) -> Callable[[], None]:
        """Return a call that returns ``held`` to the sink, for a thread that may block on the sink."""
        entry = held.entry
        return self._asking_again(held, entry.due_at_ms, entry.error, is_uncertain=entry.is_uncertain)

    def tell(self) -> None:
        """Call ``on_exhausted`` for every entry whose move to the dead set is durable."""
        while self._to_tell:
            try:
                dead = self._to_tell.popleft()
            except IndexError:  # another thread took the last one
                return
            assert self._on_exhausted is not None
            try:
                self._on_exhausted(dead)
            except Exception as error:  # noqa: BLE001 - a user's code; the entry is in the dead set
                self._sender.callback_errors += 1
                self._log.error(
                    "callback_failed", per=("on_exhausted",), callback="on_exhausted", error=describe(error)
                )

    def close(self, timeout_s: float) -> None:
        """Cancel the handlers that still run on event loops, and end the hook's own loop."""
        self._loops.close(timeout_s)

    def after_fork(self) -> None:
        """Reset the state in a forked child, which has no running attempts."""
        self._loops.after_fork()
        self._to_tell = deque()

    def _call(self, handler: Handler, entry: Entry) -> None:
        attempt = None
        if handler.takes_attempt:
            attempt = Attempt(
                uid=entry.uid,
                attempts=entry.attempts,
                is_uncertain=entry.is_uncertain,
                created_at_ms=entry.created_at_ms,
                key=entry.key,
            )
        if handler.is_async:
            self._loops.run(lambda: handler.call(entry.payload, attempt))
        else:
            receipt_of(handler.call(entry.payload, attempt))

    def _failed(self, handler: Handler, held: Held, permit: Permit, error: BaseException) -> None:
        entry = held.entry
        verdict = self._sender.judge(handler, error)
        now_ms = self._sink.clock.now_ms()
        wait_ms: int | None = None
        if isinstance(verdict, Permanent | Unreadable):
            handler.destination.on_void(permit)
        elif isinstance(verdict, Throttled):
            handler.destination.on_throttled(permit, verdict.after_s)
            wait_ms = round(verdict.after_s * 1000)
        else:
            handler.destination.on_failure(permit, entry.uid, error, verdict_type=type(verdict))
            if permit is Permit.PROBE:
                # Due after the next probe time: a single poison message must not be every probe.
                wait_ms = max(1, round(handler.destination.pause_s(is_paced=False) * 1000))
        what = after_failed_attempt(handler.policy, entry, verdict, now_ms, self._rng, wait_ms=wait_ms)
        text = describe(error)
        is_counted = wait_ms is None
        self._log.warning(
            "attempt_failed",
            per=(entry.type_name, type(error).__name__),
            type=entry.type_name,
            uid=entry.uid.hex(),
            attempt=entry.attempts + 1,
            verdict=type(verdict).__name__.lower(),
            error=text,
        )
        if isinstance(what, RetryAt):
            self._again(held, what.at_ms, text, is_uncertain=verdict.is_uncertain, is_counted=is_counted)
        else:
            self._bury(handler, held, what, text, is_counted=is_counted)

    def _again(self, held: Held, due_at_ms: int, text: str, *, is_uncertain: bool, is_counted: bool = False) -> None:
        self._asking_again(held, due_at_ms, text, is_uncertain=is_uncertain, is_counted=is_counted)()

    def _asking_again(
        self, held: Held, due_at_ms: int, text: str, *, is_uncertain: bool, is_counted: bool = False
    ) -> Callable[[], None]:
        return self._settler.asking(
            "again",
            held.entry.type_name,
            lambda: self._sink.again(held, due_at_ms, is_counted=is_counted, error=text, is_uncertain=is_uncertain),
        )

    def _bury(self, handler: Handler, held: Held, death: Death, text: str, *, is_counted: bool) -> None:
        entry = held.entry
        dead = DeadEntry(
            entry=replace(entry, attempts=entry.attempts + is_counted, error=text, is_new=False),
            death=death,
            died_at_ms=self._sink.clock.now_ms(),
        )

        def buried() -> None:  # runs in a thread of the sink, which must not run user code
            handler.tally.note_buried()
            if self._on_exhausted is not None:
                self._to_tell.append(dead)

        self._log.error(
            "message_dead",
            per=(entry.type_name, death.name),
            type=entry.type_name,
            uid=entry.uid.hex(),
            death=death.name.lower(),
            attempts=dead.entry.attempts,
            error=text,
        )
        self._settler.settle(
            "bury",
            entry.type_name,
            lambda: self._sink.bury(held, death, text, is_counted=is_counted),
            buried,
        )
        # Makes the callback prompt; if the sink is slow or unavailable, a later turn calls it.
        self._settler.wait(1.0)
        self.tell()
