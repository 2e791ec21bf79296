"""The asynchronous driver of a send: awaits the handler, and keeps what must be kept though the caller is cancelled."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

from broker_adapter.runtime.cancellation import is_cancelled_here
from retry.hook.classify import describe
from retry.hook.handlers import Handler, receipt_of
from retry.hook.loops import Loops, failure_of
from retry.hook.sender import Ask, Flow, Keep, Message, Sender, Step, Tell, TryNow
from retry.hook.sink_calls import Patience
from retry.hook.threads import DaemonThreads
from retry.outcome import Outcome

HANDLER_THREADS = 32  # as many as the executor of an event loop has at most


class AsyncSender:
    """Sends on the caller's event loop. Calls of the sink, and sync handlers, may block it, so threads make them."""

    def __init__(self, sender: Sender, loops: Loops) -> None:
        self._sender = sender
        self._loops = loops
        self._handlers = DaemonThreads("retry-handler", HANDLER_THREADS)

    async def send(self, handler: Handler, message: Message) -> Outcome:
        """Send; if this task is cancelled, keep the message first and then be cancelled."""
        if handler.is_async:
            self._loops.note_running()
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
        try:
            step = next(flow)
            while True:
                try:
                    done, error = await self._perform(step, handler, message, patience)
                except GeneratorExit:
                    self._abandon(flow)
                    raise
                except BaseException as raised:  # noqa: BLE001 - the flow decides, also on a cancellation
                    done, error = None, raised
                step = flow.send(done) if error is None else flow.throw(error)
        except StopIteration as stop:
            outcome: Outcome = stop.value
            handler.tally.note_outcome(outcome)
            if patience.cancelled is not None:
                raise patience.cancelled from None
            return outcome

    async def _perform(
        self, step: Step, handler: Handler, message: Message, patience: Patience
    ) -> tuple[Any, BaseException | None]:
        """Return what the step gives, or what a handler raised: not every error passes through a future, or a task."""
        match step:
            case TryNow() if handler.is_async:
                try:
                    return await message.start(handler), None
                except asyncio.CancelledError as error:
                    if is_cancelled_here():
                        raise
                    return None, failure_of(error)
            case TryNow():
                return await asyncio.wrap_future(self._handlers.submit(lambda: _attempt(handler, message)))
            case Ask(call):
                return await self._sender.calls.ask_async(call, patience), None
            case Keep(call):
                return await self._sender.calls.keep_async(call, patience), None
            case Tell(call):
                await self._sender.calls.tell_async(call, patience)
                return None, None

    def _abandon(self, flow: Flow) -> None:
        """The loop went away under a send: ask the sink to keep the message, and do not wait, as nobody can."""
        with suppress(StopIteration, asyncio.CancelledError):
            step = flow.throw(asyncio.CancelledError("the event loop went away"))
            if isinstance(step, Keep | Tell):
                with suppress(TimeoutError):  # of the call; a future that it returns is not waited for
                    self._sender.calls.threads.submit(step.call).result(self._sender.patience().left_s)
            flow.close()


def _attempt(handler: Handler, message: Message) -> tuple[Any, BaseException | None]:
    try:
        return receipt_of(message.start(handler)), None
    except GeneratorExit as error:  # thrown into a generator it would end it
        return None, RuntimeError(describe(error))
    except asyncio.CancelledError as error:
        return None, failure_of(error)
    except BaseException as error:  # noqa: BLE001 - the flow decides
        return None, error
