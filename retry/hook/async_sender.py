"""The asynchronous driver of a send: awaits the handler, and keeps what must be kept though the caller is cancelled."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

from retry.hook.handlers import Handler, receipt_of
from retry.hook.sender import Ask, Flow, Keep, Message, Sender, Tell, TryNow
from retry.hook.sink_calls import Patience
from retry.hook.threads import DaemonThreads
from retry.outcome import Outcome

HANDLER_THREADS = 32  # as many as the executor of an event loop has at most


class AsyncSender:
    """Sends on the caller's event loop. Calls of the sink, and sync handlers, may block it, so threads make them."""

    def __init__(self, sender: Sender) -> None:
        self._sender = sender
        self._handlers = DaemonThreads("retry-handler", HANDLER_THREADS)

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
        self._handlers.close()

    def after_fork(self) -> None:
        """The threads are the parent's."""
        self._handlers.after_fork()

    async def _run(self, handler: Handler, message: Message) -> Outcome:
        flow = self._sender.flow(handler, message)
        patience = self._sender.patience()
        cancelled: BaseException | None = None
        try:
            step = next(flow)
            while True:
                try:
                    if isinstance(step, Keep | Tell):
                        doing, interrupt = await self._in_any_case(step, patience)
                        cancelled = cancelled or interrupt
                        done = doing.result()
                    else:
                        done = await self._perform(step, handler, message, patience)
                except GeneratorExit:
                    self._abandon(flow)
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

    async def _perform(self, step: TryNow | Ask, handler: Handler, message: Message, patience: Patience) -> Any:  # noqa: ANN401 - what the step gives
        if isinstance(step, Ask):
            return await self._sender.calls.ask_async(step.call, patience)
        if handler.is_async:
            return await message.start(handler)
        return await asyncio.wrap_future(self._handlers.submit(lambda: receipt_of(message.start(handler))))

    async def _in_any_case(
        self, step: Keep | Tell, patience: Patience
    ) -> tuple[asyncio.Task[Any], asyncio.CancelledError | None]:
        """Wait for what must be done, and longer than the caller's patience; also return the cancellation."""
        calls = self._sender.calls
        doing: asyncio.Task[Any]
        if isinstance(step, Keep):
            doing = asyncio.ensure_future(calls.keep_async(step.call, patience))
        else:
            doing = asyncio.ensure_future(calls.tell_async(step.call, patience))
        cancelled: asyncio.CancelledError | None = None
        while not doing.done():
            try:
                await asyncio.wait([doing])
            except asyncio.CancelledError as error:
                cancelled = error
        return doing, cancelled

    def _abandon(self, flow: Flow) -> None:
        """The loop went away under a send: ask the sink to keep the message, and do not wait, as nobody can."""
        with suppress(StopIteration, asyncio.CancelledError):
            step = flow.throw(asyncio.CancelledError("the event loop went away"))
            if isinstance(step, Keep | Tell):
                with suppress(TimeoutError):  # of the call; a future that it returns is not waited for
                    self._sender.calls.threads.submit(step.call).result(self._sender.patience().left_s)
            flow.close()
