"""Recurring messages: what a schedule sends and when, what operators do to it, what kills and clocks leave of it."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from support.forges.messages.schedules import NAME, add, check_rows, occurrences, tick, wanted
from support.models.store.outbox import read_outbox
from support.rigs.broker.rig import TOPIC, EmbeddedRig, End, an_envelope, every_durable_broker, ids, play, receive
from support.rigs.store.rows import counted, recount

from broker_adapter.contracts.errors import Overloaded, Refused, Rule
from broker_adapter.contracts.message import MessageType, pack_id
from broker_adapter.contracts.schedules import OCCURRENCE, SCHEDULE
from broker_adapter.wire.mapping import decode
from dmq.broker.deliveries.deliveries import ForwardedMessage
from dmq.broker.schedules import cron as recurrence
from dmq.broker.schedules import firing as recurring
from dmq.broker.schedules.firing import Recurring
from dmq.broker.schedules.schedules import Schedules
from dmq.broker.topics.catalog import ScheduleLimits
from dmq.broker.topics.settings import FlowChange
from dmq.cluster.outgoing import Forwards
from dmq.config.units import parse_topic_patterns
from dmq.store.schema.keys import recurring_scope
from dmq.store.schema.messages.recurring import CatchUp, Phase
from dmq.store.schema.topics.names import TopicSettings
from dmq.store.writer.operations import Recur
from dmq.trail.events import EventKind

pytestmark = pytest.mark.contract


async def refused(rig: EmbeddedRig, name: str = NAME, **facts: Any) -> Refused:  # noqa: ANN401
    """Ask for a schedule, and return why it is not made."""
    with pytest.raises(Refused) as caught:
        await rig.broker.schedules.add(wanted(name, **facts))
    assert name not in check_rows(rig) or name == NAME
    return caught.value


@every_durable_broker()
async def test_every_occurrence_is_a_message_of_its_own(rig: EmbeddedRig) -> None:
    """With an id of its own, the schedule's name and its number, its due time, and what was to be sent; never early."""
    began_ms = rig.clock.now_ms()
    status = await add(rig, tag="t", body=b"hello")
    assert status.next_due_ms == began_ms + 1_000
    await rig.pass_ms(999)
    assert not await receive(rig)
    await rig.pass_ms(1)
    await tick(rig, 2)
    assert occurrences(rig) == [(n, began_ms + n * 1_000) for n in (1, 2, 3)]
    found = await receive(rig)
    assert len({each.message_id for each in found}) == 3
    for each in found:
        message = decode(each.payload)
        assert (message.body, message.tag, message.properties["color"]) == (b"hello", "t", "red")
        assert (message.properties[SCHEDULE], message.topic) == (NAME, TOPIC)
        assert each.deliver_at_ms == began_ms + int(message.properties[OCCURRENCE]) * 1_000
    assert rig.store.pending().get(rig.broker.names.topics[TOPIC].topic_id, 0) == 0
    scope = recurring_scope(rig.broker.names.topics[TOPIC].topic_id)
    assert counted(rig.store, [scope]) == recount(rig.store)


@every_durable_broker()
async def test_it_continues_after_a_restart(rig: EmbeddedRig) -> None:
    """No number twice, none left out."""
    began_ms = rig.clock.now_ms()
    await add(rig)
    for number in range(1, 6):
        await rig.pass_ms(1_000)
        await rig.restart(End.KILL if number % 2 else End.CLOSE)
        check_rows(rig)
    assert occurrences(rig) == [(n, began_ms + n * 1_000) for n in range(1, 6)]


@every_durable_broker()
async def test_missed_times_are_caught_up_by_the_policy(rig: EmbeddedRig) -> None:
    """One: the last time, late. All: each of them, in order. Skip: none that is over a minute late."""
    began_ms = rig.clock.now_ms()
    for policy in CatchUp:
        await add(rig, policy.name, catch_up=policy, every_ms=100_000)
        await add(rig, f"quick-{policy.name}", catch_up=policy, every_ms=1_000)
    await rig.restart(End.KILL, down_ms=590_000)
    await tick(rig, 25, 1)  # what is left to be caught up comes a millisecond later
    late = [(1, began_ms + 500_000)]
    assert occurrences(rig, "ONE") == late
    assert occurrences(rig, "ALL") == [(n, began_ms + n * 100_000) for n in range(1, 6)]
    assert occurrences(rig, "SKIP") == []
    assert occurrences(rig, "quick-ALL") == [(n, began_ms + n * 1_000) for n in range(1, 591)]
    assert occurrences(rig, "quick-ONE") == occurrences(rig, "quick-SKIP") == [(1, began_ms + 590_000)]
    await rig.pass_ms(10_000)
    assert occurrences(rig, "SKIP") == [(1, began_ms + 600_000)]
    assert occurrences(rig, "ONE") == [*late, (2, began_ms + 600_000)]
    check_rows(rig)


@every_durable_broker()
async def test_a_turn_is_bounded(rig: EmbeddedRig) -> None:
    """However much is to be caught up, by number and by bytes; nothing is left out for that."""
    sizes: list[int] = []
    real = Recurring.plan

    def measured(self: Recurring, rows: list[tuple[bytes, bytes]], now_ms: int) -> object:
        made = real(self, rows, now_ms)
        sizes.append(sum(len(each.record) for op in made if isinstance(op, Recur) for each in op.occurrences))
        return made

    with patch.object(Recurring, "plan", measured), patch.object(recurring, "BYTES_PER_TURN_MAX", 100_000):
        for number in range(6):
            await add(rig, f"s-{number}", catch_up=CatchUp.ALL, body=b"x" * 20_000)
        rig.clock.advance(30_000)
        for _ in range(210):
            await rig.pass_ms(20)
    assert max(sizes) <= 100_000 + 6 * 21_000
    for number in range(6):
        assert [n for n, _ in occurrences(rig, f"s-{number}")] == list(range(1, 35))


@every_durable_broker()
async def test_a_read_occurrence_of_a_removed_schedule_sends_nothing(rig: EmbeddedRig) -> None:
    """Danger: it is removed between the scheduler's look at the timeline and its look at the schedule."""
    looked: list[tuple[Recurring, list[tuple[bytes, bytes]], int]] = []
    real = Recurring.plan

    def noted(self: Recurring, rows: list[tuple[bytes, bytes]], now_ms: int) -> object:
        looked.append((self, rows, now_ms))
        return real(self, rows, now_ms)

    with patch.object(Recurring, "plan", noted):
        await add(rig)
        await rig.pass_ms(1_000)
    (first,) = looked
    await rig.broker.schedules.remove(NAME)
    assert real(*first) == []


@every_durable_broker()
async def test_many_of_one_time_do_not_fill_a_turn(rig: EmbeddedRig) -> None:
    """What falls due beside them is handed over between their turns; each of them occurs all the same."""
    made = [f"s-{number}" for number in range(12)]
    with patch.object(recurring, "SCHEDULES_PER_TURN_MAX", 5):
        for name in made:
            await add(rig, name)
        rig.clock.advance(1_000)
        rig.scheduler.turn()
        assert sum(len(occurrences(rig, name)) for name in made) == 5
        for _ in range(3):
            await rig.pass_ms(20)
    assert [len(occurrences(rig, name)) for name in made] == [1] * len(made)


@every_durable_broker()
async def test_how_late_an_occurrence_is_counts(rig: EmbeddedRig) -> None:
    """As for any message, from its time until it is in its queue, on disk."""
    await add(rig, "s-1")
    rig.late_ms.clear()
    rig.clock.advance(1_007)
    rig.scheduler.turn()
    assert len(occurrences(rig, "s-1")) == 1
    assert rig.late_ms == [7]


@every_durable_broker()
async def test_opening_looks_for_no_times(rig: EmbeddedRig) -> None:
    """A daemon with thousands of schedules starts as soon as any."""
    for number in range(5):
        await add(rig, f"s-{number}", every_ms=0, cron="30 6 * * *")
    with patch("dmq.broker.schedules.schedules.next_time", wraps=recurrence.next_time) as found:
        await rig.restart(End.KILL)
        assert found.call_count == 0


@every_durable_broker()
async def test_it_ends(rig: EmbeddedRig) -> None:
    """After its count or its end, also while it catches up; it is still there, and is replaced or removed."""
    began_ms = rig.clock.now_ms()
    for policy in CatchUp:
        await add(rig, f"count-{policy.name}", count=3, catch_up=policy)
        await add(rig, f"end-{policy.name}", end_ms=began_ms + 3_500, catch_up=policy)
    await tick(rig, 2)
    await rig.pass_ms(20_000)
    assert occurrences(rig, "count-ALL") == occurrences(rig, "end-ALL")
    assert [n for n, _ in occurrences(rig, "count-ALL")] == [1, 2, 3]
    assert occurrences(rig, "end-ONE")[-1] == (3, began_ms + 3_000)
    assert occurrences(rig, "count-ONE")[-1] == (3, began_ms + 22_000)
    assert set(check_rows(rig).values()) == {Phase.ENDED}
    assert not rig.store.pending()
    with pytest.raises(Refused, match="has ended"):
        await rig.broker.schedules.pause("end-ONE")
    with pytest.raises(Refused, match="has ended"):
        await rig.broker.schedules.resume("end-ONE")
    await rig.broker.schedules.add(wanted("end-ONE", count=1), is_replacing=True)
    await tick(rig, 2)
    assert occurrences(rig, "end-ONE")[0] == (1, began_ms + 1_000)
    assert (1, began_ms + 23_000) in occurrences(rig, "end-ONE")
    await rig.broker.schedules.remove("count-ALL")
    assert "count-ALL" not in check_rows(rig)


@every_durable_broker()
async def test_counts_begin_at_the_start(rig: EmbeddedRig) -> None:
    """An interval is counted from its start, which is its first time."""
    began_ms = rig.clock.now_ms()
    await add(rig, "later", start_ms=began_ms + 5_000, every_ms=2_000)
    await add(rig, "before", start_ms=began_ms - 5_000, every_ms=2_000)
    await tick(rig, 7)
    assert [at - began_ms for _, at in occurrences(rig, "later")] == [5_000, 7_000]
    assert [at - began_ms for _, at in occurrences(rig, "before")] == [1_000, 3_000, 5_000, 7_000]


@every_durable_broker()
async def test_making_it_twice_is_making_it_once(rig: EmbeddedRig) -> None:
    """The same content gets the same answer; another one is refused, or begins anew."""
    schedules = rig.broker.schedules
    first = await add(rig)
    assert await schedules.add(wanted()) == (first, False)
    await tick(rig, 2)
    again, is_made = await schedules.add(wanted(), is_replacing=True)
    assert (again.progress.occurrences, is_made) == (2, False)
    for other in (wanted(body=b"x"), wanted(every_ms=2_000), wanted(topic="other"), wanted(tag="t"), wanted(count=5)):
        with pytest.raises(Refused, match="another content"):
            await schedules.add(other)
    assert "other" not in rig.broker.names.topics
    replaced, is_made = await schedules.add(wanted(topic="other"), is_replacing=True)
    assert (replaced.progress.occurrences, is_made) == (0, True)
    check_rows(rig)
    await rig.restart(End.KILL)
    await tick(rig, 2)
    assert [n for n, _ in occurrences(rig, topic="other")] == [1, 2]
    assert len(occurrences(rig)) == 2
    check_rows(rig)


@every_durable_broker()
async def test_figures_counted_at_creation_are_the_same_again(rig: EmbeddedRig) -> None:
    """A start or an end so long after it is made: asked for later, by who repeats a call, it is no other schedule."""
    began_ms = rig.clock.now_ms()
    facts: dict[str, Any] = {"start_after_ms": 5_000, "end_after_ms": 7_000}
    await add(rig, **facts)
    for _ in range(2):
        await rig.pass_ms(1_500)
        status, is_made = await rig.broker.schedules.add(wanted(**facts))
        assert (is_made, status.schedule.start_ms, status.schedule.end_ms) == (
            False,
            began_ms + 5_000,
            began_ms + 7_000,
        )
    with pytest.raises(Refused, match="another content"):
        await rig.broker.schedules.add(wanted(start_after_ms=5_001, end_after_ms=7_000))
    await tick(rig, 5)
    assert [at_ms - began_ms for _, at_ms in occurrences(rig)] == [5_000, 6_000, 7_000]
    error = await refused(rig, "never", start_after_ms=2_000, end_after_ms=1_000)
    assert "ends before it starts" in str(error)


@every_durable_broker()
async def test_it_pauses_and_continues(rig: EmbeddedRig) -> None:
    """Durably, and truthfully: what passed meanwhile is not sent; numbers go on. Twice is as good as once."""
    schedules, began_ms = rig.broker.schedules, rig.clock.now_ms()
    await add(rig, catch_up=CatchUp.ALL)
    await tick(rig, 2)
    paused = await schedules.pause(NAME)
    assert (paused.progress.phase, paused.next_due_ms) == (Phase.PAUSED, 0)
    assert await schedules.pause(NAME) == paused
    await rig.restart(End.KILL)
    schedules = rig.broker.schedules
    await tick(rig, 5)
    assert (await schedules.show(NAME)).progress == paused.progress
    going = await schedules.resume(NAME)
    assert going.next_due_ms == began_ms + 8_000
    assert await schedules.resume(NAME) == going
    await tick(rig, 1)
    assert occurrences(rig) == [(1, began_ms + 1_000), (2, began_ms + 2_000), (3, began_ms + 8_000)]
    assert (await schedules.show(NAME)).following_ms == tuple(began_ms + n * 1_000 for n in (10, 11, 12))
    check_rows(rig)


@every_durable_broker()
async def test_unknown_figures_are_marked_unknown(rig: EmbeddedRig) -> None:
    """Also what was removed."""
    schedules = rig.broker.schedules
    await add(rig)
    await schedules.remove(NAME)
    for call in (schedules.show, schedules.pause, schedules.resume, schedules.remove):
        with pytest.raises(Refused) as caught:
            await call(NAME)
        assert caught.value.rule is Rule.NOT_FOUND
    assert check_rows(rig) == {}
    await tick(rig, 3)
    assert occurrences(rig) == []
    assert not rig.store.pending()


@every_durable_broker()
async def test_invalid_input_is_refused_and_leaves_nothing(rig: EmbeddedRig) -> None:
    """Rules, names, topics; the error says what is allowed."""
    now_ms = rig.clock.now_ms()
    bad: list[tuple[str, dict[str, Any]]] = [
        ("either an interval or a cron", {"every_ms": 0}),
        ("either an interval or a cron", {"every_ms": 1_000, "cron": "* * * * *"}),
        ("1000 to", {"every_ms": 999}),
        ("invalid minute", {"cron": "60 * * * *"}),
        ("is not known on this host", {"cron": "* * * * *", "zone": "Nowhere/X"}),
        ("time zone requires a cron", {"zone": "UTC"}),
        ("no occurrence", {"cron": "0 0 30 2 *"}),
        ("no occurrence", {"end_ms": now_ms - 1}),
        ("ends before it starts", {"start_ms": now_ms + 9, "end_ms": now_ms + 8}),
        ("the jitter", {"jitter_ms": 1_001}),
        ("the count", {"count": -1}),
        ("the start", {"start_ms": -1}),
        ("cannot send to a retry", {"topic": "%DLQ%workers"}),
        ("illegal characters", {"topic": "no such"}),
    ]
    for text, facts in bad:
        assert text in str(await refused(rig, "bad", **facts)), facts
    for name in ("", " ", "a b", "x" * 128, "\ud800"):
        with pytest.raises(Refused, match="invalid schedule name"):
            await rig.broker.schedules.add(wanted(name))
    assert not rig.broker.names.topics
    assert check_rows(rig) == {}


@every_durable_broker()
async def test_types_of_topics_are_respected(rig: EmbeddedRig) -> None:
    """Whatever is changed first: the type or the schedule."""
    operator = rig.broker.operator
    for message_type in MessageType:
        await operator.create_topic(message_type.name, queues=1, message_type=message_type)
    takes = {
        False: {MessageType.NORMAL, MessageType.DELAY},
        True: {MessageType.FIFO, MessageType.DELAY},
    }
    for is_grouped, good in takes.items():
        group = {"message_group": "g"} if is_grouped else {}
        for message_type in MessageType:
            name = f"{message_type.name}-{is_grouped}"
            if message_type in good:
                await add(rig, name, topic=message_type.name, **group)
            else:
                assert (await refused(rig, name, topic=message_type.name, **group)).rule is Rule.MESSAGE_TYPE
    with pytest.raises(Refused, match="FIFO-True"):
        await operator.set_topic("FIFO", queues=0, settings=TopicSettings(MessageType.NORMAL))
    await operator.set_topic("FIFO", queues=0, settings=TopicSettings(None))
    await tick(rig, 2)
    for message_type in MessageType:
        assert len(occurrences(rig, f"{message_type.name}-True", message_type.name)) == (
            2 if message_type in takes[True] else 0
        )


@every_durable_broker()
async def test_the_order_of_a_message_group_holds(rig: EmbeddedRig) -> None:
    """Occurrences and delayed messages of one group come in the order of their times."""
    began_ms = rig.clock.now_ms()
    await add(rig, message_group="g", catch_up=CatchUp.ALL, every_ms=2_000)
    delayed = [an_envelope(f"m-{at}", deliver_at_ms=began_ms + at, message_group="g") for at in (1_000, 3_000, 5_000)]
    await rig.broker.send(delayed)
    await tick(rig, 6)
    found: list[int] = []
    while some := await receive(rig):
        found += [each.deliver_at_ms - began_ms for each in some]
        await rig.broker.ack("workers", TOPIC, [each.receipt_handle for each in some])
    assert found == [1_000, 2_000, 3_000, 4_000, 5_000, 6_000]


@every_durable_broker()
async def test_a_topic_with_schedules_is_not_removed(rig: EmbeddedRig) -> None:
    """Not by force either; the refusal names them, and nothing is half removed."""
    await add(rig)
    for is_forced in (False, True):
        with pytest.raises(Refused, match=NAME):
            await rig.broker.operator.remove_topic(TOPIC, is_forced=is_forced)
    await tick(rig, 1)
    assert len(await receive(rig)) == 1
    await rig.broker.schedules.remove(NAME)
    await rig.broker.operator.remove_topic(TOPIC, is_forced=True)
    assert (await refused(rig, "x", every_ms=0)).rule is Rule.REQUEST
    await add(rig)  # of the topic that is made anew
    await tick(rig, 1)
    assert [n for n, _ in occurrences(rig)] == [1]


@every_durable_broker()
async def test_a_topic_is_removed_or_has_a_schedule(rig: EmbeddedRig) -> None:
    """Both at once: one of them is refused."""
    for _ in range(5):
        await rig.broker.catalog.topic(TOPIC)
        results = await asyncio.gather(
            rig.broker.schedules.add(wanted()),
            rig.broker.operator.remove_topic(TOPIC, is_forced=False),
            return_exceptions=True,
        )
        assert len([each for each in results if isinstance(each, Refused)]) == 1, results
        if check_rows(rig):
            await rig.broker.schedules.remove(NAME)


@every_durable_broker()
async def test_they_are_listed_page_by_page(rig: EmbeddedRig) -> None:
    """By name, each once, of one topic if that is asked."""
    names = [f"s-{number:02}" for number in range(10)]
    for name in reversed(names):
        await add(rig, name, topic="even" if int(name[2:]) % 2 == 0 else "odd")
    found, token = [], ""
    while True:
        some, token = await rig.broker.schedules.page(topic="", token=token, limit=3)
        found += [each.name for each in some]
        if not token:
            break
    assert found == names
    some, token = await rig.broker.schedules.page(topic="odd", token="", limit=10)
    assert ([each.name for each in some], token) == (names[1::2], "")
    with pytest.raises(Refused, match="topic not found"):
        await rig.broker.schedules.page(topic="none", token="", limit=10)


@every_durable_broker()
async def test_their_number_is_bounded(rig: EmbeddedRig) -> None:
    """Of a topic, and in all; what is replaced counts once."""
    broker = rig.broker
    broker.schedules = Schedules(broker.shared, ScheduleLimits(total=3, per_topic=2))
    await add(rig, "a")
    await add(rig, "b")
    with pytest.raises(Overloaded, match="schedules_per_topic_max = 2"):
        await add(rig, "c")
    await add(rig, "c", topic="other")
    with pytest.raises(Overloaded, match="schedules_max = 3"):
        await add(rig, "d", topic="third")
    assert "third" not in broker.names.topics
    await broker.schedules.add(wanted("a", count=9), is_replacing=True)
    await broker.schedules.remove("a")
    await add(rig, "d")


@every_durable_broker()
async def test_a_full_disk_makes_it_wait(rig: EmbeddedRig) -> None:
    """Nothing new is stored, and nothing is made but what frees space; then it goes on as its policy says."""
    began_ms = rig.clock.now_ms()
    await add(rig, catch_up=CatchUp.ALL)
    with (
        patch.object(rig.scheduler._recurring, "_is_disk_low", return_value=True),
        patch.object(rig.store, "is_disk_low", return_value=True),
    ):
        await tick(rig, 3)
        assert occurrences(rig) == []
        with pytest.raises(Overloaded, match="the disk is almost full"):
            await add(rig, "more")
        await rig.broker.schedules.add(wanted(catch_up=CatchUp.ALL))  # it is there
    await tick(rig, 3)
    assert [at for _, at in occurrences(rig)][-1] == began_ms + 6_000


@every_durable_broker()
async def test_nothing_recurs_in_a_topic_that_is_paused(rig: EmbeddedRig) -> None:
    """Until it is resumed; what passed meanwhile is caught up as the schedule says."""
    await add(rig, catch_up=CatchUp.ALL)
    await tick(rig, 2)
    before = len(occurrences(rig))
    await rig.broker.operator.set_topic(TOPIC, flow=FlowChange(is_paused=True))
    await tick(rig, 20)
    assert len(occurrences(rig)) == before
    await rig.broker.operator.set_topic(TOPIC, flow=FlowChange(is_paused=False))
    await tick(rig, 6)
    assert len(occurrences(rig)) >= before + 20


@every_durable_broker()
async def test_a_clock_that_steps_back_repeats_nothing(rig: EmbeddedRig) -> None:
    """It waits until the time comes that was next; forward it does as after a pause of the daemon."""
    began_ms = rig.clock.now_ms()
    await add(rig)
    await add(rig, "cron", cron="* * * * *", catch_up=CatchUp.ALL)
    await tick(rig, 100)
    before = occurrences(rig)
    of_cron = occurrences(rig, "cron")
    rig.clock.step_to(rig.clock.now_ms() - 90_000)
    await tick(rig, 80)
    assert occurrences(rig) == before
    assert occurrences(rig, "cron") == of_cron
    await rig.broker.schedules.pause(NAME)
    assert (await rig.broker.schedules.resume(NAME)).next_due_ms == began_ms + 101_000
    await tick(rig, 12)
    assert [n for n, _ in occurrences(rig)] == list(range(1, 103))
    rig.clock.step_to(rig.clock.now_ms() + 300_000)
    await rig.settle()
    assert len(occurrences(rig)) == 103
    assert len(occurrences(rig, "cron")) == len(of_cron) + 5
    times = [at for _, at in occurrences(rig, "cron")]
    assert times == sorted(set(times))
    check_rows(rig)


@every_durable_broker()
async def test_jitter_is_bounded_and_never_early(rig: EmbeddedRig) -> None:
    """And the same however often it is asked."""
    began_ms = rig.clock.now_ms()
    await add(rig, every_ms=10_000, jitter_ms=3_000)
    await tick(rig, 200, 500)
    late = [at - began_ms - n * 10_000 for n, at in occurrences(rig)]
    assert len(late) >= 9
    assert all(0 <= each <= 3_000 for each in late)
    assert len(set(late)) > 3


@every_durable_broker()
async def test_a_zone_that_is_gone_pauses_it(rig: EmbeddedRig) -> None:
    """What is due is sent; that it cannot go on is said, and harms nobody else."""
    await add(rig, "a", cron="* * * * *", zone="Europe/Berlin")
    await add(rig, "b", every_ms=60_000)
    with patch.object(recurrence, "zone_of", side_effect=recurrence.RuleError("the time zone is not known")):
        await rig.pass_ms(60_000)
    found = await rig.broker.schedules.show("a")
    assert (found.progress.phase, found.progress.why) == (Phase.PAUSED, "the time zone is not known")
    assert len(occurrences(rig, "a")) == len(occurrences(rig, "b")) == 1
    await rig.broker.schedules.resume("a")
    await rig.pass_ms(60_000)
    assert len(occurrences(rig, "a")) == 2
    check_rows(rig)


@every_durable_broker()
async def test_a_copy_of_the_store_continues_with_its_own_ids(rig: EmbeddedRig) -> None:
    """Both send the next occurrence; nobody mistakes one for the other."""
    await add(rig)
    await tick(rig, 1)
    backup = rig.back_up()
    await tick(rig, 2)
    there = {each.message_id for each in await receive(rig)}
    await rig.restore(backup)
    await tick(rig, 2)
    here = {each.message_id for each in await receive(rig)}
    assert len(there) == 3
    assert len(here & there) == 1
    check_rows(rig)


@every_durable_broker()
async def test_the_trail_shows_schedules_and_occurrences(rig: EmbeddedRig) -> None:
    """An occurrence is accepted and delivered as a delayed message is, and is linked to its schedule by the entry."""
    await add(rig, count=2)
    await rig.broker.schedules.pause(NAME)
    await rig.broker.schedules.resume(NAME)
    await tick(rig, 3)
    await rig.broker.schedules.remove(NAME)
    found = list(read_outbox(rig.store))
    kinds = Counter(each.event.kind for each in found)
    assert (kinds[EventKind.SCHEDULED], kinds[EventKind.DELIVERED], kinds[EventKind.OCCURRED]) == (2, 2, 2)
    said = [each.event.message_id for each in found if each.event.kind is EventKind.SCHEDULE_CHANGED]
    assert said == [pack_id(f"{what} {NAME}") for what in ("made", "paused", "resumed", "ended", "removed")]
    resumed = [each.record.entry_sequence for each in found if each.event.message_id == pack_id(f"resumed {NAME}")]
    occurred = [each for each in found if each.event.kind is EventKind.OCCURRED]
    assert {each.record.entry_sequence for each in occurred} == set(resumed)
    assert [each.event.time_ms for each in occurred] == [1, 2]
    for kind in (EventKind.SCHEDULED, EventKind.DELIVERED):
        own = [each for each in found if each.event.kind is kind]
        assert [each.event.message_id for each in own] == [each.event.message_id for each in occurred]
    assert ids(await receive(rig))


def test_an_operator_is_quicker_or_the_occurrence_is(tmp_path: Path) -> None:
    """Between the scheduler's look and its commit everything may happen to the schedule: nothing is sent in between."""

    async def scenario(rig: EmbeddedRig) -> None:
        loop = asyncio.get_running_loop()
        real = Recurring.plan
        schedules = rig.broker.schedules

        async def settle_beside(change: object) -> None:
            def planned(self: Recurring, rows: list[tuple[bytes, bytes]], now_ms: int) -> object:
                made = real(self, rows, now_ms)
                with patch.object(Recurring, "plan", real):
                    asyncio.run_coroutine_threadsafe(change(), loop).result(30)  # type: ignore[operator]
                return made

            with patch.object(Recurring, "plan", planned):
                await loop.run_in_executor(None, rig.scheduler.turn)

        await add(rig)
        rig.clock.advance(1_000)
        await settle_beside(lambda: schedules.pause(NAME))
        assert occurrences(rig) == []
        assert check_rows(rig) == {NAME: Phase.PAUSED}
        await schedules.resume(NAME)
        rig.clock.advance(1_000)
        await settle_beside(lambda: schedules.remove(NAME))
        assert occurrences(rig) == []
        assert check_rows(rig) == {}
        await add(rig)
        rig.clock.advance(1_000)
        await settle_beside(lambda: schedules.add(wanted(count=7), is_replacing=True))
        assert occurrences(rig) == []
        await tick(rig, 1)
        assert [n for n, _ in occurrences(rig)] == [1]
        check_rows(rig)

    asyncio.run(play(EmbeddedRig(tmp_path, on_disk=False), scenario))


def test_in_front_of_a_cluster_it_leaves_as_a_delayed_message_does(tmp_path: Path) -> None:
    """What falls due of a cluster's topic is the forwarder's, once, also after a kill; what stays here is not."""

    async def scenario(rig: EmbeddedRig) -> None:
        for run in range(2):
            forwards = Forwards(rig.broker)
            await forwards.open()
            if not run:
                await add(rig, "leaves")
                await add(rig, "stays", topic="here")
            await tick(rig, 1)
            assert (forwards.topics(), TOPIC in forwards.topics()) == ([TOPIC], True)
            await forwards.look_at(TOPIC)
            found = await forwards.receive(TOPIC, batch_max=8, wait_ms=0)
            assert [decode(each.payload).properties[OCCURRENCE] for each in found] == [str(run + 1)]
            await forwards.forwarded(TOPIC, [ForwardedMessage(found[0].receipt_handle, 1, 0)])
            assert len(occurrences(rig, "stays", "here")) == run + 1
            await rig.restart(End.KILL)

    asyncio.run(play(EmbeddedRig(tmp_path, on_disk=False, stay=parse_topic_patterns("here")), scenario))
