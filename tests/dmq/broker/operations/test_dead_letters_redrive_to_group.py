"""Where a redriven letter goes: to the group that failed it and to nobody else, unless somebody says so."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest
from support.clients.embedded.admin_answers import message_of
from support.clients.embedded.failing import change, pushed_one
from support.forges.messages.letters import (
    OTHERS,
    PURGE,
    REDRIVE,
    TO_ALL,
    a_message,
    child_of,
    children,
    counts,
    die,
    die_many,
    dry,
    ended,
    finish,
    letters,
    only,
    sleeping_moves,
    start,
    told,
)
from support.forges.messages.own_keys import KEY, keyed, put, waiting_under_keys
from support.models.store.outbox import read_outbox
from support.rigs.broker.rig import GROUP, TOPIC, EmbeddedRig, End, ack, every_durable_broker, ids, receive, until

from broker_adapter.contracts.errors import Refused, Rule
from broker_adapter.contracts.message import Delivery, MessageType, unpack_id
from broker_adapter.wire.mapping import decode
from dmq.broker.operations.admin import BEGIN, END
from dmq.states import MessageState
from dmq.store.schema.keys import Family
from dmq.store.schema.topics.names import TopicSettings
from dmq.store.writer.operations import Put
from dmq.trail.events import LANE, EventKind
from retry.dead_letter import PARENT_MESSAGE_ID, JobState

pytestmark = pytest.mark.contract


def parents(deliveries: Sequence[Delivery]) -> list[str]:
    """Of which letters deliveries were made."""
    return [decode(each.payload).properties.get(PARENT_MESSAGE_ID, "") for each in deliveries]


@every_durable_broker(queues=2)
async def test_a_group_that_had_finished_it_does_not_get_it_again(rig: EmbeddedRig) -> None:
    """Not a group that read everything, not one that comes later, not one that pulls; in a later run neither."""
    await die_many(rig, 2)
    await ack(rig, *await receive(rig, group=OTHERS), group=OTHERS)
    await finish(rig, REDRIVE)
    for _ in range(2):
        assert await receive(rig, group=OTHERS) == []
        assert sorted(ids(await receive(rig, group="newcomers"))) == ["m-0", "m-1"]  # as they were sent
        assert sorted(parents(await receive(rig))) == ["m-0", "m-1"]
        await rig.restart(End.KILL)


@every_durable_broker(queues=2)
async def test_it_restarts_with_the_link_and_reports_the_direction(rig: EmbeddedRig) -> None:
    """Attempt 1 under a new id; a failure of it waits, counts, and ends in a letter of its own."""
    await rig.set_group(GROUP, max_attempts=2, delays_ms=(1_000,))
    await die(rig, a_message("m-0", body=b"as sent", tag="blue", keys=("k",)))
    await rig.pass_ms(10_000)
    await finish(rig, REDRIVE)
    child = child_of(rig, "m-0")
    assert child.group == GROUP
    outcome = (await letters(rig, with_outcome=True))[0].outcome
    assert outcome is not None
    assert outcome.note == f"{TOPIC} {child.message.message_id} for group {GROUP}"
    found = await message_of(rig, child.message.message_id)
    assert (found.state, found.payload) == (MessageState.QUEUED, child.record.payload)
    first = await pushed_one(rig)
    assert (first.message_id, first.delivery_attempt, first.dead_letter) == (child.message.message_id, 1, None)
    failed_at_ms = rig.clock.now_ms()
    await change(rig, first)
    await rig.pass_ms(1_000)
    second = await pushed_one(rig)
    assert (second.message_id, second.delivery_attempt) == (first.message_id, 2)
    await change(rig, second)
    (letter,) = await letters(rig)
    dead = letter.dead
    assert (dead.message_id, dead.origin_topic, dead.attempts) == (first.message_id, TOPIC, 2)
    assert (dead.first_failed_at_ms, dead.last_failed_at_ms) == (failed_at_ms, failed_at_ms + 1_000)
    await finish(rig, REDRIVE)
    assert parents(await receive(rig)) == [first.message_id]


@every_durable_broker(queues=1)
async def test_its_events_name_the_group_that_is_to_finish_it(rig: EmbeddedRig) -> None:
    """One for the letter and one for the new message, which names the group, its lane and the letter."""
    await die_many(rig, 2)
    await finish(rig, REDRIVE)
    group_id, topic_id = rig.broker.names.groups[GROUP].group_id, rig.broker.names.topics[TOPIC].topic_id
    redriven = told(rig, EventKind.REDRIVEN)
    assert [(each.group_id, each.topic_id, each.time_ms) for each in redriven] == [
        (group_id, topic_id, 0),
        (group_id, topic_id, 1),
    ]
    lying = [each for each in read_outbox(rig.store) if each.event.kind is EventKind.QUEUED_FOR_GROUP]
    assert [each.record.queue_offset for each in lying] == [0, 1]
    for number, event in enumerate(each.event for each in lying):
        assert (event.group_id, event.topic_id, event.queue_id, event.attempt, event.time_ms) == (
            *(group_id, topic_id, LANE),
            *(1, number),
        )
        assert unpack_id(event.message_id) == child_of(rig, f"m-{number}").message.message_id
    assert len(told(rig, EventKind.QUEUED)) == 2  # as they were sent


@every_durable_broker(queues=2)
async def test_all_groups_get_it_only_on_request(rig: EmbeddedRig) -> None:
    """With ``all_groups``, or another topic."""
    await die_many(rig, 3)
    await ack(rig, *await receive(rig, group=OTHERS), group=OTHERS)
    await finish(rig, replace(TO_ALL, filter=only("m-0")))
    assert parents(await receive(rig, group=OTHERS)) == ["m-0"]
    await rig.broker.operator.create_topic("elsewhere", queues=0, message_type=None)
    elsewhere = replace(REDRIVE, to_topic="elsewhere", filter=only("m-1"))
    await finish(rig, elsewhere)
    for group in (GROUP, OTHERS):
        assert parents(await receive(rig, group=group, topic="elsewhere")) == ["m-1"]
    assert child_of(rig, "m-0").group == ""


@every_durable_broker(queues=1)
async def test_a_letter_has_no_key_any_more(rig: EmbeddedRig) -> None:
    """Danger: what its sender scheduled since under the same key is cancelled for it, or the letter is for that."""
    for name, keeps in (("a", False), ("b", True)):
        await die(rig, keyed(name, keeps=keeps))
    await put(rig, "later")
    assert (await finish(rig, TO_ALL)).done == 2
    assert parents(await receive(rig, group=OTHERS)) == ["", "", "a", "b"]
    assert waiting_under_keys(rig.store) == {KEY: "later"}


@every_durable_broker(queues=1)
async def test_an_old_job_continues_as_it_was_started(rig: EmbeddedRig) -> None:
    """A row of a job without the field is one to everybody, also in the middle of it."""
    await die_many(rig, 3)
    await ack(rig, *await receive(rig, group=OTHERS), group=OTHERS)
    job = await start(rig, replace(TO_ALL, rate_per_s=0.001))
    await until(lambda: rig.broker.dead_letters.jobs()[0].done == 1)
    await rig.store.commit_async([])
    ((key, value),) = [
        row for row in rig.store.scan(Family.META, b"", b"\xff" * 20, limit=1_000).rows if b'"job_id"' in row[1]
    ]
    plain = value.replace(b'"all_groups":true,', b"").replace(b'"rate_per_s":0.001', b'"rate_per_s":0.0')
    assert plain != value
    await rig.store.commit_async([Put(Family.META, key, plain)])
    await rig.restart(End.KILL)
    await until(lambda: rig.broker.dead_letters.jobs()[0].state is JobState.DONE)
    assert job.job_id == rig.broker.dead_letters.jobs()[0].job_id
    assert len(await receive(rig, group=OTHERS)) == 3


@every_durable_broker(queues=1)
async def test_a_removed_group_is_reported_as_gone(rig: EmbeddedRig) -> None:
    """Nobody would ever get it: it is refused, and a job that runs when the group goes leaves the rest dead."""
    await die_many(rig, 4)
    job = await start(rig, replace(REDRIVE, rate_per_s=0.001))
    await until(lambda: rig.broker.dead_letters.jobs()[0].done == 1)
    await rig.broker.dead_letters.stop(job.job_id)
    await rig.broker.operator.remove_group(GROUP, is_forced=True)
    for call in (start, dry):
        with pytest.raises(Refused, match="does not exist") as refused:
            await call(rig, REDRIVE)
        assert refused.value.rule is Rule.REQUEST
    assert counts(await dry(rig, TO_ALL)) == (3, 0, 0)
    assert len(await letters(rig)) == 3
    await rig.restart(End.KILL)
    await finish(rig, replace(TO_ALL, filter=only("m-1")))
    assert parents(await receive(rig, group=OTHERS))[-1] == "m-1"
    await finish(rig, PURGE)
    names = rig.broker.names
    outcomes = told(rig, EventKind.REDRIVEN, EventKind.PURGED)
    assert [names.groups_by_id[each.group_id].name for each in outcomes] == [GROUP] * 4


@every_durable_broker(queues=1)
async def test_a_group_that_goes_while_a_job_runs_leaves_the_rest_dead(rig: EmbeddedRig) -> None:
    """What is in its lane leaves with an event; what was not looked at yet is counted as failed, and stays."""
    await die_many(rig, 3)
    await start(rig, replace(REDRIVE, rate_per_s=0.001))
    await until(lambda: rig.broker.dead_letters.jobs()[0].done == 1)
    before = len(told(rig, EventKind.FILTERED))
    await rig.broker.operator.remove_group(GROUP, is_forced=True)
    assert len(told(rig, EventKind.FILTERED)) == before + 1
    with sleeping_moves(rig.clock):
        job = rig.broker.dead_letters.jobs()[0]
        assert counts(await ended(rig, job)) == (1, 0, 2)
    assert len(await letters(rig)) == 2
    assert not rig.broker.names.lanes


@every_durable_broker(queues=1)
async def test_a_removed_or_recreated_topic(rig: EmbeddedRig) -> None:
    """Without it a letter stays dead; with a new one of its name it goes to the group's lane of that one."""
    await die_many(rig, 1)
    await rig.broker.operator.remove_topic(TOPIC, is_forced=True)
    assert counts(await finish(rig, REDRIVE)) == (0, 0, 1)
    await rig.broker.operator.create_topic(TOPIC, queues=1, message_type=None)
    assert counts(await finish(rig, REDRIVE)) == (1, 0, 0)
    assert await receive(rig, group=OTHERS) == []
    await rig.restart(End.KILL)
    assert parents(await receive(rig)) == ["m-0"]


@every_durable_broker(queues=1)
async def test_a_group_that_is_away_gets_it_when_it_comes(rig: EmbeddedRig) -> None:
    """Nobody of it is connected, and it never had a lane; also while it is being read for the first time."""
    await die_many(rig, 2)
    await rig.restart(End.KILL)
    await finish(rig, replace(REDRIVE, filter=only("m-0")))
    await rig.restart(End.KILL)
    assert parents(await receive(rig)) == ["m-0"]
    await finish(rig, replace(REDRIVE, filter=only("m-1")))
    assert parents(await receive(rig)) == ["m-1"]
    await rig.restart(End.KILL)
    assert sorted(parents(await receive(rig))) == ["m-0", "m-1"]


@every_durable_broker(queues=2)
async def test_a_reset_does_not_take_it_away(rig: EmbeddedRig) -> None:
    """What waits in the lane comes all the same, whether the group is set to the end or to the beginning."""
    await die_many(rig, 1)
    await finish(rig, REDRIVE)
    await rig.broker.operator.reset_group(GROUP, TOPIC, END)
    assert parents(await receive(rig)) == ["m-0"]
    await rig.broker.operator.reset_group(GROUP, TOPIC, BEGIN)
    assert sorted(parents(await receive(rig))) == ["", "m-0"]


@every_durable_broker(queues=1)
async def test_a_filter_judges_it_as_any_retry(rig: EmbeddedRig) -> None:
    """What the group's filter does not want any more is finished, with an event."""
    await die(rig, a_message("m-0", tag="blue"), a_message("m-1", tag="red"))
    await finish(rig, REDRIVE)
    assert parents(await receive(rig, tags=("red",))) == ["m-1"]
    assert await receive(rig) == []


@every_durable_broker(queues=1)
async def test_purging_and_redriving_twice(rig: EmbeddedRig) -> None:
    """Whoever was first: a letter has one outcome, and one message."""
    await die_many(rig, 2)
    await finish(rig, replace(PURGE, filter=only("m-0")))
    for job in (REDRIVE, TO_ALL, REDRIVE, PURGE):
        await finish(rig, job)
    assert {parent: len(made) for parent, made in children(rig).items()} == {"m-1": 1}
    assert len(told(rig, EventKind.REDRIVEN, EventKind.PURGED)) == 2


@every_durable_broker(queues=1)
async def test_a_topic_of_one_type_takes_that_type_only(rig: EmbeddedRig) -> None:
    """As from any sender: of a letter without a message group no FIFO topic gets a new message."""
    await die(rig, a_message("m-0"), a_message("m-1", message_group="g"))
    await rig.broker.operator.create_topic("fifo", queues=1, message_type=MessageType.FIFO)
    await rig.broker.operator.create_topic("normal", queues=1, message_type=MessageType.NORMAL)
    assert counts(await dry(rig, replace(REDRIVE, to_topic="fifo"))) == (1, 0, 1)
    assert counts(await finish(rig, replace(REDRIVE, to_topic="normal"))) == (1, 0, 1)
    await rig.broker.operator.set_topic(TOPIC, queues=0, settings=TopicSettings(MessageType.NORMAL))
    assert counts(await dry(rig, TO_ALL)) == (0, 0, 1)
    assert counts(await finish(rig, REDRIVE)) == (1, 0, 0)  # it was taken once, and is the group's own


# -- message groups ---------------------------------------------------------------------------------------------------


@every_durable_broker(queues=1)
async def test_one_message_of_a_message_group_is_out_at_a_time_in_any_queue(rig: EmbeddedRig) -> None:
    """A redriven message and one of its message group in the queue take turns; others go on."""
    await die(rig, a_message("m-0", message_group="g"), a_message("m-1", message_group="g"))
    await rig.broker.send([a_message("m-2", message_group="g"), a_message("m-3", message_group="h")])
    (first,) = [each for each in await receive(rig, renew_for="c") if decode(each.payload).message_group == "g"]
    await finish(rig, REDRIVE)
    assert first.message_id == "m-2"
    assert await receive(rig, renew_for="c") == []  # m-2 is out
    await ack(rig, first)
    (second,) = await receive(rig, renew_for="c")
    assert parents([second]) == ["m-0"]
    await rig.broker.send([a_message("m-4", message_group="g")])
    assert await receive(rig, renew_for="c") == []
    await change(rig, second)  # it failed: hidden where it lies, and the others wait
    assert await receive(rig, renew_for="c") == []
    await rig.pass_ms(10**7)
    seen = []
    for _ in range(4):
        found = [each for each in await receive(rig, renew_for="c") if decode(each.payload).message_group == "g"]
        if not found:
            break
        (each,) = found
        seen.append(parents([each])[0] or each.message_id)
        await ack(rig, each)
    assert sorted(seen) == ["m-0", "m-1", "m-4"]
    assert seen.index("m-0") < seen.index("m-1")


@every_durable_broker(queues=1)
async def test_one_that_is_hidden_in_the_lane_holds_up_its_message_group_after_a_restart(rig: EmbeddedRig) -> None:
    """As one that is hidden in its queue does; a waiting receive is woken when it is finished."""
    await die(rig, a_message("m-0", message_group="g"))
    await finish(rig, REDRIVE)
    (redriven,) = await receive(rig, renew_for="c")
    await change(rig, redriven)
    await rig.broker.send([a_message("m-1", message_group="g")])
    await rig.restart(End.KILL)
    assert await receive(rig, renew_for="c") == []
    await rig.pass_ms(10**7)
    (again,) = await receive(rig, renew_for="c")
    assert (parents([again]), again.delivery_attempt) == (["m-0"], 2)
    waits = asyncio.ensure_future(receive(rig, wait_ms=20_000, renew_for="c"))
    await until(lambda: rig.receives_waiting == 1)
    await ack(rig, again)
    assert ids(await waits) == ["m-1"]
