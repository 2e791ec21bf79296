"""Topics and groups in an operator's hand: made, changed, removed, set back and forth, and what a kill leaves of it."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from unittest.mock import patch

import pytest
from support.models.store.outbox import read_outbox
from support.rigs.broker.rig import (
    GROUP,
    TOPIC,
    EmbeddedRig,
    End,
    ack,
    an_envelope,
    every_durable_broker,
    ids,
    play,
    receive,
    send,
    until,
)

from broker_adapter.contracts.errors import BrokerUnavailable, Refused, Rule
from broker_adapter.contracts.message import MessageType
from broker_adapter.contracts.topics import dead_letter_topic
from broker_adapter.contracts.transactions import Half
from dmq.broker.operations.admin import BEGIN, END, Operator
from dmq.broker.topics.registry import Group, Topic
from dmq.store.schema.keys import Family
from dmq.store.schema.topics.names import TopicSettings
from dmq.trail.events import LANE, EventKind

pytestmark = pytest.mark.contract
LATER_MS = 60_000


def rows(rig: EmbeddedRig, family: Family) -> list[tuple[bytes, bytes]]:
    return rig.store.scan(family, b"", b"\xff" * 40, limit=100_000).rows


def events(rig: EmbeddedRig, *kinds: EventKind) -> Counter[EventKind]:
    found = Counter(event.event.kind for event in read_outbox(rig.store))
    return Counter({kind: found[kind] for kind in kinds if found[kind]})


def sends(first: int, count: int) -> list[str]:
    return [f"m-{number}" for number in range(first, first + count)]


async def busy(rig: EmbeddedRig) -> None:
    """A topic with something in every place: finished, leased, unread, failed, in the lane, waiting, half; pulled."""
    await rig.set_group(GROUP, max_attempts=5, delays_ms=(1_000, 500_000))
    await send(rig, *sends(0, 6))
    first, second, third, *_ = await receive(rig, renew_for="push")
    await ack(rig, first)
    for failed in (second, third):
        await rig.broker.change_invisible(GROUP, TOPIC, failed.receipt_handle, 0)
    rig.clock.advance(1_500)
    await rig.settle()  # both are in the lane
    (again, _) = await receive(rig, renew_for="push")
    await rig.broker.change_invisible(GROUP, TOPIC, again.receipt_handle, 0)  # and one of them waits again
    await receive(rig, group="other", batch_max=2)
    await send(rig, "late", deliver_at_ms=rig.clock.now_ms() + LATER_MS)
    await rig.broker.transactions.prepare([Half(an_envelope("half"))])
    for group in ("puller", GROUP):
        await rig.broker.pulls.commit_offset(group, TOPIC, 1, 1)


async def check_gone(rig: EmbeddedRig) -> None:
    """Nothing is left of ``TOPIC``, every message has its end, and its name can be taken again."""
    assert TOPIC not in rig.broker.names.topics
    for family in (Family.TIMELINE, Family.QUEUE, Family.GROUP):
        assert rows(rig, family) == []
    assert not rig.broker.names.lanes
    assert rig.store.pending() == {}
    ends = events(rig, EventKind.EXPIRED, EventKind.RECALLED, EventKind.ROLLED_BACK, EventKind.TOPIC_REMOVED)
    assert ends == {
        EventKind.EXPIRED: 6,
        EventKind.RECALLED: 1,
        EventKind.ROLLED_BACK: 1,
        EventKind.TOPIC_REMOVED: 1,
    }
    in_lane = Counter(
        event.event.kind for event in read_outbox(rig.store) if event.event.group_id and event.event.queue_id == LANE
    )
    came = in_lane[EventKind.RETRIED] + in_lane[EventKind.RETRY_MOVED]
    assert (came, in_lane[EventKind.NACKED] + in_lane[EventKind.FILTERED]) == (3, 3)
    await send(rig, "anew")
    assert ids(await receive(rig)) == ["anew"]
    assert rig.broker.lease_count == 1


@every_durable_broker(queues=2)
async def test_a_topic_with_something_in_it_is_removed_by_force_only(rig: EmbeddedRig) -> None:
    """The refusal counts what there is, and changes nothing; forced, every message leaves with an event."""
    await busy(rig)
    before = [rows(rig, family) for family in Family]
    with pytest.raises(Refused, match=r"2 wait for their time.* by group 'other'.* by group 'workers'") as refused:
        await rig.broker.operator.remove_topic(TOPIC, is_forced=False)
    assert refused.value.rule is Rule.REQUEST
    assert [rows(rig, family) for family in Family] == before
    await rig.broker.operator.remove_topic(TOPIC, is_forced=True)
    await check_gone(rig)
    await rig.restart(End.KILL)
    assert TOPIC in rig.broker.names.topics
    assert not rig.broker.names.removing


@pytest.mark.parametrize("kill_at", range(15))
def test_a_kill_while_a_topic_is_removed_leaves_nothing_half_done(tmp_path: Path, kill_at: int) -> None:
    """Whichever unit was the last one: the next run goes on, and nobody sees the topic meanwhile."""

    async def scenario(rig: EmbeddedRig) -> None:
        await busy(rig)
        submit, left = rig.broker.commits.submit, kill_at + 1
        dead = asyncio.Event()

        def counted(ops: object, **more: object) -> asyncio.Future[object]:
            nonlocal left
            if not left:
                dead.set()
                return asyncio.get_running_loop().create_future()
            left -= 1
            return submit(ops, **more)  # type: ignore[arg-type,return-value]

        rig.broker.commits.submit = counted  # type: ignore[method-assign,assignment]
        removal = asyncio.ensure_future(rig.broker.operator.remove_topic(TOPIC, is_forced=True))
        await asyncio.wait((removal, asyncio.ensure_future(dead.wait())), return_when=asyncio.FIRST_COMPLETED)
        await rig.store.commit_async([])
        removal.cancel()
        await rig.restart(End.KILL)
        if not removal.done() or removal.cancelled():
            with pytest.raises(Refused, match="being removed"):
                await send(rig, "meanwhile")
        await until(lambda: not rig.broker.names.removing)
        await check_gone(rig)

    run(tmp_path, scenario)


def run(tmp_path: Path, scenario: Callable[[EmbeddedRig], Coroutine[object, object, None]]) -> None:
    async def opened() -> None:
        rig = EmbeddedRig(tmp_path, on_disk=False, queues=2)
        await rig.open()
        try:
            async with asyncio.timeout(30):
                await scenario(rig)
        finally:
            await rig.close()

    asyncio.run(opened())


@every_durable_broker(queues=1)
async def test_connected_clients_learn_that_a_topic_is_gone(rig: EmbeddedRig) -> None:
    """A receive that waits, one that holds a message, and one that fails it later."""
    await send(rig, "m-1")
    (held,) = await receive(rig, renew_for="push")
    waits = asyncio.ensure_future(receive(rig, wait_ms=20_000))
    await until(lambda: rig.receives_waiting == 1)
    await rig.broker.operator.remove_topic(TOPIC, is_forced=True)
    with pytest.raises(Refused) as refused:
        await waits
    assert refused.value.rule is Rule.TOPIC_UNKNOWN
    (told,) = await ack(rig, held)
    assert isinstance(told, Refused)
    with pytest.raises(Refused):
        await rig.broker.change_invisible(GROUP, TOPIC, held.receipt_handle, 0)
    await rig.pass_ms(10**6)


@every_durable_broker(queues=1)
async def test_a_message_finished_during_a_reset_is_reset_as_well(rig: EmbeddedRig) -> None:
    """It comes again, and the event says so: its end is behind the message."""
    await send(rig, "m-1")
    await ack(rig, *await receive(rig))
    procedures = rig.broker.procedures
    order = procedures.reset

    async def late(topic: Topic, group: Group, first: Sequence[int], end: Sequence[int]) -> None:
        await send(rig, "m-2")
        await ack(rig, *await receive(rig))
        await order(topic, group, first, end)

    with patch.object(procedures, "reset", late):
        await rig.broker.operator.reset_group(GROUP, TOPIC, BEGIN)
    assert ids(await receive(rig)) == ["m-1", "m-2"]
    (reset,) = [each.event for each in read_outbox(rig.store) if each.event.kind is EventKind.RESET]
    assert reset.time_ms == 2


@every_durable_broker(queues=2)
async def test_queues_are_added_and_everybody_reads_them(rig: EmbeddedRig) -> None:
    """Who is connected and who is not, from their start; never fewer, and not under message groups."""
    await rig.broker.operator.create_topic("t", queues=2, message_type=None)
    await receive(rig, topic="t", group="away")
    await rig.restart(End.KILL)
    await receive(rig, topic="t")
    await rig.broker.operator.set_topic("t", queues=5, settings=None)
    await rig.broker.send([an_envelope(f"m-{number}", topic="t") for number in range(10)])
    for group in (GROUP, "away"):
        assert len(await receive(rig, topic="t", group=group)) == 10
    await rig.restart(End.KILL)
    assert (await rig.broker.route("t")).queues == 5
    assert len(await receive(rig, topic="t", group="away")) == 10
    for queues in (4, 10**6):
        with pytest.raises(Refused, match="cannot be removed"):
            await rig.broker.operator.set_topic("t", queues=queues, settings=None)
    await rig.broker.operator.set_topic("t", queues=0, settings=TopicSettings(MessageType.FIFO))
    await rig.broker.send([an_envelope("g", topic="t", message_group="g")])
    with pytest.raises(Refused, match="lose their order"):
        await rig.broker.operator.set_topic("t", queues=6, settings=None)
    assert (await rig.broker.route("t")) == ("t", 5, (MessageType.FIFO,))


@every_durable_broker(queues=2)
async def test_a_group_is_set_back_and_forth(rig: EmbeddedRig) -> None:
    """To the end, to a time, to the beginning; what it had not finished is left with an event, once."""
    await send(rig, *sends(0, 4))
    (first, *_) = await receive(rig, batch_max=2)
    await ack(rig, first)
    rig.clock.advance(1_000)
    middle_ms = rig.clock.now_ms()
    await send(rig, *sends(4, 4))
    assert await rig.broker.operator.reset_group(GROUP, TOPIC, END) == (4, 4)
    assert events(rig, EventKind.FILTERED, EventKind.RESET) == {EventKind.FILTERED: 7, EventKind.RESET: 2}
    assert await receive(rig) == []
    (told,) = await ack(rig, first)
    assert isinstance(told, Refused)  # of a hand-out before the reset
    assert told.rule is Rule.RECEIPT_HANDLE
    assert await rig.broker.operator.reset_group(GROUP, TOPIC, middle_ms) == (2, 2)
    assert sorted(ids(await receive(rig))) == sends(4, 4)
    waits = asyncio.ensure_future(receive(rig, wait_ms=20_000))
    await until(lambda: rig.receives_waiting == 1)
    assert await rig.broker.operator.reset_group(GROUP, TOPIC, BEGIN) == (0, 0)
    assert sorted(ids([*await waits, *await receive(rig)])) == sends(0, 8)
    await rig.restart(End.KILL)
    assert sorted(ids(await receive(rig))) == sends(0, 8)
    assert events(rig, EventKind.FILTERED) == {EventKind.FILTERED: 11}
    await rig.broker.operator.create_group("idle")
    with pytest.raises(Refused, match="never read"):
        await rig.broker.operator.reset_group("idle", TOPIC, END)


@every_durable_broker(queues=2)
async def test_a_group_is_removed_with_its_progress_and_retries(rig: EmbeddedRig) -> None:
    """Its dead letters stay, other groups see nothing of it, and a group of its name begins anew."""
    await busy(rig)
    with pytest.raises(Refused, match=r"1 retries wait, .* of topic 'orders' are unread"):
        await rig.broker.operator.remove_group(GROUP, is_forced=False)
    await rig.broker.operator.remove_group(GROUP, is_forced=True)
    assert GROUP not in rig.broker.names.groups
    assert not rig.broker.names.lanes
    assert dead_letter_topic(GROUP) not in rig.broker.names.topics
    assert len([key for key, _ in rows(rig, Family.GROUP) if key.startswith(bytes(4))]) == 1  # the other one's
    await rig.restart(End.KILL)
    assert len(await receive(rig, group="other")) == 6
    assert len(await receive(rig)) == 6
    assert rig.broker.group_settings(GROUP).max_attempts == 17


@every_durable_broker(queues=1)
async def test_a_message_that_comes_during_a_removal_is_not_lost(rig: EmbeddedRig) -> None:
    """A message between the look and the removal: it is refused after all, and the topic is there as before."""
    operator, looks = rig.broker.operator, 0
    await rig.broker.operator.create_topic(TOPIC, queues=1, message_type=None)
    await receive(rig)
    look = operator._check_empty

    async def looked(topic: Topic) -> None:
        nonlocal looks
        await look(topic)
        looks += 1
        await send(rig, "m-1")

    with patch.object(operator, "_check_empty", looked), pytest.raises(Refused, match="1 are unread"):
        await operator.remove_topic(TOPIC, is_forced=False)
    assert looks == 1
    (delivery,) = await receive(rig)
    await ack(rig, delivery)
    await operator.remove_topic(TOPIC, is_forced=False)
    assert not rig.broker.names.topics


@every_durable_broker(queues=1)
async def test_a_topic_may_be_removed_while_a_group_is_reset(rig: EmbeddedRig) -> None:
    """One after the other: a receive that waits for the reset hears of the removal."""
    await send(rig, "m-1")
    await receive(rig)
    subscriptions, go_on = rig.broker.subscriptions, asyncio.Event()
    retired = subscriptions.retired

    async def held(topic_id: int, group_id: int) -> None:
        await go_on.wait()
        await retired(topic_id, group_id)

    with patch.object(subscriptions, "retired", held):
        reset = asyncio.ensure_future(rig.broker.operator.reset_group(GROUP, TOPIC, BEGIN))
        (known,) = subscriptions.all()
        await until(lambda: known.is_retired)
        waits = asyncio.ensure_future(receive(rig, wait_ms=20_000))
        removal = asyncio.ensure_future(rig.broker.operator.remove_topic(TOPIC, is_forced=True))
        await until(lambda: TOPIC not in rig.broker.names.topics)
        assert not any(each.done() for each in (reset, removal, waits))
        go_on.set()
        await asyncio.gather(reset, removal)
    with pytest.raises(Refused):
        await waits
    assert not subscriptions.all()


@pytest.mark.parametrize(
    "order",
    [
        lambda operator: operator.reset_group(GROUP, TOPIC, BEGIN),
        lambda operator: operator.remove_topic(TOPIC, is_forced=True),
    ],
    ids=["reset", "remove"],
)
def test_an_order_that_is_not_durable_fails_for_its_caller_alone(
    order: Callable[[Operator], Coroutine[object, object, object]], tmp_path: Path
) -> None:
    """The store fails at the commit of the order itself: whoever ordered is told, and nobody else."""

    async def scenario(rig: EmbeddedRig) -> None:
        await send(rig, "m-1")
        await receive(rig)
        procedures = rig.broker.procedures
        rig.memory.fail_next_sync = True
        with pytest.raises(BrokerUnavailable):
            await order(rig.broker.operator)
        assert procedures._task is not None
        await asyncio.wait((procedures._task,))
        procedures._waiting.clear()  # what nobody looked at tells of it when it goes

    asyncio.run(play(EmbeddedRig(tmp_path, on_disk=False, queues=1), scenario))
