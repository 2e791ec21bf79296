"""Topics that went from a cluster to the broker between two runs, or back: none is lost, none is handed out twice."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from support.models.store.outbox import read_outbox
from support.rigs.broker.rig import GROUP, TOPIC, EmbeddedRig, End, ack, ids, play, receive, send

from broker_adapter.contracts.errors import Refused
from broker_adapter.contracts.message import Delivery
from dmq.broker.deliveries.deliveries import ForwardedMessage
from dmq.broker.operations.retention import Retention
from dmq.broker.topics.registry import FORWARDER_GROUP
from dmq.cluster.outgoing import Forwards
from dmq.cluster.topic_migration import MovedTopics
from dmq.config.units import ALL_TOPICS, TopicPatterns
from dmq.store.schema.topics.names import Keep
from dmq.trail.events import EventKind

pytestmark = pytest.mark.contract
OTHERS = TopicPatterns(frozenset({"bills"}))
OWN = TopicPatterns(frozenset({TOPIC}))


async def next_run(rig: EmbeddedRig, stay: TopicPatterns, *, end: End = End.KILL) -> Forwards:
    """Begin a run that keeps some topics from the cluster."""
    rig.stay = stay
    await rig.restart(end)
    await MovedTopics(rig.broker).settle()
    forwards = Forwards(rig.broker)
    if stay != ALL_TOPICS:
        await forwards.open()
    return forwards


async def forward(forwards: Forwards, found: list[Delivery]) -> None:
    """Mark messages as forwarded."""
    await forwards.forwarded(TOPIC, [ForwardedMessage(each.receipt_handle, 1, 0) for each in found])


async def taken(forwards: Forwards, count: int = 32) -> list[Delivery]:
    """What the forwarder finds."""
    return list(await forwards.receive(TOPIC, batch_max=count, wait_ms=0))


def in_two_runs(rig: EmbeddedRig) -> list[tuple[str, int]]:
    """The messages that were passed over, and for which group, as the trail has it."""
    told = [each.event for each in read_outbox(rig.store) if each.event.kind is EventKind.FILTERED]
    return [(rig.broker.names.groups_by_id[each.group_id].name, each.message_id[-1]) for each in told]


def a_rig(path: Path) -> EmbeddedRig:
    """A broker that stands before a cluster and keeps nothing from it but bills."""
    return EmbeddedRig(path, on_disk=False, queues=2, stay=OTHERS)


@pytest.mark.parametrize("end", [End.KILL, End.POWER_LOSS, End.CLOSE])
def test_there_and_back(tmp_path: Path, end: End) -> None:
    """Each message is at one side in the end, although it was finished out of order, whatever ended a run."""
    rig = a_rig(tmp_path)

    async def scenario(_: object) -> None:
        forwards = Forwards(rig.broker)
        await forwards.open()
        await send(rig, *(f"a{number}" for number in range(6)))
        found = await taken(forwards)
        theirs = found[1::2]
        await forward(forwards, theirs)  # the others are on their way when the run ends
        await next_run(rig, OWN, end=end)
        here = list(await receive(rig))
        assert sorted(ids([*here, *theirs])) == [f"a{number}" for number in range(6)]
        await ack(rig, here[0], here[2])
        await send(rig, "b")
        late = list(await receive(rig, group="late"))  # a group that nobody knew before
        assert sorted(ids([*late, *theirs])) == sorted([*(f"a{number}" for number in range(6)), "b"])
        await ack(rig, here[1], group=GROUP)
        await ack(rig, late[0], group="late")
        forwards = await next_run(rig, OTHERS, end=end)
        done_by_both = {here[0].message_id, here[1].message_id, here[2].message_id} & {late[0].message_id}
        again = await taken(forwards)
        assert set(ids(again)) == set(ids(late)) - done_by_both
        await forward(forwards, again)
        assert not await taken(forwards)

    play_it(rig, scenario)


def test_a_kill_while_it_moves_changes_nothing(tmp_path: Path) -> None:
    """It is settled again from its beginning, and what was passed over is so once."""
    rig = a_rig(tmp_path)

    async def scenario(_: object) -> None:
        forwards = await next_run(rig, OWN)
        await send(rig, *(f"a{number}" for number in range(4)))
        found = list(await receive(rig))
        forwards = await next_run(rig, OTHERS)
        await forward(forwards, await taken(forwards, 2))
        rig.stay = OWN
        await rig.restart(End.KILL)
        names = rig.broker.names
        plan, names.plan_settings = names.plan_settings, _refuse  # type: ignore[assignment, method-assign]
        with pytest.raises(ArithmeticError):
            await MovedTopics(rig.broker).settle()
        names.plan_settings = plan  # type: ignore[method-assign]
        await next_run(rig, OWN)
        assert len(await receive(rig)) == 2
        assert len(found) == 4
        assert len(in_two_runs(rig)) == 2

    play_it(rig, scenario)


def _refuse(*_: object) -> list[object]:
    raise ArithmeticError


def test_retention_waits_for_current_readers(tmp_path: Path) -> None:
    """For the forwarder while the topic leaves, whoever read it before; for groups here while it does not."""
    rig = EmbeddedRig(tmp_path, on_disk=False, queues=1)

    async def removed() -> int:
        broker = rig.broker
        kept = Keep(1, 0, unread=True)
        retention = Retention(
            broker.shared,
            subscriptions=broker.subscriptions,
            offsets=broker.pulls.offsets,
            procedures=broker.procedures,
            keep=kept,
        )
        rig.clock.advance(60_000)
        return (await retention.turn()).messages

    async def scenario(_: object) -> None:
        await send(rig, "a", "b")
        assert len(await receive(rig)) == 2  # and it finishes neither
        forwards = await next_run(rig, OTHERS)
        assert await removed() == 0  # the forwarder has not looked at it
        await forward(forwards, await taken(forwards, 1))
        assert await removed() == 1
        await next_run(rig, OWN)
        assert await removed() == 0
        await ack(rig, *await receive(rig))
        assert await removed() == 1

    play_it(rig, scenario)


def test_messages_of_the_cluster_are_not_read_here(tmp_path: Path) -> None:
    """A group has its retries of such a topic alone; its place there is nobody's here to move."""
    rig = a_rig(tmp_path)

    async def scenario(_: object) -> None:
        forwards = Forwards(rig.broker)
        await forwards.open()
        await send(rig, "a")
        assert not await receive(rig)
        with pytest.raises(Refused) as refused:
            await rig.broker.operator.reset_group(GROUP, TOPIC, -2)
        assert "cluster" in str(refused.value)
        topic = rig.broker.names.topics[TOPIC]
        assert [each.group for each in await rig.broker.operator.readings(topic)] == []
        assert ids(await taken(forwards)) == ["a"]
        assert [each.group for each in await rig.broker.operator.readings(topic)] == [FORWARDER_GROUP]

    play_it(rig, scenario)


def play_it(rig: EmbeddedRig, scenario: object) -> None:
    """Run a scenario on a rig."""
    asyncio.run(play(rig, scenario))  # type: ignore[arg-type]
