"""The asynchronous driver of a send: awaits the handler, and keeps what must be kept though the caller is cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from retry.hook.handlers import Handler, receipt_of
from retry.hook.sender import Ask, Flow, Keep, Message, Sender, TryNow
from retry.outcome import Outcome

SINK_THREADS = 4


class AsyncSender:
    """Sends on the caller's event loop. Calls of the sink may block the loop, so threads make them."""

    def __init__(self, sender: Sender) -> None:
        self._sender = sender
        self._threads: ThreadPoolExecutor | None = None

    async def send(self, handler: Handler, message: Message) -> Outcome:
        """Send; if cancelled, keep the message first and then be cancelled."""
        tally = handler.tally
        if not tally.enter():
            return self._sender.rejected_closed(handler, message)
        try:
            return await self._run(handler, message)
        finally:
            tally.leave()

    def close(self) -> None:
        """Let the threads end."""
        if self._threads is not None:
            self._threads.shutdown(wait=False)

    def after_fork(self) -> None:
        """The threads are the parent's."""
        self._threads = None

    async def _run(self, handler: Handler, message: Message) -> Outcome:
        flow = self._sender.flow(handler, message)
        cancelled: BaseException | None = None
        try:
            step = next(flow)
            while True:
                try:
                    if isinstance(step, Keep):
                        keeping, interrupt = await self._keep(step)
                        cancelled = cancelled or interrupt
                        done = keeping.result()
                    else:
                        done = await self._perform(step, handler, message)
                except GeneratorExit:
                    _abandon(flow)
                    raise
                except BaseException as error:  # noqa: BLE001 - the flow decides, also on a cancellation
                    step = flow.throw(error)
                else:
                    step = flow.send(done)
        except StopIteration as stop:
            outcome: Outcome = stop.value
            handler.tally.note_outcome(outcome)
            if cancelled is not None:
                raise cancelled from None
            return outcome

    async def _perform(self, step: TryNow | Ask, handler: Handler, message: Message) -> Any:  # noqa: ANN401
        if isinstance(step, Ask):
            return await self._in_thread(step.call)
        if handler.is_async:
            return await message.start(handler)
        return await self._in_thread(lambda: receipt_of(message.start(handler)), is_handler=True)

    async def _keep(self, step: Keep) -> tuple[asyncio.Task[Any], asyncio.CancelledError | None]:
        """Wait for what must be kept, and longer than the caller's patience; also return the cancellation."""
        keeping = asyncio.ensure_future(self._kept(step))
        cancelled: asyncio.CancelledError | None = None
        while not keeping.done():
            try:
                await asyncio.wait([keeping])
            except asyncio.CancelledError as error:
                cancelled = error
        return keeping, cancelled

    async def _kept(self, step: Keep) -> Any:  # noqa: ANN401 - what the sink gives
        future = await self._in_thread(step.call)
        try:
            async with asyncio.timeout(self._sender.keep_timeout_s):
                return await asyncio.shield(asyncio.wrap_future(future))
        except TimeoutError as error:
            raise self._sender.no_answer() from error

    async def _in_thread(self, call: Callable[[], Any], *, is_handler: bool = False) -> Any:  # noqa: ANN401
        loop = asyncio.get_running_loop()
        if is_handler:  # may take long: not in the few threads that the sink is called from
            return await loop.run_in_executor(None, call)
        if self._threads is None:
            self._threads = ThreadPoolExecutor(SINK_THREADS, thread_name_prefix="retry-sink")
        return await loop.run_in_executor(self._threads, call)


def _abandon(flow: Flow) -> None:
    """The loop went away under a send: ask the sink to keep the message, and do not wait, as nobody can."""
    with suppress(StopIteration, asyncio.CancelledError):
        step = flow.throw(asyncio.CancelledError("the event loop went away"))
        if isinstance(step, Keep):
            with suppress(Exception):
                step.call()
        flow.close()
