"""A function that consumes topics for a group, over the official Python client (rocketmq-python-client).

    @consume("orders", group="billing")
    def bill(message) -> None:                # returns: acknowledged. raises: comes again, by the group's policy
        charge(json.loads(message.body))

    run(bill)                                 # until SIGTERM or SIGINT; what is in hand is finished

At least once: what is not acknowledged when the process is killed comes again. ``retry.Permanent`` makes a dead letter
at once. The client is a push consumer: the broker renews what is in hand for as long as this process lives, three hours
at most.
"""

from __future__ import annotations

import asyncio
import json
import os
import queue
import signal
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import cache, update_wrapper
from typing import Any, Final

from broker_adapter.clock import SystemClock
from broker_adapter.extras import ExtraMissing
from broker_adapter.log import LibraryLog
from broker_adapter.topics import check_group, check_topic
from dmq.contexts import Target
from dmq.integrations.environment import target_described_by
from dmq.integrations.figures import merged
from dmq.integrations.pages import Page, served
from dmq.integrations.worker_hook import JSON, PROMETHEUS
from retry.hook.environment import EnvironmentInvalid
from retry.hook.handlers import is_async
from retry.hook.verdict import Permanent, Unreadable
from retry.policy import MAX_ATTEMPTS_LIMIT

PARALLELISM_MAX: Final = 256
TIMEOUT_S_MAX: Final = 3 * 3600.0  # the broker renews for no longer
STOP_S_DEFAULT: Final = 30.0
_START_STEPS_S: Final = (1.0, 2.0, 5.0, 10.0)
_LAST_ACK_S: Final = 3.0  # for what was consumed at the last moment, if the broker is slow to hear it
_REQUEST_S: Final = 10  # of each of the client's calls; by default 3 s, in which a loaded machine may not start one
_FETCHED_EACH: Final = 16  # fetched ahead for each handler: the client looks only once a second whether there is room
_FETCHED_MIN: Final = 128
_GIVES_UP: Final = MAX_ATTEMPTS_LIMIT + 1  # attempts that no group has: the daemon makes a dead letter at once

_log = LibraryLog("dmq.consumer")
_clock = SystemClock()
Message = Any  # rocketmq.Message; the client has no types
Function = Callable[[Message], Any]


class _LeftAsItIs(BaseException):
    """Ends a listener without an answer: the client, which catches ``Exception``, acknowledges and fails nothing."""


class _Abandoned(Exception):
    """The consumer stops, and waits no longer for this handler."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerHealth:
    """``is_well``: it is started, and no handler hangs. ``reasons`` says what is not well."""

    is_well: bool
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerStopped:
    """What ``stop`` left: handlers that had not returned; their messages come again."""

    running: int = 0


def consume(
    *topics: str,
    group: str,
    tags: str = "*",
    parallelism: int = 20,
    timeout_s: float = 900.0,
    environ: Mapping[str, str] | None = None,
) -> Callable[[Function], Consumer]:
    """Return a decorator that makes a ``Consumer`` of a function, or of a coroutine function, which stays callable.

    Nothing is opened before ``start`` or ``run``. All consumers of a group must name the same topics and ``tags``
    ("created || paid"; "*": all). Up to ``parallelism`` messages are with the function at a time. One that has not
    returned after ``timeout_s`` has failed; a coroutine is cancelled, a function goes on in its thread, which is
    replaced, so the message may be with two of them. ``environ``, by default that of the process, says where the daemon
    or the cluster's proxy is.

    ``ValueError`` for what cannot be.
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

    def decorate(function: Function) -> Consumer:
        return Consumer(function, topics, group, tags, parallelism, timeout_s, environ)

    return decorate


class Consumer:
    """A function that consumes; made by ``consume``. Thread-safe. It is started once, in the process that consumes."""

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
        self._workers = _Loop() if is_async(function) else _Threads()
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._in_hand: set[Future[None]] = set()
        self._counts: Counter[str] = Counter()
        self._hanging = 0
        self._client: Any = None
        self._is_stopping = False
        self._stopped: ConsumerStopped | None = None
        self._is_cut = threading.Event()
        update_wrapper(self, function, updated=())

    def __call__(self, message: Message) -> Any:  # noqa: ANN401 - what the function returns
        """Call the function itself, as tests of it do."""
        return self._function(message)

    # -- life ---------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Connect, and begin to consume. Raises what the client raises, among it that nobody answers."""
        with self._lock:
            if self._client is not None or self._is_stopping:
                raise RuntimeError(f"the consumer of {self.group} was started before: a stopped one stays stopped")
        client = _client(self, _target(self._environ), self._tags, self._parallelism)
        try:
            client.startup()
        except BaseException:
            client.rpc_client.stop()
            raise
        self._client = client
        _log.info("consumer_started", group=self.group, topics=list(self.topics))

    def stop(self, timeout_s: float = STOP_S_DEFAULT) -> ConsumerStopped:
        """Take nothing new, let the handlers that run finish until ``timeout_s`` is over, and disconnect.

        What was fetched and not begun is given back, which counts no attempt; a handler that has not returned has
        failed. Up to 13 s more are for a broker that does not answer. Stopping again returns the same.
        """
        with self._lock:
            if self._is_stopping or self._client is None:
                self._is_stopping = True
                return self._stopped or ConsumerStopped()
            self._is_stopping = True
        # The client waits for its threads, which wait for handlers, and for a broker that is away, without end.
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
        ending.join(_REQUEST_S)
        self._workers.close()
        self._stopped = ConsumerStopped(running=len(left))
        _log.info("consumer_stopped", group=self.group, running=len(left))
        return self._stopped

    # -- looking inside -----------------------------------------------------------------------------------------------

    def health(self) -> ConsumerHealth:
        """Say whether it consumes, for a liveness probe. While the broker is away it is well, too."""
        reasons: list[str] = []
        if self._client is None:
            reasons.append("it is not started")
        elif self._is_stopping:
            reasons.append("it is stopping")
        if self._hanging:
            reasons.append(f"{self._hanging} handlers have not returned within {self._timeout_s:.0f} s")
        return ConsumerHealth(is_well=not reasons, reasons=tuple(reasons))

    def render_prometheus(self) -> str:
        """Return the figures in Prometheus's text format."""
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

    def take(self, message: Message) -> bool:
        """Consume one message in a thread of the client; return whether it is to be acknowledged.

        Raises ``_LeftAsItIs`` for one that was given back.
        """
        done: Future[None] = Future()
        with self._lock:
            is_begun = not self._is_stopping
            if is_begun:
                self._in_hand.add(done)
        if not is_begun:
            self._give_back(message)
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
            self._bury(message)
            self._count("dead")
            return True
        except (TimeoutError, _Abandoned) as error:
            if done.done() and not isinstance(error, _Abandoned):  # the function's own
                return self._failed(error, about)
            self._hang(stop_running, about)
            return self._failed(error, about, is_logged=True)
        except BaseException as error:  # noqa: BLE001 - whatever a handler raises is a failure, sys.exit included
            return self._failed(error, about)
        self._count("acknowledged")
        return True

    def _failed(self, error: BaseException, about: Mapping[str, Any], *, is_logged: bool = False) -> bool:
        self._count("failed")
        if not is_logged:
            _log.warning(
                "message_failed", group=self.group, error=f"{type(error).__name__}: {error}", exc_info=error, **about
            )
        return False

    def _hang(self, stop_running: Callable[[Callable[[], None]], None], about: Mapping[str, Any]) -> None:
        with self._lock:
            self._hanging += 1
        if not self._is_stopping:
            _log.error("handler_hangs", group=self.group, timeout_s=self._timeout_s, **about)

        def returned() -> None:
            with self._lock:
                self._hanging -= 1

        stop_running(returned)

    def _count(self, outcome: str) -> None:
        with self._lock:
            self._counts[outcome] += 1

    def _bury(self, message: Message) -> None:
        """Make a dead letter of ``message``, however long the broker takes to hear it."""
        for pause_s in _forever(_START_STEPS_S):
            try:
                self._client.forward(message)
            except Exception as error:  # noqa: BLE001 - the client's errors, of which none is final here
                _log.warning("dead_letter_not_made", group=self.group, message_id=message.message_id, error=str(error))
            else:
                return
            self._is_cut.wait(pause_s)

    def _give_back(self, message: Message) -> None:
        try:
            self._client.give_back(message)
        except Exception as error:  # noqa: BLE001 - it comes back when its lease ends, with an attempt counted
            _log.warning("message_not_given_back", message_id=message.message_id, error=str(error))
        else:
            self._count("given_back")
        raise _LeftAsItIs


def run(*consumers: Consumer, stop_s: float = STOP_S_DEFAULT, listen: str = "") -> None:
    """Start consumers, wait for SIGTERM or SIGINT, and stop them within ``stop_s``. For the main thread of a process.

    A daemon that is away at the start is waited for. A second signal does what it did before this was called. At
    ``listen`` (host:port) ``/metrics`` and ``/health`` are served meanwhile.
    """
    ending = threading.Event()
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def end(number: int, _: object) -> None:
        ending.set()
        signal.signal(number, before[signal.Signals(number)])

    pages = {"/metrics": lambda: _metrics_page(consumers), "/health": lambda: _health_page(consumers)}
    with ExitStack() as stack:
        for number, handler in before.items():
            signal.signal(number, end)
            stack.callback(signal.signal, number, handler)
        if listen:
            stack.enter_context(served(listen, pages))
        for each in consumers:
            _start(each, ending)
        ending.wait()
        stopping = [threading.Thread(target=each.stop, args=(stop_s,), daemon=True) for each in consumers]
        for thread in stopping:
            thread.start()
        for thread in stopping:
            thread.join()


def _metrics_page(consumers: Sequence[Consumer]) -> Page:
    return Page(200, PROMETHEUS, merged(each.render_prometheus() for each in consumers))


def _health_page(consumers: Sequence[Consumer]) -> Page:
    healths = {each.group: each.health() for each in consumers}
    text = json.dumps({group: list(health.reasons) for group, health in healths.items()})
    return Page(200 if all(health.is_well for health in healths.values()) else 503, JSON, text)


def _start(consumer: Consumer, ending: threading.Event) -> None:
    for pause_s in _forever(_START_STEPS_S):
        if ending.is_set():
            return
        try:
            consumer.start()
        except (EnvironmentInvalid, ExtraMissing):
            raise
        except Exception as error:  # noqa: BLE001 - the client's errors have no base that says whether they pass
            _log.warning("consumer_not_started", group=consumer.group, error=f"{type(error).__name__}: {error}")
        else:
            return
        ending.wait(pause_s)


def _forever(steps_s: tuple[float, ...]) -> Any:  # noqa: ANN401 - an iterator
    yield from steps_s
    while True:
        yield steps_s[-1]


# -- who runs handlers -------------------------------------------------------------------------------------------------

_StopRunning = Callable[[Callable[[], None]], None]


class _Threads:
    """Runs functions in threads that keep no process from ending, each partner of one of the client's."""

    def __init__(self) -> None:
        self._of_this_thread = threading.local()

    def run(self, function: Function, message: Message, done: Future[None]) -> _StopRunning:
        """Begin; return what is called to wait no longer, with what is to be called once it has returned after all."""
        partner = getattr(self._of_this_thread, "partner", None)
        if partner is None:
            partner = self._of_this_thread.partner = queue.SimpleQueue[Any]()
            threading.Thread(target=_work, args=(partner,), name="dmq-consumer", daemon=True).start()
        over: Future[None] = Future()
        partner.put((function, message, done, over))

        def stop_running(returned: Callable[[], None]) -> None:
            del self._of_this_thread.partner
            partner.put(None)  # it ends once it is back
            over.add_done_callback(lambda _: returned())

        return stop_running

    def close(self) -> None:
        """They end with the process."""


def _work(jobs: queue.SimpleQueue[Any]) -> None:
    while (job := jobs.get()) is not None:
        function, message, done, over = job
        try:
            function(message)
        except BaseException as error:  # noqa: BLE001 - told to who waits
            with suppress(InvalidStateError):
                done.set_exception(error)
        else:
            with suppress(InvalidStateError):
                done.set_result(None)
        over.set_result(None)


class _Loop:
    """Runs coroutines on one event loop in a thread, which begins with the first one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None

    def run(self, function: Function, message: Message, done: Future[None]) -> _StopRunning:
        """As ``_Threads.run``; what is not waited for is cancelled."""

        over: Future[None] = Future()

        async def call() -> None:
            try:
                await function(message)
            except BaseException as error:  # noqa: BLE001 - told to who waits
                with suppress(InvalidStateError):
                    done.set_exception(error)
            else:
                with suppress(InvalidStateError):
                    done.set_result(None)
            over.set_result(None)

        running = asyncio.run_coroutine_threadsafe(call(), self._started())

        def stop_running(returned: Callable[[], None]) -> None:
            running.cancel()
            over.add_done_callback(lambda _: returned())

        return stop_running

    def close(self) -> None:
        """End the loop."""
        with self._lock:
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._loop.stop)

    def _started(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=self._loop.run_forever, name="dmq-consumer-loop", daemon=True).start()
            return self._loop


# -- the official client -----------------------------------------------------------------------------------------------


def _target(environ: Mapping[str, str] | None) -> Target:
    target = target_described_by(os.environ if environ is None else environ)
    if target.tls is not None and (target.tls.ca or target.tls.certificate or target.tls.server_name):
        raise EnvironmentInvalid(
            "the official Python client takes no certificates of ours: leave DMQ_TLS_CA, DMQ_TLS_CLIENT_CERT and "
            "DMQ_TLS_SERVER_NAME out, and name the authority to trust in GRPC_DEFAULT_SSL_ROOTS_FILE_PATH"
        )
    return target


def _client(consumer: Consumer, target: Target, tags: str, parallelism: int) -> Any:  # noqa: ANN401 - it has no types
    made = _client_class()
    from rocketmq import ClientConfiguration, Credentials, FilterExpression

    return made(
        ClientConfiguration(target.address, Credentials(target.access_key, target.secret), request_timeout=_REQUEST_S),
        consumer.group,
        _Listener(consumer),
        {topic: FilterExpression(tags) for topic in consumer.topics},
        max_cache_message_count=max(_FETCHED_MIN, _FETCHED_EACH * parallelism),
        consumption_thread_count=parallelism,
        tls_enable=target.tls is not None,
    )


class _Listener:
    """What the client calls, in one of its threads."""

    def __init__(self, consumer: Consumer) -> None:
        self._consumer = consumer

    def consume(self, message: Message) -> Any:  # noqa: ANN401 - the client has no types
        """Return the client's word for what became of ``message``."""
        from rocketmq import ConsumeResult

        return ConsumeResult.SUCCESS if self._consumer.take(message) else ConsumeResult.FAILURE


@cache
def _client_class() -> Any:  # noqa: ANN401 - the client has no types
    try:
        from rocketmq import PushConsumer
    except ModuleNotFoundError as error:
        text = "consume needs the official client, which is missing: pip install 'rocketmq-python-client>=5.1.2,<6'"
        raise ExtraMissing(text, name="rocketmq") from error
    from rocketmq.grpc_protocol import ChangeInvisibleDurationRequest, Code, ForwardMessageToDeadLetterQueueRequest
    from rocketmq.v5.exception import BadRequestException
    from rocketmq.v5.util import MessagingResultChecker

    class Client(PushConsumer):  # type: ignore[misc]  # the client has no types
        """The push consumer, with two calls that it has for itself alone, and an end to its repetitions."""

        is_cut = False

        @property
        def rpc_client(self) -> Any:  # noqa: ANN401 - the client has no types
            # Its threads repeat what the broker does not hear for ever, and a process waits for them at its end.
            if self.is_cut and threading.current_thread().name.startswith(f"{self.client_id}_message_consumption"):
                raise _LeftAsItIs
            return super().rpc_client

        def _on_start_failure(self) -> None:
            with suppress(AttributeError):  # it ends what it has not begun, and hides why it did not start
                super()._on_start_failure()

        def forward(self, message: Message) -> None:
            """Make a dead letter of ``message``. One that is somebody else's by now is left to him."""
            request = self._about(ForwardMessageToDeadLetterQueueRequest, message)
            request.delivery_attempt = request.max_delivery_attempts = _GIVES_UP
            try:
                self._ask(self.rpc_client.forward_message_to_dead_letter_queue_async, message, request)
            except BadRequestException as error:
                if error.code != Code.INVALID_RECEIPT_HANDLE:
                    raise

        def give_back(self, message: Message) -> None:
            """Let others have ``message`` now, and count no attempt."""
            request = self._about(ChangeInvisibleDurationRequest, message)
            request.invisible_duration.seconds, request.suspend = 0, True
            self._ask(self.rpc_client.change_invisible_duration_async, message, request)

        def _about(self, kind: Any, message: Message) -> Any:  # noqa: ANN401
            request = kind(receipt_handle=message.receipt_handle, message_id=message.message_id)
            for name, resource in ((self.consumer_group, request.group), (message.topic, request.topic)):
                resource.name, resource.resource_namespace = name, self.client_configuration.namespace
            return request

        def _ask(self, call: Any, message: Message, request: Any) -> None:  # noqa: ANN401
            answer = call(message.endpoints, request, metadata=self.sign(), timeout=_REQUEST_S).result()
            MessagingResultChecker.check(answer.status)

    return Client
