"""RecallMessage and SQL filters at the protocol: which code, which text, and what clients need to be told otherwise."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine

import pytest
from support.clients.wire.protocol import Sidecar, a_message, a_receive, a_send, from_client

from broker_adapter.contracts.adapter import Subscription
from broker_adapter.runtime.clock import ManualClock
from broker_adapter.wire import rocketmq_v2 as wire
from broker_adapter.wire.mapping import set_timestamp

LATER_MS = 60_000


def run(scenario: Callable[[Sidecar, ManualClock], Coroutine[object, object, None]]) -> None:
    """Run a scenario on a sidecar over the double."""
    clock = ManualClock()
    asyncio.run(scenario(Sidecar(clock), clock))


def delayed(clock: ManualClock, message_id: str) -> wire.Message:
    """A message that waits."""
    message = a_message(message_id)
    set_timestamp(message.system_properties.delivery_timestamp, clock.now_ms() + LATER_MS)
    return message


async def send(sidecar: Sidecar, *messages: wire.Message) -> wire.SendMessageResponse:
    """Send in one call."""
    answer: wire.SendMessageResponse = await sidecar.ask("SendMessage", a_send(*messages))
    return answer


async def recall(
    sidecar: Sidecar, handle: str, topic: str = "orders", language: str = "JAVA"
) -> wire.RecallMessageResponse:
    """Recall."""
    request = wire.RecallMessageRequest(topic=wire.Resource(name=topic), recall_handle=handle)
    answer: wire.RecallMessageResponse = await sidecar.ask("RecallMessage", request, from_client(language=language))
    return answer


def test_a_send_returns_a_handle_for_pending_messages_only() -> None:
    """In the entry of the message, in the order of the request."""

    async def scenario(sidecar: Sidecar, clock: ManualClock) -> None:
        answer = await send(sidecar, a_message("01A"), delayed(clock, "01B"))
        assert [bool(entry.recall_handle) for entry in answer.entries] == [False, True]

    run(scenario)


def test_a_recall_returns_the_message_id_and_marks_repeats() -> None:
    """OK both times: the message is recalled, and will never come."""

    async def scenario(sidecar: Sidecar, clock: ManualClock) -> None:
        (entry,) = (await send(sidecar, delayed(clock, "01A"))).entries
        first = await recall(sidecar, entry.recall_handle)
        assert (first.status.code, first.status.message, first.message_id) == (wire.OK, "OK", "01A")
        clock.advance(1)
        again = await recall(sidecar, entry.recall_handle)
        assert (again.status.code, again.message_id) == (wire.OK, "01A")
        assert again.status.message == "recalled already, at 2023-11-14T22:13:20.000Z"

    run(scenario)


def test_why_a_recall_failed() -> None:
    """Delivered at a time, or unknown: 40401; Python, which takes that for success, hears 40400. Bad handles: 40000."""

    async def scenario(sidecar: Sidecar, clock: ManualClock) -> None:
        (entry,) = (await send(sidecar, delayed(clock, "01A"))).entries
        clock.advance(LATER_MS)
        for handle, why in ((entry.recall_handle, "delivered at 2023-11-14T22:14:20.000Z"), ("orders/x", "unknown")):
            for language, code in (("JAVA", wire.MESSAGE_NOT_FOUND), ("PYTHON", wire.NOT_FOUND)):
                answer = await recall(sidecar, handle, language=language)
                assert (answer.status.code, answer.message_id) == (code, "")
                assert why in answer.status.message
        for handle, topic, code in (
            ("nonsense", "orders", wire.BAD_REQUEST),
            ("", "orders", wire.BAD_REQUEST),
            (entry.recall_handle, "others", wire.TOPIC_NOT_FOUND),
            (entry.recall_handle, "a b", wire.ILLEGAL_TOPIC),
        ):
            for language in ("JAVA", "PYTHON"):
                assert (await recall(sidecar, handle, topic, language)).status.code == code

    run(scenario)


def test_a_send_under_a_recalled_id_is_answered_as_recalled() -> None:
    """40009 for that message, alone or among others, which are stored."""

    async def scenario(sidecar: Sidecar, clock: ManualClock) -> None:
        (entry,) = (await send(sidecar, delayed(clock, "01A"))).entries
        await recall(sidecar, entry.recall_handle)
        alone = await send(sidecar, a_message("01A"))
        assert alone.status.code == alone.entries[0].status.code == wire.ILLEGAL_MESSAGE_ID
        assert "was recalled at 2023-11-14T22:13:20.000Z" in alone.status.message
        mixed = await send(sidecar, a_message("01A"), a_message("01B"), delayed(clock, "01C"))
        assert mixed.status.code == wire.MULTIPLE_RESULTS
        codes = [each.status.code for each in mixed.entries]
        assert codes == [wire.ILLEGAL_MESSAGE_ID, wire.OK, wire.OK]
        assert [each.message_id for each in mixed.entries] == ["01A", "01B", "01C"]
        assert [each.envelope.message_id for each in sidecar.broker._topics["orders"]] == ["01A", "01B", "01C"]

    run(scenario)


def test_a_receive_carries_its_expression() -> None:
    """To the broker as it is; TAG expressions beside it as before."""

    async def scenario(sidecar: Sidecar, clock: ManualClock) -> None:
        request = a_receive(tags="a > 5 AND b IS NULL")
        request.filter_expression.type = wire.SQL
        frames = await sidecar.stream("ReceiveMessage", request)
        assert frames[0].status.code == wire.MESSAGE_NOT_FOUND
        (call,) = sidecar.broker.calls
        assert call[2] == Subscription("orders", -1, frozenset(), "a > 5 AND b IS NULL")

    run(scenario)


@pytest.mark.parametrize(("expression", "position"), [("a >", 4), ("", 1), ("a = 1 OR b", 10), ("x" * 9000, None)])
def test_a_wrong_expression_is_refused(expression: str, position: int | None) -> None:
    """40010 and where, before anything is created."""

    async def scenario(sidecar: Sidecar, clock: ManualClock) -> None:
        request = a_receive(tags=expression)
        request.filter_expression.type = wire.SQL
        frames = await sidecar.stream("ReceiveMessage", request)
        assert frames[0].status.code == wire.ILLEGAL_FILTER_EXPRESSION
        assert position is None or f"at position {position}" in frames[0].status.message
        assert not sidecar.broker.groups

    run(scenario)
