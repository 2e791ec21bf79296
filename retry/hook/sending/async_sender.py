"""Asynchronous driver of a send: awaits the handler, and keeps the message even if the caller is cancelled."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

from broker_adapter.runtime.cancellation import is_cancelled_here
from retry.hook.runtime import DaemonThreads, Loops, failure_of
from retry.hook.sending.handlers import Handler, receipt_of
from retry.hook.sending.sender import Ask, Flow, KeepFuture, OutgoingMessage, Sender, Step, Tell, TryNow
from retry.hook.sending.sink_calls import CallPatience
from retry.hook.verdicts import describe
from retry.outcome import Outcome

HANDLER_THREADS = 32  # the maximum of an event loop's default executor


class AsyncSender:
    """Sends on the caller's event loop. Sink calls and sync handlers may block, so threads run them."""

    def __init__(self, sender: Sender, loops: Loops) -> None:
        self._sender = sender
        self._loops = loops
        self._handlers = DaemonThreads("retry-handler", HANDLER_THREADS)

    async def send(self, handler: Handler, message: OutgoingMessage) -> Outcome:
        """Send; if this task is cancelled, keep the message before the cancellation is raised."""
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
        """Stop the threads once they are idle."""
        self._handlers.close()

    def after_fork(self) -> None:
        """Reset the threads in a forked child: they belong to the parent."""
        self._handlers.after_fork()

    async def _run(self, handler: Handler, message: OutgoingMessage) -> Outcome:
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
        self, step: Step, handler: Handler, message: OutgoingMessage, patience: CallPatience
    ) -> tuple[Any, BaseException | None]:
        """Return the result of the step, or the error of the handler: not every error can pass through a future or a
        task.
        """
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
            case KeepFuture(call):
                return await self._sender.calls.keep_async(call, patience), None
            case Tell(call):
                await self._sender.calls.tell_async(call, patience)
                return None, None

    def _abandon(self, flow: Flow) -> None:
        """Submit the message to the sink after the loop ended during a send. Its confirmation cannot be awaited."""
        with suppress(StopIteration, asyncio.CancelledError):
            step = flow.throw(asyncio.CancelledError("the event loop went away"))
            if isinstance(step, KeepFuture | Tell):
                with suppress(TimeoutError):  # of the call; the future that it returns is not waited for
                    self._sender.calls.threads.submit(step.call).result(self._sender.patience().left_s)
            flow.close()


def _attempt(handler: Handler, message: OutgoingMessage) -> tuple[Any, BaseException | None]:
    try:
        return receipt_of(message.start(handler)), None
    except GeneratorExit as error:  # thrown into the generator it would end it
        return None, RuntimeError(describe(error))
    except asyncio.CancelledError as error:
        return None, failure_of(error)
    except BaseException as error:  # noqa: BLE001 - the flow decides
        return None, error
