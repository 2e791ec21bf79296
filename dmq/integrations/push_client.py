"""Push consumer of the official Python client, with the additions that an orderly stop needs."""

# ruff: noqa: ANN401 - the client has no types

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final

from rocketmq import ClientConfiguration, ConsumeResult, Credentials, FilterExpression, PushConsumer
from rocketmq.grpc_protocol import ChangeInvisibleDurationRequest, Code, ForwardMessageToDeadLetterQueueRequest
from rocketmq.v5.exception import BadRequestException
from rocketmq.v5.util import MessagingResultChecker

from broker_adapter.runtime.clock import SystemClock
from broker_adapter.wire.failure_reports import REFUSED_S, REPORT, TIMEOUT_S, report_of
from broker_adapter.wire.rocketmq_v2 import NOT_IMPLEMENTED
from dmq.config.contexts import Target
from retry.policy import MAX_ATTEMPTS_LIMIT

REQUEST_S: Final = 10  # for each call; a loaded machine may not start one within the default of 3 s
RECEIVES_END_S: Final = 1.0  # for cancelled receives to end
FETCHED_EACH: Final = 16  # prefetched per handler: the client checks for room only once a second
FETCHED_MIN: Final = 128
GIVES_UP: Final = MAX_ATTEMPTS_LIMIT + 1  # above every group's limit: the daemon makes a dead letter at once

Message = Any
_clock = SystemClock()


class LeftAsItIs(BaseException):
    """End a listener without a result: the client, which catches ``Exception``, neither acknowledges nor fails the
    message.
    """


class PushListener:
    """Listener that the client calls, in one of its threads."""

    def __init__(self, take: Callable[[Message], bool | None]) -> None:
        """``take`` returns whether to acknowledge a message; None: neither acknowledge nor fail it."""
        self._take = take

    def consume(self, message: Message) -> Any:
        """Return the result of ``message`` in the terms of the client."""
        is_consumed = self._take(message)
        if is_consumed is None:
            raise LeftAsItIs
        return ConsumeResult.SUCCESS if is_consumed else ConsumeResult.FAILURE


def push_client(
    target: Target,
    group: str,
    topics: Sequence[str],
    tags: str,
    *,
    parallelism: int,
    take: Callable[[Message], bool | None],
) -> PushClient:
    """Return a client that calls ``take`` with each message, in up to ``parallelism`` threads; not started yet."""
    return PushClient(
        ClientConfiguration(target.address, Credentials(target.access_key, target.secret), request_timeout=REQUEST_S),
        group,
        PushListener(take),
        {topic: FilterExpression(tags) for topic in topics},
        max_cache_message_count=max(FETCHED_MIN, FETCHED_EACH * parallelism),
        consumption_thread_count=parallelism,
        tls_enable=target.tls is not None,
    )


class PushClient(PushConsumer):  # type: ignore[misc]  # the client has no types
    """Push consumer with two additional calls, and an end to its repetitions."""

    is_cut = False

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._receiving: set[asyncio.Task[Any]] = set()
        self._is_ending = False
        self._reports_again_s = 0.0  # monotonic time of the next report to a broker that does not support it

    async def _receive_coroutine(self, *args: Any) -> Any:
        if self._is_ending:
            raise RuntimeError("the consumer stops")
        task = asyncio.current_task()
        assert task is not None
        self._receiving.add(task)
        try:
            return await super()._receive_coroutine(*args)
        finally:
            self._receiving.discard(task)

    def end_receiving(self) -> None:
        """Cancel waiting receives and start no others. The client's own stop leaves them to the broker."""

        async def end() -> None:
            self._is_ending = True
            for each in (receiving := list(self._receiving)):
                each.cancel()
            if receiving:
                await asyncio.wait(receiving, timeout=RECEIVES_END_S)

        with suppress(TimeoutError):
            asyncio.run_coroutine_threadsafe(end(), self._rpc_channel_io_loop()).result(2 * RECEIVES_END_S)

    @property
    def rpc_client(self) -> Any:
        # Its threads repeat unanswered calls for ever, and a process waits for these threads at its exit.
        if self.is_cut and threading.current_thread().name.startswith(f"{self.client_id}_message_consumption"):
            raise LeftAsItIs
        return super().rpc_client

    def _on_start_failure(self) -> None:
        with suppress(AttributeError):  # it stops parts that were never started, and so hides why the start failed
            super()._on_start_failure()

    def report(self, message: Message, error: BaseException) -> None:
        """Report why the handler of ``message`` failed, before the failure itself and on its connection. Never waits.

        The report is optional: its errors are ignored, and a broker that does not support it gets none for a while. The
        client has no such call, so its connection is used.
        """
        if _clock.monotonic_s() < self._reports_again_s:
            return

        async def send() -> None:
            channel = self.rpc_client.retrieve_or_create_channel(message.endpoints)
            call = channel._RpcChannel__async_channel.unary_unary(
                REPORT.path, REPORT.request_class.SerializeToString, REPORT.response_class.FromString
            )
            try:
                answer = await call(request, metadata=metadata, timeout=TIMEOUT_S)
                is_refused = answer.status.code == NOT_IMPLEMENTED
            except Exception as failure:  # noqa: BLE001 - the client's, and gRPC's
                code = getattr(failure, "code", None)
                is_refused = callable(code) and getattr(code(), "name", "") == "UNIMPLEMENTED"
            if is_refused:
                self._reports_again_s = _clock.monotonic_s() + REFUSED_S

        with suppress(Exception):
            namespace = self.client_configuration.namespace
            group = f"{namespace}%{self.consumer_group}" if namespace else self.consumer_group
            request, metadata = report_of(group, message.receipt_handle, error), self.sign()
            asyncio.run_coroutine_threadsafe(send(), self._rpc_channel_io_loop())

    def forward(self, message: Message) -> None:
        """Make a dead letter of ``message``, unless another consumer holds its lease by now."""
        request = self._about(ForwardMessageToDeadLetterQueueRequest, message)
        request.delivery_attempt = request.max_delivery_attempts = GIVES_UP
        try:
            self._ask(self.rpc_client.forward_message_to_dead_letter_queue_async, message, request)
        except BadRequestException as error:
            if error.code != Code.INVALID_RECEIPT_HANDLE:
                raise

    def give_back(self, message: Message) -> None:
        """Make ``message`` visible to other consumers now, without counting an attempt."""
        request = self._about(ChangeInvisibleDurationRequest, message)
        request.invisible_duration.seconds, request.suspend = 0, True
        self._ask(self.rpc_client.change_invisible_duration_async, message, request)

    def _about(self, kind: Any, message: Message) -> Any:
        request = kind(receipt_handle=message.receipt_handle, message_id=message.message_id)
        for name, resource in ((self.consumer_group, request.group), (message.topic, request.topic)):
            resource.name, resource.resource_namespace = name, self.client_configuration.namespace
        return request

    def _ask(self, call: Any, message: Message, request: Any) -> None:
        answer = call(message.endpoints, request, metadata=self.sign(), timeout=REQUEST_S).result()
        MessagingResultChecker.check(answer.status)
