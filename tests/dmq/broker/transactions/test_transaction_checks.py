"""Half messages that nobody decides: who is asked and when, and where they are when that was in vain."""

from __future__ import annotations

import pytest
from support.forges.messages.half import (
    CHECKS_MAX,
    DEAD,
    EVERY_MS,
    FIRST_MS,
    Producer,
    a_half,
    halves,
    prepare,
    prepare_one,
    refusal,
)
from support.forges.messages.letters import told
from support.rigs.broker.rig import GROUP, TOPIC, EmbeddedRig, End, every_durable_broker, ids, receive, until

from broker_adapter.contracts.errors import Rule
from broker_adapter.contracts.message import Message, unpack_id
from broker_adapter.contracts.transactions import Check, Half
from broker_adapter.wire.mapping import encode
from dmq.broker.transactions.transaction_checks import BUSY_MS, GIVEN_UP_GROUP, PAUSE_MS_MAX, UNDER_WAY_MAX
from dmq.trail.events import EventKind
from retry.dead_letter import DeadFilter, Job, JobKind
from retry.policy import Reason

pytestmark = pytest.mark.contract

# -- checks -----------------------------------------------------------------------------------------------------------


@every_durable_broker()
async def test_a_producer_is_asked_after_6_s_and_then_every_30(rig: EmbeddedRig) -> None:
    """Not a millisecond earlier; each time with the message and the id by which it is decided."""
    producer = Producer(rig)
    transaction_id = await prepare_one(rig)
    await rig.pass_ms(FIRST_MS - 1)
    assert not producer.asked
    await rig.pass_ms(1)
    (asked,) = await producer.heard(1)
    assert asked == Check(TOPIC, "m-1", transaction_id, b"payload", 1)
    await rig.pass_ms(EVERY_MS - 1)
    assert len(producer.asked) == 1
    await rig.pass_ms(1)
    assert [each.number for each in await producer.heard(2)] == [1, 2]
    assert [each.attempt for each in told(rig, EventKind.TX_CHECKED)] == [1, 2]
    await rig.broker.transactions.commit(TOPIC, producer.asked[-1].transaction_id)
    assert ids(await receive(rig)) == ["m-1"]
    await rig.pass_ms(EVERY_MS)
    assert len(producer.asked) == 2


@every_durable_broker()
async def test_a_message_may_set_its_first_check_time(rig: EmbeddedRig) -> None:
    """Earlier or later than the rule; only the first time."""
    producer = Producer(rig)
    await prepare(rig, a_half(check_after_ms=1_000))
    await rig.pass_ms(999)
    assert not producer.asked
    await rig.pass_ms(1)
    await producer.heard(1)
    await rig.pass_ms(EVERY_MS - 1)
    assert len(producer.asked) == 1
    await rig.pass_ms(1)
    await producer.heard(2)


@every_durable_broker()
async def test_without_a_producer_nothing_is_counted(rig: EmbeddedRig) -> None:
    """However long nobody is there; when one comes the first check is the first."""
    producer = Producer(rig, is_there=False)
    await prepare_one(rig)
    for _ in range(3 * CHECKS_MAX):
        await rig.pass_ms(EVERY_MS)
    assert (producer.asked, told(rig, EventKind.TX_CHECKED), halves(rig)) == ([], [], 1)
    producer.is_there = True
    await rig.pass_ms(PAUSE_MS_MAX)
    (asked,) = await producer.heard(1)
    assert asked.number == 1


@every_durable_broker()
async def test_checks_go_on_after_a_kill(rig: EmbeddedRig) -> None:
    """Their count is where it was, and the transaction id still leads to the message."""
    producer = Producer(rig)
    await prepare_one(rig)
    await rig.pass_ms(FIRST_MS)
    await producer.heard(1)
    await rig.restart(End.KILL, down_ms=5 * EVERY_MS)
    producer = Producer(rig)
    await rig.settle()
    (asked,) = await producer.heard(1)
    assert asked.number == 2
    await rig.broker.transactions.commit(TOPIC, asked.transaction_id)
    assert ids(await receive(rig)) == ["m-1"]


@every_durable_broker()
async def test_only_as_many_are_asked_as_there_is_room_for(rig: EmbeddedRig) -> None:
    """The others come a moment later, uncounted; each is asked once in its turn."""
    producer = Producer(rig)
    count = UNDER_WAY_MAX + 40
    await prepare(rig, *(a_half(f"m-{number:04}") for number in range(count)))
    rig.clock.advance(FIRST_MS)
    while rig.scheduler.turn().handed_over:  # without giving the loop a turn: nothing is on its way yet
        pass
    assert len(told(rig, EventKind.TX_CHECKED)) == UNDER_WAY_MAX
    await producer.heard(UNDER_WAY_MAX)
    await rig.pass_ms(BUSY_MS)
    asked = await producer.heard(count)
    assert len({each.message_id for each in asked}) == count
    assert {each.number for each in asked} == {1}


@every_durable_broker()
async def test_the_clock_may_step_back(rig: EmbeddedRig) -> None:
    """A check that was planned behind the step is at its time by the new clock, and none is lost."""
    producer = Producer(rig)
    await prepare_one(rig)
    await rig.pass_ms(FIRST_MS)
    await producer.heard(1)
    rig.clock.step_to(rig.clock.now_ms() - 3_600_000)
    await prepare_one(rig, "m-2")
    await rig.pass_ms(FIRST_MS)
    assert [each.message_id for each in await producer.heard(2)] == ["m-1", "m-2"]
    await rig.pass_ms(3_600_000 + EVERY_MS)
    assert sorted((each.message_id, each.number) for each in (await producer.heard(4))[2:]) == [("m-1", 2), ("m-2", 2)]


# -- given up ---------------------------------------------------------------------------------------------------------


@every_durable_broker()
async def test_after_its_last_check_it_is_a_dead_letter(rig: EmbeddedRig) -> None:
    """With its topic, the number of checks and the reason; a decision then hears where it is."""
    producer = Producer(rig)
    transaction_id = await prepare_one(rig)
    begun_ms = rig.clock.now_ms()
    await rig.pass_ms(FIRST_MS)
    for _ in range(CHECKS_MAX - 1):
        await rig.pass_ms(EVERY_MS)
    await producer.heard(CHECKS_MAX)
    assert DEAD not in rig.broker.names.topics or not await receive(rig, group="u", topic=DEAD)
    await rig.pass_ms(EVERY_MS)
    page = await rig.broker.dead_letters.page(GIVEN_UP_GROUP, DeadFilter(), offset=0, limit=9, with_outcome=False)
    (letter,) = page.letters
    dead = letter.dead
    assert (dead.message_id, dead.origin_topic, dead.attempts, dead.tag) == ("m-1", TOPIC, CHECKS_MAX, "red")
    assert (dead.reason, dead.first_failed_at_ms) == (Reason.EXHAUSTED, begun_ms)
    assert (halves(rig), len(producer.asked), await receive(rig)) == (0, CHECKS_MAX, [])
    for commits in (True, False):
        late = await refusal(rig, transaction_id, commits=commits)
        assert (late.rule, "was given up at" in late.why, DEAD in late.why) == (Rule.TRANSACTION_ID, True, True)
    (event,) = told(rig, EventKind.TX_GIVEN_UP)
    assert (event.attempt, event.time_ms, unpack_id(event.message_id)) == (CHECKS_MAX, begun_ms, "m-1")
    assert event.group_id == rig.broker.names.groups[GIVEN_UP_GROUP].group_id
    (found,) = await receive(rig, group="u", topic=DEAD)
    assert found.dead_letter is not None
    assert (found.dead_letter.origin_topic, found.dead_letter.attempts) == (TOPIC, CHECKS_MAX)


@every_durable_broker()
async def test_a_message_that_was_given_up_can_be_sent_again(rig: EmbeddedRig) -> None:
    """A redrive makes it a message of its topic."""
    Producer(rig)
    envelope = encode(Message(topic=TOPIC, message_id="m-1", body=b"whole"))
    await rig.broker.transactions.prepare([Half(envelope)])
    for _ in range(CHECKS_MAX + 1):
        await rig.pass_ms(EVERY_MS)
    job = Job(job_id=0, kind=JobKind.REDRIVE, group=GIVEN_UP_GROUP)
    await rig.broker.dead_letters.start(job, is_dry_run=False)
    await until(lambda: len(told(rig, EventKind.REDRIVEN)) == 1)
    (found,) = await receive(rig, group=GROUP)
    assert b"whole" in found.payload
