"""Consumer function: consumes topics for a group, over the official Python client (rocketmq-python-client).

    @consume("orders", group="billing")
    def bill(message) -> None:                # returns: acknowledged. raises: retried, by the group's policy
        charge(json.loads(message.body))

    run(bill)                                 # until SIGTERM or SIGINT; messages in flight are finished

Delivery is at least once: a message that is not acknowledged when the process is killed is delivered again.
``retry.Permanent`` makes a dead letter at once. The client is a push consumer: the broker renews the leases while this
process lives, for three hours at most.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import update_wrapper
from typing import Any, Final, Self

from broker_adapter.contracts.topics import check_group, check_topic
from broker_adapter.runtime.clock import SystemClock
from broker_adapter.runtime.extras import ExtraMissing
from broker_adapter.runtime.log import LibraryLog
from dmq.config.contexts import Target
from dmq.integrations.environment import target_described_by
from dmq.integrations.figures import merged
from dmq.integrations.pages import ProbePage, served
from dmq.integrations.runners import Function, Loop, Message, StopRunning, Threads
from dmq.integrations.worker_hook import JSON, PROMETHEUS
from retry import EnvironmentInvalid, Permanent, Unreadable
from retry.hook import is_async

PARALLELISM_MAX: Final = 256
TIMEOUT_S_MAX: Final = 3 * 3600.0  # the broker renews a lease at most this long
STOP_S_DEFAULT: Final = 30.0
_START_STEPS_S: Final = (1.0, 2.0, 5.0, 10.0)
_CUT_S: Final = 10.0  # for calls in flight when the client was told not to repeat them
_CLIENT_LOG: Final = "~/logs/rocketmq_python/rocketmq_client.log"  # the only place with the reason
_INSTALL: Final = "pip install 'rocketmq-python-client>=5.1.2,<6'"
_LAST_ACK_S: Final = 3.0  # for messages consumed at the last moment, if the broker answers slowly

_log = LibraryLog("dmq.consumer")
_clock = SystemClock()


class _StartedBefore(RuntimeError):
    """A consumer is started once, so no later attempt can succeed."""


class _Abandoned(Exception):
    """The consumer stops and no longer waits for this handler."""

    def __str__(self) -> str:
        return "the consumer stopped before the handler returned"


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerHealth:
    """Health of a consumer. ``is_well``: it is started, and no handler hangs. ``reasons`` lists the faults."""

    is_well: bool
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerStopped:
    """Result of ``stop``: the number of handlers that had not returned; their messages are delivered again."""

    running: int = 0


def consume(
    *topics: str,
    group: str,
    tags: str = "*",
    parallelism: int = 20,
    timeout_s: float = 900.0,
    environ: Mapping[str, str] | None = None,
) -> Callable[[Function], ConsumerFunction]:
    """Return a decorator that turns a function or coroutine function into a ``ConsumerFunction``, which stays callable.

    No connection is opened before ``start`` or ``run``. All consumers of a group must have the same topics and ``tags``
    ("created || paid"; "*": all). Up to ``parallelism`` messages are processed at a time. A call that has not returned
    after ``timeout_s`` has failed. A coroutine is then cancelled. A function continues in its thread, which is
    replaced, so two calls may process the message at the same time. ``environ``, by default that of the process, names
    the daemon or the proxy of the cluster.

    Raise ``ValueError`` for invalid arguments.
    """
    if not topics:
        raise ValueError("consume needs a topic: name at least one")
    for topic in topics:
        if not isinstance(topic, str):
            raise TypeError('consume is called with topics and a group: @consume("orders", group="billing")')
        check_topic(topic)
    check_group(group)
    if not 1 <= parallelism <= PARALLELISM_MAX:
        raise ValueError(f"parallelism is {parallelism}, allowed is 1 to {PARALLELISM_MAX}")
    if not 0 < timeout_s <= TIMEOUT_S_MAX:
        raise ValueError(f"timeout_s is {timeout_s}, allowed is more than 0 and up to {TIMEOUT_S_MAX:.0f} s")

    def decorate(function: Function) -> ConsumerFunction:
        return ConsumerFunction(function, topics, group, tags, parallelism, timeout_s, environ)

    return decorate


class ConsumerFunction:
    """Consumer function, created by ``consume``. Thread-safe. It is started once, in the process that consumes."""

    def __init__(  # noqa: PLR0917 - made by ``consume``
        self,
        function: Function,
        topics: tuple[str, ...],
        group: str,
        tags: str,
        parallelism: int,
        timeout_s: float,
        environ: Mapping[str, str] | None,
    ) -> None:
        self.topics, self.group = topics, group
        self._function, self._tags, self._parallelism, self._timeout_s = function, tags, parallelism, timeout_s
        self._environ = environ
        self._workers = Loop() if is_async(function) else Threads()
        self._life = threading.Lock()  # of start and stop
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._in_hand: set[Future[None]] = set()
        self._counts: Counter[str] = Counter()
        self._hanging = 0
        self._client: Any = None
        self._is_stopping = False
        self._stopped: ConsumerStopped | None = None
        self._may_give_back = threading.Event()
        self._is_cut = threading.Event()
        update_wrapper(self, function, updated=())

    def __call__(self, message: Message) -> Any:  # noqa: ANN401 - the result of the function
        """Call the function itself, for example in its tests."""
        return self._function(message)

    # -- life ---------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Connect and start to consume. Raise ``RuntimeError`` on a second call.

        Exceptions of the client pass through, for example if no broker answers.
        """
        with self._life:
            if self._client is not None or self._is_stopping:
                raise _StartedBefore(f"the consumer of {self.group} was started or stopped before; create another one")
            try:
                from dmq.integrations.push_client import push_client
            except ModuleNotFoundError as error:
                if (error.name or "").partition(".")[0] != "rocketmq":
                    raise
                raise ExtraMissing(f"consume needs the official client: {_INSTALL}", name="rocketmq") from error
            client = self._client = push_client(
                _target(self._environ),
                self.group,
                self.topics,
                self._tags,
                parallelism=self._parallelism,
                take=self._take,
            )
            try:
                client.startup()
            except BaseException:
                self._client = None
                client.rpc_client.stop()
                raise
        _log.info("consumer_started", group=self.group, topics=list(self.topics))

    def stop(self, timeout_s: float = STOP_S_DEFAULT) -> ConsumerStopped:
        """Stop receiving, wait for running handlers until ``timeout_s`` has passed, and disconnect.

        Messages that were fetched but not begun are returned, without counting an attempt. A handler that has not
        returned has failed. A broker that does not answer costs up to 15 s more. Another call returns the same result.
        """
        with self._life:
            if self._stopped is None:
                with self._lock:
                    self._is_stopping = True
                self._stopped = ConsumerStopped() if self._client is None else self._stop(timeout_s)
            return self._stopped

    def _stop(self, timeout_s: float) -> ConsumerStopped:
        self._client.end_receiving()
        self._may_give_back.set()
        # The client waits without limit for its threads, which wait for handlers, and for an unavailable broker.
        ending = threading.Thread(target=self._client.shutdown, name="dmq-consumer-stop", daemon=True)
        ending.start()
        with self._idle:
            self._idle.wait_for(lambda: not self._in_hand, timeout_s)
            left = list(self._in_hand)
        for each in left:
            with suppress(InvalidStateError):
                each.set_exception(_Abandoned())
        if left:
            _log.warning("handlers_abandoned", group=self.group, running=len(left), after_s=timeout_s)
        ending.join(_LAST_ACK_S)
        self._client.is_cut = True
        self._is_cut.set()
        ending.join(_CUT_S)
        self._workers.close()
        _log.info("consumer_stopped", group=self.group, running=len(left))
        return ConsumerStopped(running=len(left))

    # -- looking inside -----------------------------------------------------------------------------------------------

    def health(self) -> ConsumerHealth:
        """Return the health for a liveness probe. An unavailable broker does not affect it."""
        reasons: list[str] = []
        if self._client is None:
            reasons.append("it is not started")
        elif self._is_stopping:
            reasons.append("it is stopping")
        if self._hanging:
            reasons.append(f"{self._hanging} handlers have not returned within {self._timeout_s:.0f} s")
        return ConsumerHealth(is_well=not reasons, reasons=tuple(reasons))

    def render_prometheus(self) -> str:
        """Return the metrics in Prometheus's text format."""
        with self._lock:
            counts, running, hanging = dict(self._counts), len(self._in_hand), self._hanging
        label = f'group="{self.group}"'
        lines = [
            "# HELP dmq_consumer_messages_total Messages by outcome.",
            "# TYPE dmq_consumer_messages_total counter",
        ]
        lines += [
            f'dmq_consumer_messages_total{{{label},outcome="{outcome}"}} {counts.get(outcome, 0)}'
            for outcome in ("acknowledged", "failed", "dead", "given_back")
        ]
        for name, about, value in (
            ("running", "Handlers that run now.", running),
            ("hanging", "Handlers that have not returned in time.", hanging),
        ):
            lines += [f"# HELP dmq_consumer_{name} {about}", f"# TYPE dmq_consumer_{name} gauge"]
            lines.append(f"dmq_consumer_{name}{{{label}}} {value}")
        return "\n".join(lines) + "\n"

    # -- consuming ----------------------------------------------------------------------------------------------------

    def _take(self, message: Message) -> bool | None:
        """Consume one message in a thread of the client. Return whether to acknowledge it; None: neither ack nor
        failure.
        """
        done: Future[None] = Future()
        with self._lock:
            is_begun = not self._is_stopping
            if is_begun:
                self._in_hand.add(done)
        if not is_begun:
            self._give_back(message)
            return None
        try:
            return self._outcome(message, done)
        finally:
            with self._idle:
                self._in_hand.discard(done)
                self._idle.notify_all()

    def _outcome(self, message: Message, done: Future[None]) -> bool:
        stop_running = self._workers.run(self._function, message, done)
        about = {"topic": message.topic, "message_id": message.message_id, "attempt": message.delivery_attempt}
        try:
            done.result(self._timeout_s)
        except (Permanent, Unreadable) as error:
            _log.warning("message_given_up", group=self.group, error=f"{type(error).__name__}: {error}", **about)
            self._client.report(message, error)
            self._bury(message)
            self._count("dead")
            return True
        except (TimeoutError, _Abandoned) as error:
            if done.done() and not isinstance(error, _Abandoned):  # raised by the function itself
                return self._failed(message, error, about)
            self._hang(stop_running, about)
            hangs = TimeoutError(f"the handler has not returned within {self._timeout_s:g} s")
            return self._failed(message, error if isinstance(error, _Abandoned) else hangs, about, is_logged=True)
        except BaseException as error:  # noqa: BLE001 - any exception of a handler is a failure, also sys.exit
            return self._failed(message, error, about)
        self._count("acknowledged")
        return True

    def _failed(
        self, message: Message, error: BaseException, about: Mapping[str, Any], *, is_logged: bool = False
    ) -> bool:
        self._client.report(message, error)
        self._count("failed")
        if not is_logged:
            _log.warning(
                "message_failed", group=self.group, error=f"{type(error).__name__}: {error}", exc_info=error, **about
            )
        return False

    def _hang(self, stop_running: StopRunning, about: Mapping[str, Any]) -> None:
        with self._lock:
            self._hanging += 1
        if not self._is_stopping:
            _log.error("handler_timed_out", group=self.group, timeout_s=self._timeout_s, **about)

        def returned() -> None:
            with self._lock:
                self._hanging -= 1

        stop_running(returned)

    def _count(self, outcome: str) -> None:
        with self._lock:
            self._counts[outcome] += 1

    def _bury(self, message: Message) -> None:
        """Make a dead letter of ``message``; retry until the broker answers."""
        for pause_s in _forever(_START_STEPS_S):
            try:
                self._client.forward(message)
            except Exception as error:  # noqa: BLE001 - no error of the client is final here
                _log.warning(
                    "dead_letter_send_failed", group=self.group, message_id=message.message_id, error=str(error)
                )
            else:
                return
            self._is_cut.wait(pause_s)

    def _give_back(self, message: Message) -> None:
        self._may_give_back.wait()  # else one of our own waiting receives would get it
        try:
            self._client.give_back(message)
        except Exception as error:  # noqa: BLE001 - it comes back when its lease ends, with an attempt counted
            _log.warning("message_return_failed", message_id=message.message_id, error=str(error))
        else:
            self._count("given_back")


class Ending:
    """Signal from a signal handler to the main thread.

    A lock is unsuitable, because the interrupted thread may hold it. The kernel may also deliver a signal to another
    thread, which does not wake this one. So Python writes a byte for each signal (``signal.set_wakeup_fd``).
    """

    def __init__(self) -> None:
        self.is_told = False
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)

    def __enter__(self) -> Self:
        self._before = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        return self

    def __exit__(self, *_: object) -> None:
        signal.set_wakeup_fd(self._before)
        self._reader.close()
        self._writer.close()

    def tell(self) -> None:
        """End all waits."""
        self.is_told = True
        with suppress(BlockingIOError):  # full of unread bytes, which also wake the reader
            self._writer.send(b"\0")

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until ``tell`` is called or the time is up."""
        until_s = None if timeout_s is None else _clock.monotonic_s() + timeout_s
        while not self.is_told:
            self._reader.settimeout(None if until_s is None else max(0.0, until_s - _clock.monotonic_s()))
            try:
                self._reader.recv(4096)
            except (TimeoutError, BlockingIOError):
                return


def run(*consumers: ConsumerFunction, stop_s: float = STOP_S_DEFAULT, listen: str = "") -> None:
    """Start consumers, wait for SIGTERM or SIGINT, and stop them within ``stop_s``. Call it in the main thread of a
    process.

    It waits for a daemon that is unavailable at the start. If a consumer can never start, all are stopped and the
    reason is raised. A second signal has the effect it had before this call. Meanwhile ``/metrics`` and ``/health`` are
    served at ``listen`` (host:port).
    """
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    pages = {"/metrics": lambda: _metrics_page(consumers), "/health": lambda: _health_page(consumers)}
    with ExitStack() as stack:
        ending = stack.enter_context(Ending())

        def end(number: int, _: object) -> None:
            signal.signal(number, before[signal.Signals(number)])
            ending.tell()

        _keep_from_children(end, before)
        for number, handler in before.items():
            signal.signal(number, end)
            stack.callback(signal.signal, number, handler)
        if listen:
            stack.enter_context(served(listen, pages))
        try:
            for each in consumers:
                _start(each, ending)
            ending.wait()
        finally:
            stopping = [threading.Thread(target=each.stop, args=(stop_s,), daemon=True) for each in consumers]
            for thread in stopping:
                thread.start()
            for thread in stopping:
                thread.join()


def _keep_from_children(ours: Callable[[int, object], None], before: Mapping[signal.Signals, Any]) -> None:
    """Restore the original signal handling in processes that handlers fork, instead of ``ours``.

    If a signal has a Python handler, a signal to a child is lost before the fork hooks run. So it is blocked until
    then.
    """
    masks = threading.local()

    def hold() -> None:
        masks.before = signal.pthread_sigmask(signal.SIG_BLOCK, before)

    def let_go() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, masks.before)

    def let_go_in_child() -> None:
        for number, handler in before.items():
            if signal.getsignal(number) is ours:
                signal.signal(number, handler)
        let_go()

    os.register_at_fork(before=hold, after_in_parent=let_go, after_in_child=let_go_in_child)


def _metrics_page(consumers: Sequence[ConsumerFunction]) -> ProbePage:
    return ProbePage(200, PROMETHEUS, merged(each.render_prometheus() for each in consumers))


def _health_page(consumers: Sequence[ConsumerFunction]) -> ProbePage:
    healths = {each.group: each.health() for each in consumers}
    text = json.dumps({group: list(health.reasons) for group, health in healths.items()})
    return ProbePage(200 if all(health.is_well for health in healths.values()) else 503, JSON, text)


def _start(consumer: ConsumerFunction, ending: Ending) -> None:
    for pause_s in _forever(_START_STEPS_S):
        if ending.is_told:
            return
        try:
            consumer.start()
        except (EnvironmentInvalid, ExtraMissing, _StartedBefore):
            raise
        except Exception as error:  # noqa: BLE001 - the client's errors have no base that marks transient ones
            what = f"{type(error).__name__}: {error}"
            _log.warning("consumer_start_failed", group=consumer.group, error=what, client_log=_CLIENT_LOG)
        else:
            return
        ending.wait(pause_s)


def _forever(steps_s: tuple[float, ...]) -> Any:  # noqa: ANN401 - an iterator
    yield from steps_s
    while True:
        yield steps_s[-1]


def _target(environ: Mapping[str, str] | None) -> Target:
    target = target_described_by(os.environ if environ is None else environ)
    if target.tls is not None and (target.tls.ca or target.tls.certificate or target.tls.server_name):
        raise EnvironmentInvalid(
            "the official Python client does not support certificates: unset DMQ_TLS_CA, DMQ_TLS_CLIENT_CERT and "
            "DMQ_TLS_SERVER_NAME, and name the trusted authority in GRPC_DEFAULT_SSL_ROOTS_FILE_PATH"
        )
    return target
