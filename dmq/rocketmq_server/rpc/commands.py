"""Commands to connected clients over their telemetry streams, and the answers."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from typing import NamedTuple

from broker_adapter.contracts.errors import BrokerError, Overloaded, Refused, Rule
from broker_adapter.wire import rocketmq_v2 as wire
from dmq.rocketmq_server.codec import mapping
from dmq.rocketmq_server.codec.codes import OK_STATUS
from dmq.rocketmq_server.sessions.sessions import Sessions

ASKED_MAX = 64  # pending commands to all clients together
STACK_CHARS_MAX = 1024 * 1024


class NoAnswer(BrokerError):
    """The client did not answer in time, or disconnected; it may still execute the command."""

    retriable = True


class DirectConsumeResult(NamedTuple):
    """The result of a message that a client consumed once on command; ``code`` is one of the protocol's."""

    code: int
    text: str


class Commands:
    """Sender of commands. A frame is ignored unless it answers a command to the same client."""

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions
        self._asked: dict[str, tuple[str, asyncio.Future[wire.TelemetryCommand]]] = {}  # by nonce

    async def stack(self, client_id: str, timeout_s: float) -> str:
        """Return the thread stacks of a client as text, in the format of its language.

        Raises ``Refused(NOT_FOUND)`` for a client without a stream, ``NoAnswer`` and ``Overloaded``.
        """
        answer = await self._ask(
            client_id,
            timeout_s,
            lambda nonce: wire.TelemetryCommand(
                status=OK_STATUS, print_thread_stack_trace_command=wire.PrintThreadStackTraceCommand(nonce=nonce)
            ),
        )
        if not answer.HasField("thread_stack_trace"):
            raise NoAnswer(f"the client {client_id} answered without its stack")
        return answer.thread_stack_trace.thread_stack_trace[:STACK_CHARS_MAX]

    async def verify(self, client_id: str, payload: bytes, timeout_s: float) -> DirectConsumeResult:
        """Command a push consumer to consume a stored message once, outside its group's progress.

        Raises as ``stack`` does, ``Refused(REQUEST)`` for a client of another type, and ``DecodeError`` for an invalid
        payload.
        """
        session = self._sessions.get(client_id)
        if session is not None and session.client_type != wire.PUSH_CONSUMER:
            kind = wire.ClientType.Name(session.client_type)
            raise Refused(Rule.REQUEST, "only a push consumer can verify a message", value=kind)
        message = wire.Message.FromString(payload)
        mapping.make_readable(message)
        answer = await self._ask(
            client_id,
            timeout_s,
            lambda nonce: wire.TelemetryCommand(
                status=OK_STATUS, verify_message_command=wire.VerifyMessageCommand(nonce=nonce, message=message)
            ),
        )
        return DirectConsumeResult(answer.status.code, answer.status.message)

    def answered(self, client_id: str, frame: wire.TelemetryCommand) -> None:
        """Match a received frame with its pending command, if there is one."""
        if frame.HasField("thread_stack_trace"):
            nonce = frame.thread_stack_trace.nonce
        elif frame.HasField("verify_message_result"):
            nonce = frame.verify_message_result.nonce
        else:
            return
        asked, answer = self._asked.get(nonce, ("", None))
        if answer is not None and asked == client_id and not answer.done():
            answer.set_result(frame)

    async def _ask(
        self, client_id: str, timeout_s: float, question: Callable[[str], wire.TelemetryCommand]
    ) -> wire.TelemetryCommand:
        session = self._sessions.get(client_id)
        if session is None or session.outbox is None:
            raise Refused(Rule.NOT_FOUND, "no client with this id is connected", value=client_id)
        if len(self._asked) >= ASKED_MAX:
            raise Overloaded("questions to clients", limit=ASKED_MAX)
        nonce = secrets.token_hex(16)
        answer: asyncio.Future[wire.TelemetryCommand] = asyncio.get_running_loop().create_future()
        self._asked[nonce] = (client_id, answer)
        try:
            if not session.outbox.offer(question(nonce)):
                raise NoAnswer(f"the client {client_id} does not read its telemetry stream")
            async with asyncio.timeout(timeout_s):
                return await answer
        except TimeoutError:
            raise NoAnswer(f"the client {client_id} did not answer within {timeout_s:g} s") from None
        finally:
            del self._asked[nonce]
