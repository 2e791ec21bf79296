"""One send: attempt it, keep it, or reject it.

The order of the steps is written once, as a generator, which yields the slow steps to its driver:

    TryNow      call the handler
    Ask         make a sink call that may block
    KeepFuture  make a call whose future must complete even if the caller is cancelled
    Tell        make a call in any case, without using its result

The synchronous driver waits, the asynchronous one awaits. Both wait at most ``keep_timeout_s`` in all, not counting the
handler. A send without a key to an available destination skips the generator.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from concurrent.futures import Future
from dataclasses import dataclass, replace
from random import Random
from typing import Any, TypeVar

from retry.hook.destinations import Permit
from retry.hook.runtime import HookLog
from retry.hook.sending.handlers import Attempt, Handler, receipt_of
from retry.hook.sending.settlement import Settler, SinkHealth
from retry.hook.sending.sink_calls import CallPatience, SinkCalls, SinkNotAsked
from retry.hook.sending.uid import make_uid
from retry.hook.verdicts import Permanent, Throttled, Unreadable, Verdict, describe, judge
from retry.outcome import Delivered, Outcome, Rejected, Spooled
from retry.policy import RetryAt, decide
from retry.sink import KEY_BYTES_MAX, UID_BYTES, DelaySink, Entry, Held, SinkClosed, SinkFull

FORKED = "this Redelivery was opened before the fork: create Redelivery in the worker (post_fork)"
CLOSED = "Redelivery is closed"
# Reasons to keep a message without an attempt.
BEHIND = "earlier messages of its key wait"
AWAY = "its destination is away"
WAITS = "it waits already"
HANDED_OVER = "handed over"
IN_ORDER = "handed over: its sink keeps the order of its key"  # such a sink reports waiting entries for every key

Call = Callable[[], Any]
_T = TypeVar("_T")


class TryNow:
    """Step: call the handler."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Ask:
    """Step: return the result of a call that may block."""

    call: Callable[[], Any]


@dataclass(frozen=True, slots=True)
class KeepFuture:
    """Step: return the result of the future that ``call`` returns; a cancellation must not abandon it."""

    call: Callable[[], Future[Any]]


@dataclass(frozen=True, slots=True)
class Tell:
    """Step: make the call in any case, and wait for it only within the remaining patience."""

    call: Callable[[], None]


Step = TryNow | Ask | KeepFuture | Tell
Flow = Generator[Step, Any, Outcome]
_TRY_NOW = TryNow()


class OutgoingMessage:
    """One message being sent. ``call``, if set, replaces the handler at the first attempt."""

    __slots__ = ("call", "created_at_ms", "is_new", "key", "payload", "uid")

    def __init__(
        self, uid: bytes, payload: bytes, key: str, created_at_ms: int, call: Call | None, *, is_new: bool
    ) -> None:
        self.uid = uid
        self.payload = payload
        self.key = key
        self.created_at_ms = created_at_ms
        self.call = call
        self.is_new = is_new  # the uid was generated for it and no sink has received it

    def attempt(self) -> Attempt:
        """Return the ``Attempt`` that a handler gets at the first attempt."""
        return Attempt(uid=self.uid, attempts=0, is_uncertain=False, created_at_ms=self.created_at_ms, key=self.key)

    def start(self, handler: Handler) -> Any:  # noqa: ANN401 - return type of the user's function
        """Start the first attempt."""
        if self.call is not None:
            return self.call()
        return handler.call(self.payload, self.attempt() if handler.takes_attempt else None)


def make_message(
    payload: bytes | bytearray | memoryview, key: str | None, uid: bytes | None, now_ms: int, call: Call | None
) -> OutgoingMessage:
    """Return a validated message; raise ``TypeError`` or ``ValueError`` if an argument is invalid. ``None`` and an
    empty key both mean no key.
    """
    if type(payload) is not bytes:
        if not isinstance(payload, bytes | bytearray | memoryview):
            raise TypeError(f"a payload is bytes, not {type(payload).__name__}")
        payload = bytes(payload)  # a copy: the caller may change its buffer
    if key is None:
        key = ""
    elif not isinstance(key, str):
        raise TypeError(f"a key is text, not {type(key).__name__}: {key!r:.40}")
    if key and len(key.encode()) > KEY_BYTES_MAX:
        raise ValueError(f"a key has at most {KEY_BYTES_MAX} bytes")
    is_new = uid is None
    if uid is None:
        uid = make_uid(now_ms)
    elif type(uid) is not bytes or len(uid) != UID_BYTES:
        raise ValueError(f"a uid has {UID_BYTES} bytes")
    return OutgoingMessage(uid, payload, key, now_ms, call, is_new=is_new)


class Sender:
    """Sends messages, with the steps in one generator. Thread-safe; holds no lock while a handler or the sink runs."""

    def __init__(
        self,
        sink: DelaySink,
        *,
        log: HookLog,
        health: SinkHealth,
        settler: Settler,
        rng: Random,
        on_spooled: Callable[[str, Spooled], None] | None,
        keep_timeout_s: float,
    ) -> None:
        self.is_child = False  # of the process that opened the sink
        self.callback_errors = 0
        self.classifier_errors = 0
        self.calls = SinkCalls(self._give_back)
        self._keep_timeout_s = keep_timeout_s
        self._sink = sink
        self._log = log
        self._health = health
        self._settler = settler
        self._rng = rng
        self._on_spooled = on_spooled

    def send(self, handler: Handler, message: OutgoingMessage) -> Outcome:
        """Send in the caller's thread; return the outcome."""
        tally = handler.tally
        if not tally.enter():
            return self.rejected_closed(handler, message)
        if message.key or handler.is_write_ahead or handler.destination.is_blocked or self.is_child:
            try:
                return self._run(self.flow(handler, message), handler, message)
            finally:
                tally.leave()
        try:
            receipt = receipt_of(message.start(handler))
        except BaseException as error:  # noqa: BLE001 - no error may lose the message
            try:
                return self._run(self.after_error(handler, message, error, None, Permit.NORMAL), handler, message)
            finally:
                tally.leave()
        handler.destination.on_success()
        tally.leave_delivered()
        return Delivered(uid=message.uid, receipt=receipt)

    def flow(self, handler: Handler, message: OutgoingMessage) -> Flow:
        """Yield the steps of a send and return its outcome; the caller has entered the tally."""
        if self.is_child:  # the sink belongs to the parent; a call could wait for a thread that does not exist here
            return (yield from self._attempt(handler, message, None, Permit.NORMAL))
        if message.key:
            try:
                behind = yield Ask(lambda: self._waiting_under(handler, message.key))
            except Exception as error:  # noqa: BLE001 - without an answer the order cannot be kept
                self._health.failed(error)
                reason = f"whether earlier messages of its key wait is not known: {describe(error)}"
                return self._reject(handler, message, "sink", reason, error)
            except BaseException as error:  # noqa: BLE001 - an interrupt, or a cancellation
                return (yield from self._interrupted(handler, message, None, error, is_attempted=False))
            if behind:
                reason = BEHIND if self._sink.can_hold else IN_ORDER
                return (yield from self._keep(handler, message, reason=reason, type_name=behind))
        if not handler.destination.admits_send():
            return (yield from self._keep_or_attempt(handler, message))
        if not handler.is_write_ahead:
            return (yield from self._attempt(handler, message, None, Permit.NORMAL))
        if not self._sink.can_hold:
            return (yield from self._keep(handler, message, reason=HANDED_OVER))
        entry = self._entry(handler, message, due_at_ms=self._first_step_ms(handler, message))
        try:
            held = yield KeepFuture(lambda: self._sink.put(entry, is_held=True))
        except Exception as error:  # noqa: BLE001 - any failure of the sink is handled alike
            return self._not_kept(handler, message, error, None, is_uncertain=False)
        self._health.worked()
        if held is None:  # other entries of its key wait by now, or the entry itself does: the drain sends it in turn
            return self._spooled(
                handler, message, entry.due_at_ms, BEHIND if message.key else WAITS, is_uncertain=False
            )
        return (yield from self._attempt(handler, message, held, Permit.NORMAL))

    def _keep_or_attempt(self, handler: Handler, message: OutgoingMessage) -> Flow:
        """Keep a message for an unavailable destination; attempt it if it cannot be kept."""
        kept: Outcome = yield from self._keep(handler, message, reason=AWAY)
        permit = handler.destination.begin(is_paced=False) if isinstance(kept, Rejected) else None
        if permit is None:
            return kept
        # Without a kept message there is no probe: a full sink would keep the breaker open for ever.
        attempted: Outcome = yield from self._attempt(handler, message, None, permit)
        if isinstance(attempted, Rejected) and isinstance(kept, Rejected) and kept.is_uncertain:
            return replace(attempted, is_uncertain=True)  # the first put may have kept it
        return attempted

    def after_error(
        self, handler: Handler, message: OutgoingMessage, error: BaseException, held: Held | None, permit: Permit
    ) -> Flow:
        """Yield the steps after a first attempt that raised ``error``, and return the outcome."""
        verdict = self.judge(handler, error)
        if not isinstance(error, Exception):  # an interrupt, a cancellation, the end of the process
            handler.destination.on_void(permit)
            return (yield from self._interrupted(handler, message, held, error, is_attempted=True))
        if isinstance(verdict, Permanent | Unreadable):
            handler.destination.on_void(permit)
            if held is not None:
                yield self._finish(held)
            reason = f"refused for good: {describe(error)}"
            return self._reject(handler, message, "permanent", reason, error, is_uncertain=verdict.is_uncertain)
        now_ms = self._sink.clock.now_ms()
        if isinstance(verdict, Throttled):
            handler.destination.on_throttled(permit, verdict.after_s)
            due_at_ms = now_ms + round(verdict.after_s * 1000)
        else:
            handler.destination.on_failure(permit, message.uid, error, verdict_type=type(verdict))
            step = decide(handler.policy, 1, now_ms, self._rng, since_ms=message.created_at_ms)
            if not isinstance(step, RetryAt):
                if held is not None:
                    yield self._finish(held)
                reason = f"its policy allows no further attempt: {describe(error)}"
                return self._reject(handler, message, "exhausted", reason, error, is_uncertain=verdict.is_uncertain)
            due_at_ms = step.at_ms
        return (
            yield from self._keep_failed(
                handler,
                message,
                held,
                due_at_ms,
                error,
                describe(error),
                is_uncertain=verdict.is_uncertain,
                is_counted=not isinstance(verdict, Throttled) and permit is Permit.NORMAL,
            )
        )

    def _interrupted(
        self, handler: Handler, message: OutgoingMessage, held: Held | None, error: BaseException, *, is_attempted: bool
    ) -> Flow:
        """Keep the message that ``error`` interrupted, then raise ``error``."""
        due_at_ms = self._first_step_ms(handler, message) if is_attempted else message.created_at_ms
        reason = f"interrupted: {describe(error)}"
        kept = self._keep_failed(
            *(handler, message, held, due_at_ms, error, reason), is_uncertain=is_attempted, is_counted=is_attempted
        )
        handler.tally.note_outcome((yield from kept))
        raise error

    def rejected_closed(self, handler: Handler, message: OutgoingMessage) -> Rejected:
        """Return the outcome of a send after ``close``."""
        rejected = self._reject(handler, message, "closed", CLOSED, None)
        handler.tally.note_outcome(rejected)
        return rejected

    def judge(self, handler: Handler, error: BaseException) -> Verdict:
        """Classify ``error`` of an attempt, and count it."""
        verdict, broken = judge(handler.classifier, error)
        if broken is not None:
            self.classifier_errors += 1
            self._log.error(
                "classifier_failed", per=(handler.type_name,), type=handler.type_name, error=describe(broken)
            )
        handler.tally.note_attempt(type(verdict).__name__.lower())
        return verdict

    def _attempt(self, handler: Handler, message: OutgoingMessage, held: Held | None, permit: Permit) -> Flow:
        try:
            receipt = yield _TRY_NOW
        except BaseException as error:  # noqa: BLE001 - no error may lose the message
            return (yield from self.after_error(handler, message, error, held, permit))
        handler.destination.on_success()
        if held is not None:
            yield self._finish(held)
        return Delivered(uid=message.uid, receipt=receipt)

    def _waiting_under(self, handler: Handler, key: str) -> str:
        """Return the name under which entries of ``key`` wait, for a new one to queue after; empty if none."""
        # A sink that cannot hold reports waiting entries for every key: all entries would use an earlier name for ever.
        names = (*handler.earlier_names, handler.type_name) if self._sink.can_hold else (handler.type_name,)
        return next((name for name in names if self._sink.has_waiting(name, key)), "")

    def _keep(self, handler: Handler, message: OutgoingMessage, *, reason: str, type_name: str = "") -> Flow:
        """Keep a message that was not attempted for the drain, due at once."""
        entry = self._entry(handler, message, due_at_ms=message.created_at_ms, type_name=type_name)
        return (yield from self._put(handler, message, entry, None, reason))

    def _keep_failed(
        self,
        handler: Handler,
        message: OutgoingMessage,
        held: Held | None,
        due_at_ms: int,
        error: BaseException,
        reason: str,
        *,
        is_uncertain: bool,
        is_counted: bool = True,
    ) -> Flow:
        """Keep a message for the drain after a failed attempt."""
        if held is not None:  # already durable, so the sender need not wait
            yield Tell(
                self._settler.asking(
                    "again",
                    handler.type_name,
                    lambda: self._sink.again(
                        held, due_at_ms, is_counted=is_counted, error=reason, is_uncertain=is_uncertain
                    ),
                )
            )
            return self._spooled(handler, message, due_at_ms, reason, is_uncertain)
        entry = self._entry(
            handler,
            message,
            due_at_ms=due_at_ms,
            attempts=1 if is_counted else 0,
            is_uncertain=is_uncertain,
            error=reason,
        )
        return (yield from self._put(handler, message, entry, error, reason))

    def _put(
        self, handler: Handler, message: OutgoingMessage, entry: Entry, error: BaseException | None, reason: str
    ) -> Flow:
        if self.is_child:
            return self._not_kept(handler, message, SinkClosed(FORKED), error, is_uncertain=entry.is_uncertain)
        try:
            yield KeepFuture(lambda: self._sink.put(entry))
        except Exception as sink_error:  # noqa: BLE001 - any failure of the sink is handled alike
            return self._not_kept(handler, message, sink_error, error, is_uncertain=entry.is_uncertain)
        self._health.worked()
        return self._spooled(handler, message, entry.due_at_ms, reason, entry.is_uncertain)

    def _spooled(
        self, handler: Handler, message: OutgoingMessage, due_at_ms: int, reason: str, is_uncertain: bool
    ) -> Spooled:
        spooled = Spooled(uid=message.uid, due_at_ms=due_at_ms, reason=reason, is_uncertain=is_uncertain)
        handler.destination.on_kept()
        log = self._log.info if reason in {HANDED_OVER, IN_ORDER} else self._log.warning
        log("send_spooled", per=(handler.type_name, reason[:40]), type=handler.type_name, reason=reason)
        if self._on_spooled is not None:
            try:
                self._on_spooled(handler.type_name, spooled)
            except Exception as error:  # noqa: BLE001 - a user's code; the message is safe
                self.callback_errors += 1
                self._log.error("callback_failed", per=("on_spooled",), callback="on_spooled", error=describe(error))
        return spooled

    def _not_kept(
        self,
        handler: Handler,
        message: OutgoingMessage,
        sink_error: BaseException,
        error: BaseException | None,
        *,
        is_uncertain: bool,
    ) -> Rejected:
        if not self.is_child:
            self._health.failed(sink_error, is_write=not isinstance(sink_error, SinkNotAsked))
        why = "full" if isinstance(sink_error, SinkFull) else "sink"
        is_in_doubt = not isinstance(sink_error, SinkFull | SinkClosed | SinkNotAsked)
        doubt = " (it may have been kept all the same)" if is_in_doubt else ""
        reason = f"it could not be kept: {describe(sink_error)}{doubt}"
        if error is not None:
            reason = f"it could not be sent: {describe(error)}; and {reason}"
        why = "forked" if self.is_child else why
        return self._reject(
            handler, message, why, reason, error or sink_error, is_uncertain=is_uncertain or is_in_doubt
        )

    def _reject(
        self,
        handler: Handler,
        message: OutgoingMessage,
        why: str,
        reason: str,
        error: BaseException | None,
        *,
        is_uncertain: bool = False,
    ) -> Rejected:
        handler.tally.note_refusal(why)
        self._log.error("send_rejected", per=(handler.type_name, why), type=handler.type_name, why=why, reason=reason)
        return Rejected(uid=message.uid, reason=reason, error=error, is_uncertain=is_uncertain)

    def _entry(
        self,
        handler: Handler,
        message: OutgoingMessage,
        *,
        due_at_ms: int,
        attempts: int = 0,
        is_uncertain: bool = False,
        error: str = "",
        type_name: str = "",
    ) -> Entry:
        is_new, message.is_new = message.is_new, False  # a put in doubt may be repeated
        return Entry(
            type_name=type_name or handler.type_name,
            uid=message.uid,
            payload=message.payload,
            key=message.key,
            created_at_ms=message.created_at_ms,
            due_at_ms=due_at_ms,
            attempts=attempts,
            is_uncertain=is_uncertain,
            error=error,
            is_new=is_new,
        )

    def _finish(self, held: Held) -> Tell:
        return Tell(self._settler.asking("finish", held.entry.type_name, lambda: self._sink.finish(held)))

    def _give_back(self, held: Held) -> None:
        """Release a message that was written ahead after its sender got an outcome in doubt: the drain sends it."""
        self._settler.settle(
            "again",
            held.entry.type_name,
            lambda: self._sink.again(held, held.entry.created_at_ms, is_counted=False),
        )

    def _first_step_ms(self, handler: Handler, message: OutgoingMessage) -> int:
        now_ms = self._sink.clock.now_ms()
        step = decide(handler.policy, 1, now_ms, self._rng, since_ms=message.created_at_ms)
        return step.at_ms if isinstance(step, RetryAt) else now_ms

    def _run(self, flow: Flow, handler: Handler, message: OutgoingMessage) -> Outcome:
        """Drive ``flow`` in this thread."""
        patience = self.patience()
        try:
            step = next(flow)
            while True:
                try:
                    done = self._perform(step, handler, message, patience)
                except GeneratorExit as error:  # thrown into the generator it would end it
                    step = flow.throw(RuntimeError(describe(error)))
                except BaseException as error:  # noqa: BLE001 - the flow decides
                    step = flow.throw(error)
                else:
                    step = flow.send(done)
        except StopIteration as stop:
            outcome: Outcome = stop.value
            handler.tally.note_outcome(outcome)
            return outcome

    def _perform(self, step: Step, handler: Handler, message: OutgoingMessage, patience: CallPatience) -> Any:  # noqa: ANN401 - result of the step
        match step:
            case TryNow():
                return receipt_of(message.start(handler))
            case Ask(call):
                return self.calls.ask(call, patience)
            case KeepFuture(call):
                return self.calls.keep(call, patience)
            case Tell(call):
                return self.calls.tell(call, patience)

    def ask(self, call: Callable[[], _T]) -> _T:
        """Return the result of a sink call outside of a send; raise ``SinkUnavailable`` on a timeout."""
        return self.calls.ask(call, self.patience())

    def patience(self) -> CallPatience:
        """Return a new time limit for the sink calls of one send."""
        return CallPatience(self._keep_timeout_s)
