"""What goes wrong between a front and the store process costs the call it is about, and memory that has a bound."""

from __future__ import annotations

import asyncio
import socket
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs
from support.clients.wire.protocol import GROUP, TOPIC, consumer_settings
from support.rigs.broker.rig import EmbeddedRig, an_envelope, play, until
from support.rigs.fronts.pair import MIB, FrontPair, a_receive, a_relay, joined

from broker_adapter.contracts.errors import Refused, Rule
from broker_adapter.wire import rocketmq_v2 as wire
from dmq.http2 import Status
from dmq.processes import frames
from dmq.processes.clocks import FrontClock
from dmq.processes.link import Link
from dmq.processes.store_process import StoreProcess

BODY = wire.Message(topic=TOPIC, body=b"x" * 65_536).SerializeToString()


def run(path: Path, scenario: Callable[[FrontPair, EmbeddedRig], Awaitable[None]], **options: Any) -> None:  # noqa: ANN401
    """Run a scenario over the embedded broker with one queue per topic."""

    async def over(rig: EmbeddedRig) -> None:
        await joined(rig, lambda pair: scenario(pair, rig), **options)

    asyncio.run(play(EmbeddedRig(path, on_disk=False, queues=1), over))


async def fill(rig: EmbeddedRig, count: int) -> None:
    """Store messages of 64 KiB."""
    await rig.broker.send([an_envelope(f"m-{number}", payload=BODY) for number in range(count)])


def test_a_message_that_comes_in_one_piece_with_its_call_is_read(tmp_path: Path) -> None:
    """Danger: while the store process was busy, a client's first settings came beside its stream, and were lost."""

    async def scenario(pair: FrontPair, _: EmbeddedRig) -> None:
        await pair.listen()
        settings = consumer_settings().SerializeToString()
        pair.say(a_relay(1, "Telemetry", None), frames.StreamMessage(1, settings), frames.HalfClose(1))
        piece = await pair.answer(frames.Piece, 1)
        assert wire.TelemetryCommand.FromString(piece.messages[0]).settings.subscription.group == GROUP
        pair.say(frames.More(1))
        assert (await pair.answer(frames.End, 1)).status == Status.OK

    run(tmp_path, scenario)


def test_a_call_that_cannot_be_served_is_answered_and_costs_no_other(tmp_path: Path) -> None:
    """Danger: an unknown path, or a fault in the broker, ended the link, and all connections of the front with it."""

    async def scenario(pair: FrontPair, rig: EmbeddedRig) -> None:
        def fault(*_: object) -> None:
            raise RuntimeError("a fault of ours")

        await pair.listen()
        pair.host._exchange.ack = fault  # type: ignore[method-assign, assignment]
        pair.say(
            a_relay(1, "QueryRoute", b"", path="/of.nobody/Nothing"),
            frames.Ack(2, "billing", "orders", ["handle"]),
            frames.SendMessages(3, [an_envelope()], (), 0),
            frames.More(99),
            frames.Cancel(99),
            frames.Taken(99),
        )
        assert (await pair.answer(frames.End, 1)).status == Status.INTERNAL
        assert (await pair.answer(frames.Failed, 2)).failure.kind == "unexpected"
        assert (await pair.answer(frames.Sent, 3)).receipts[0].message_id == "m-1"
        assert not pair.is_lost
        assert rig.broker is not None

    with capture_logs() as logs:
        run(tmp_path, scenario)
    assert [each["event"] for each in logs if each["log_level"] == "error"] == ["call_failed"] * 2


def test_a_call_that_is_cancelled_before_it_begins_leaves_nothing(tmp_path: Path) -> None:
    """The call and its end come in one piece: no account stays open, and nothing counts for it."""

    async def scenario(pair: FrontPair, _: EmbeddedRig) -> None:
        await pair.listen()
        pair.say(a_relay(1, "Telemetry", None), frames.StreamMessage(1, b"x" * 1000), frames.Cancel(1))
        assert (await pair.answer(frames.End, 1)).status == Status.CANCELLED
        assert pair.accounts.everyone.bytes_held == 0
        assert not pair.accounts.held_by("address", "10.0.0.7")
        assert not pair.accounts.everyone.accounts

    run(tmp_path, scenario)


def test_calls_that_are_passed_on_begin_a_few_in_a_turn(tmp_path: Path) -> None:
    """A flood of them leaves turns to messages; all are answered, but for those that were given up before."""

    async def scenario(pair: FrontPair, _: EmbeddedRig) -> None:
        await pair.listen()
        body = wire.QueryRouteRequest(topic=TOPIC).SerializeToString()
        for call in range(100):
            pair.host.on_frames([a_relay(call, "QueryRoute", body)])
        assert sum(each.task is not None for each in pair.host._relays._relayed.values()) == 16
        for call in range(90, 100):
            pair.host.on_frames([frames.Cancel(call)])
        await until(lambda: len(pair.answers(frames.End)) == 100)
        ended = {each.call: each.status for each in pair.answers(frames.End)}
        assert [ended[call] for call in range(100)] == [Status.OK] * 90 + [Status.CANCELLED] * 10
        assert pair.accounts.everyone.bytes_held == 0

    run(tmp_path, scenario)


def test_a_call_that_lost_its_room_before_it_began_is_answered_and_not_served(tmp_path: Path) -> None:
    """It holds most when others need the room, and waits for its turn."""

    async def scenario(pair: FrontPair, _: EmbeddedRig) -> None:
        await pair.listen()
        for call in range(16):
            pair.host.on_frames([a_relay(call, "QueryRoute", b"")])
        pair.host.on_frames([a_relay(16, "Telemetry", None)])
        pair.host.on_frames([frames.StreamMessage(16, b"x" * 200_000)])
        pair.host.on_frames([a_relay(17, "Telemetry", None)])
        pair.host.on_frames([frames.StreamMessage(17, b"x" * 100_000)])
        assert (await pair.answer(frames.End, 16)).status == Status.RESOURCE_EXHAUSTED
        assert not pair.answers(frames.Read, 16)
        await pair.answer(frames.Read, 17)
        assert not pair.answers(frames.Piece, 16)

    run(tmp_path, scenario, held_bytes_max=MIB)


def test_small_calls_are_bounded_too(tmp_path: Path) -> None:
    """Streams that hold next to nothing each: beyond the share of their address they are refused."""

    async def scenario(pair: FrontPair, _: EmbeddedRig) -> None:
        await pair.listen()
        for call in range(600):
            pair.host.on_frames([a_relay(call, "Telemetry", None)])
        await until(lambda: bool(pair.answers(frames.End)) and not pair.host._relays._to_begin)
        assert {each.status for each in pair.answers(frames.End)} == {Status.RESOURCE_EXHAUSTED}
        share = pair.accounts.everyone.bytes_max // 4
        assert share - 2048 < pair.accounts.held_by("address", "10.0.0.7") <= share + share // 8

    run(tmp_path, scenario, held_bytes_max=MIB)


def test_a_message_too_large_for_a_frame_fails_alone(tmp_path: Path) -> None:
    """Danger: one number of 65 bits lost all that was said in the same turn, and its callers waited for ever."""

    async def scenario(pair: FrontPair, _: EmbeddedRig) -> None:
        async def from_front() -> None:
            heard: list[Any] = []
            here, there = socket.socketpair()
            front = await Link.over(here, frames.from_store, lambda _: None, lambda: None)
            other = await Link.over(there, frames.from_front, heard.extend, lambda: None)
            store = StoreProcess(front, FrontClock(0))
            good, bad = store.ack("billing", "orders", ["handle"]), store.ack("billing", "orders", [2**70])  # type: ignore[list-item]
            with pytest.raises(frames.Unexpected):
                await bad
            await until(lambda: bool(heard))
            assert heard == [frames.Ack(1, "billing", "orders", ["handle"])]
            store.lose()
            assert good.error is not None
            front.abort()
            other.abort()
            await until(lambda: front.is_lost and other.is_lost)

        await from_front()
        await pair.listen()
        pair.link.say(frames.Hidden(1, "handle"))
        pair.link.say(frames.Hidden(2, 2**70))  # type: ignore[arg-type]
        assert (await pair.answer(frames.Hidden, 1)).receipt_handle == "handle"
        assert (await pair.answer(frames.Failed, 2)).failure.kind == "unexpected"

    run(tmp_path, scenario)
    failure = frames.failure_of(Refused(Rule.REQUEST, "too large", value=2**70, limit=-(2**70)))
    assert (failure.value, failure.limit) == (str(2**70), str(-(2**70)))
    assert frames.encode([frames.Failed(1, failure)])


def test_messages_wait_in_the_store_process_up_to_a_bound(tmp_path: Path) -> None:
    """A front that reads nothing: 4 MiB are asked for, one waits; the rest is refused, and is there afterwards."""
    high = MIB // 4

    async def scenario(pair: FrontPair, rig: EmbeddedRig) -> None:
        await fill(rig, 64)
        for call in range(32):  # as if they had waited before: while it is behind no more is read from it
            pair.host.on_frames([a_receive(call, batch_max=2)])
        held = pair.accounts.everyone
        await until(lambda: 0 < len(pair.host._tasks) <= MIB // (2 * len(BODY)))  # the others had an answer
        assert held.bytes_held <= MIB
        unsent_bytes = pair.link._transport.get_write_buffer_size() + pair.link._said_bytes
        assert unsent_bytes < high + 3 * len(BODY)
        await pair.listen()
        await until(lambda: len(pair.answers(frames.DeliveredMessages)) + len(pair.answers(frames.Failed)) == 32)
        failed = pair.answers(frames.Failed)
        assert failed
        assert {each.failure.kind for each in failed} == {"overloaded"}
        assert held.bytes_held == 0
        got = {
            each.message_id: each.delivery_attempt
            for said in pair.answers(frames.DeliveredMessages)
            for each in said.deliveries
        }
        for call in range(100, 164):  # what was refused was given back; it may take some turns
            if len(got) == 64:
                break
            pair.say(a_receive(call, batch_max=32, wait_ms=5_000))
            got |= {
                each.message_id: each.delivery_attempt
                for each in (await pair.answer(frames.DeliveredMessages, call)).deliveries
            }
        assert len(got) == 64
        assert set(got.values()) == {1}

    run(tmp_path, scenario, held_bytes_max=4 * MIB, unsent_high=high)


def test_a_receive_that_waits_for_room_and_is_cancelled_gives_its_messages_back(tmp_path: Path) -> None:
    """The next receive gets them, as the same attempt."""
    high = MIB // 4

    async def scenario(pair: FrontPair, rig: EmbeddedRig) -> None:
        await fill(rig, 20)
        pair.say(a_receive(1, batch_max=16))  # more than the link and the socket take
        await until(lambda: pair.link.is_behind)
        pair.host.on_frames([a_receive(2, batch_max=4)])
        await until(lambda: pair.accounts.everyone.bytes_held > 0)
        pair.host.on_frames([frames.Cancel(2)])
        await until(lambda: pair.accounts.everyone.bytes_held == 0)
        await pair.listen()
        await pair.answer(frames.DeliveredMessages, 1)
        pair.say(a_receive(3, batch_max=4, wait_ms=5_000))
        assert {each.delivery_attempt for each in (await pair.answer(frames.DeliveredMessages, 3)).deliveries} == {1}
        assert not pair.answers(frames.DeliveredMessages, 2)

    run(tmp_path, scenario, unsent_high=high)


def test_acknowledgements_have_their_part_of_a_turn(tmp_path: Path) -> None:
    """Danger: all that a front passed on at once were served in one go, 1,024 handles in 132 bytes each."""

    async def scenario(pair: FrontPair, rig: EmbeddedRig) -> None:
        turns = 0
        asked: list[tuple[int, str, int]] = []

        def count_turns() -> None:
            nonlocal turns
            turns += 1
            asyncio.get_running_loop().call_soon(count_turns)

        async def ack(group: str, topic: str, handles: Sequence[str]) -> Sequence[None]:
            return [None] * len(handles)

        def noted(group: str, topic: str, handles: Sequence[str]) -> Awaitable[Sequence[None]]:
            asked.append((turns, group, len(handles)))
            return ack(group, topic, handles)

        await pair.listen()
        pair.host._exchange.ack = noted  # type: ignore[method-assign, assignment]
        count_turns()
        pair.say(
            *(frames.Ack(call, "greedy", "orders", ["handle"] * 1024) for call in range(1, 9)),
            *(frames.Ack(call, "modest", "orders", ["handle"]) for call in range(9, 17)),
        )
        for call in range(1, 17):
            assert (await pair.answer(frames.Acked, call)).results == []
        assert [(group, count) for turn, group, count in asked[:3]] == [
            ("greedy", 1024),
            ("modest", 8),
            ("greedy", 1024),
        ]
        assert len(asked) == 9
        by_turn = Counter[int]()
        for turn, _, count in asked:
            by_turn[turn] += count
        assert max(by_turn.values()) < 2 * 1024

    run(tmp_path, scenario)


def test_answers_that_a_client_does_not_take_are_bounded_where_they_are_made(tmp_path: Path) -> None:
    """Sixteen pulls of 2 MiB each, none read on: those beyond the share of their address are refused."""

    async def scenario(pair: FrontPair, rig: EmbeddedRig) -> None:
        await fill(rig, 40)
        await pair.listen()
        request = wire.PullMessageRequest(group=GROUP, batch_size=32)
        request.message_queue.topic.CopyFrom(TOPIC)
        pair.say(*(a_relay(call, "PullMessage", request.SerializeToString()) for call in range(16)))
        answered, ended = frames.Piece, frames.End
        await until(lambda: all(pair.answers(answered, call) or pair.answers(ended, call) for call in range(16)))
        first = {each.call: each.messages[0] for each in reversed(pair.answers(frames.Piece))}
        codes = Counter(wire.PullMessageResponse.FromString(each).status.code for each in first.values())
        assert codes[wire.TOO_MANY_REQUESTS] + len(pair.answers(frames.End)) >= 14
        assert {each.status for each in pair.answers(frames.End)} <= {Status.RESOURCE_EXHAUSTED}
        assert pair.accounts.held_by("address", "10.0.0.7") <= pair.accounts.everyone.bytes_max // 4
        assert pair.accounts.held_by("address", "10.0.0.7") > 0
        whole = {each.call for each in pair.answers(frames.Piece)} - {each.call for each in pair.answers(frames.End)}
        for call in whole:
            while not pair.answers(frames.End, call):
                pair.say(frames.More(call))
                await asyncio.sleep(0.001)
            assert pair.answers(frames.End, call)[0].status == Status.OK
        assert pair.accounts.everyone.bytes_held == 0

    run(tmp_path, scenario, held_bytes_max=20 * MIB)
