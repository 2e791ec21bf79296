"""Half messages on the embedded broker: durable and unseen, decided once, and how they are delayed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from pathlib import Path

import pytest
from support.forges.messages.half import (
    EVERY_MS,
    FIRST_MS,
    Producer,
    a_half,
    halves,
    kinds,
    prepare,
    prepare_one,
    refusal,
)
from support.forges.messages.letters import told
from support.rigs.broker.rig import (
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
from support.rigs.store.rows import GatedEngine, waiting_rows

from broker_adapter.contracts.errors import Overloaded, Refused, Rule
from broker_adapter.contracts.message import pack_id
from dmq.broker.delayed.changes import ChangeOutcome, Meant
from dmq.store.engines.engine import Engine
from dmq.store.schema.keys import Family
from dmq.store.schema.messages.record import EntryKind
from dmq.trail.events import EventKind
from dmq.trail.snapshots.layout import Waiting, read_waiting

pytestmark = pytest.mark.contract

# -- deciding ---------------------------------------------------------------------------------------------------------


@every_durable_broker()
async def test_a_half_message_is_invisible_until_it_is_committed(rig: EmbeddedRig) -> None:
    """Neither now nor later, nor after a restart; then it is there as it was sent, with its tag, on attempt 1."""
    transaction_id = await prepare_one(rig)
    assert not await receive(rig)
    await rig.pass_ms(3_600_000)
    await rig.restart(End.KILL)
    assert not await receive(rig)
    assert halves(rig) == 1
    await rig.broker.transactions.commit(TOPIC, transaction_id)
    (found,) = await receive(rig, tags=["red"])
    assert (found.message_id, found.payload, found.delivery_attempt) == ("m-1", b"payload", 1)
    assert await ack(rig, found) == [None]
    assert halves(rig) == 0
    assert kinds(rig) == [EventKind.QUEUED, EventKind.ACKED, EventKind.HALF, EventKind.COMMITTED]


@every_durable_broker()
async def test_a_commit_wakes_its_waiters(rig: EmbeddedRig) -> None:
    """A receive that was there before the commit gets the message."""
    transaction_id = await prepare_one(rig)
    await receive(rig)
    waiting = rig.broker.transactions._loop.create_task(receive(rig, wait_ms=20_000))
    await until(lambda: rig.receives_waiting == 1)
    await rig.broker.transactions.commit(TOPIC, transaction_id)
    assert ids(await waiting) == ["m-1"]


@every_durable_broker()
async def test_a_rollback_removes_it_for_good(rig: EmbeddedRig) -> None:
    """Nothing of it is left to wait, and nobody is asked for it any more."""
    producer = Producer(rig)
    await rig.broker.transactions.roll_back(TOPIC, await prepare_one(rig))
    await rig.pass_ms(3_600_000)
    assert not await receive(rig)
    assert (halves(rig), producer.asked) == (0, [])
    assert kinds(rig) == [EventKind.HALF, EventKind.ROLLED_BACK]


@every_durable_broker()
async def test_a_decision_can_be_repeated_and_not_be_changed(rig: EmbeddedRig) -> None:
    """The same one again is fine and changes nothing; the other one hears what was decided; after a restart too."""
    transactions = rig.broker.transactions
    good, bad = await prepare_one(rig, "good"), await prepare_one(rig, "bad")
    await transactions.commit(TOPIC, good)
    await transactions.roll_back(TOPIC, bad)
    for _ in range(2):
        transactions = rig.broker.transactions
        await transactions.commit(TOPIC, good)
        await transactions.roll_back(TOPIC, bad)
        late = await refusal(rig, good, commits=False)
        assert (late.rule, "was committed at" in late.why) == (Rule.TRANSACTION_ID, True)
        late = await refusal(rig, bad, commits=True)
        assert (late.rule, "was rolled back at" in late.why) == (Rule.TRANSACTION_ID, True)
        await rig.restart(End.KILL)
    assert ids(await receive(rig)) == ["good"]
    assert (len(told(rig, EventKind.COMMITTED)), len(told(rig, EventKind.ROLLED_BACK))) == (1, 1)


@every_durable_broker()
async def test_of_decisions_that_fall_together_one_counts(rig: EmbeddedRig) -> None:
    """Commits and rollbacks at once: one outcome, and each caller hears whether it is theirs."""
    transactions, loop = rig.broker.transactions, rig.broker.transactions._loop
    for number in range(20):
        transaction_id = await prepare_one(rig, f"m-{number}")
        calls = [transactions.commit, transactions.roll_back, transactions.commit, transactions.roll_back]
        tasks = [loop.create_task(call(TOPIC, transaction_id)) for call in calls]
        errors: list[Refused | None] = []
        for task in tasks:
            try:
                await task
                errors.append(None)
            except Refused as refused:
                errors.append(refused)
        is_there = bool(await receive(rig))
        assert [error is None for error in errors] == [is_there, not is_there] * 2


async def refused(sending: Awaitable[object]) -> str:
    """Why a send is refused for its message id."""
    with pytest.raises(Refused) as found:
        await sending
    assert found.value.rule is Rule.MESSAGE_ID
    return found.value.why


@every_durable_broker()
async def test_an_id_of_a_half_message_is_that_of_no_other(rig: EmbeddedRig) -> None:
    """Undecided or rolled back: a send, alone or with others, at once or delayed, is refused; after a kill, too."""
    undecided, rolled_back = await prepare_one(rig, "undecided"), await prepare_one(rig, "rolled back")
    await rig.broker.transactions.roll_back(TOPIC, rolled_back)
    due_ms = rig.clock.now_ms() + 5_000
    for _ in range(2):
        for message_id in ("undecided", "rolled back"):
            for envelope in (an_envelope(message_id), an_envelope(message_id, deliver_at_ms=due_ms)):
                assert "a half message with this id" in await refused(rig.broker.send([envelope]))
            assert await refused(rig.broker.send([an_envelope("fresh"), an_envelope(message_id)]))
        await rig.restart(End.KILL)
    assert not await receive(rig)
    await rig.broker.transactions.commit(TOPIC, undecided)
    (repeated,) = await rig.broker.send([an_envelope("undecided", deliver_at_ms=due_ms)])
    assert repeated.repeated
    assert ids(await receive(rig)) == ["undecided"]
    await rig.pass_ms(5_000)
    assert not await receive(rig)
    meant = [Meant(pack_id("undecided"))]
    assert [each.outcome for each in await rig.broker.delayed.cancel(TOPIC, meant)] == [ChangeOutcome.TOO_LATE]
    await rig.broker.send([an_envelope("undecided", topic="another")])


@every_durable_broker()
async def test_an_id_of_a_message_is_that_of_no_half_message(rig: EmbeddedRig) -> None:
    """Delayed, cancelled or delivered: a half message under its id is refused; after a kill, too."""
    due_ms = rig.clock.now_ms() + 5_000
    await rig.broker.send([an_envelope("delayed", deliver_at_ms=due_ms), an_envelope("at once")])
    await rig.broker.send([an_envelope("cancelled", deliver_at_ms=due_ms)])
    await rig.broker.delayed.cancel(TOPIC, [Meant(pack_id("cancelled"))])
    for _ in range(2):
        for message_id in ("delayed", "at once", "cancelled"):
            assert "a message that is no half message" in await refused(prepare(rig, a_half(message_id)))
            assert await refused(prepare(rig, a_half("fresh"), a_half(message_id)))
        await rig.restart(End.KILL)
    assert halves(rig) == 0
    assert ids(await receive(rig)) == ["at once"]
    await rig.pass_ms(5_000)
    assert ids(await receive(rig)) == ["delayed"]


@every_durable_broker()
async def test_of_a_half_message_and_another_that_race_for_an_id_one_is_accepted(rig: EmbeddedRig) -> None:
    """Whichever is first, alone and in pairs, and in the same batch of the writer."""
    for number in range(40):
        name, due_ms = f"m-{number}", rig.clock.now_ms() + 5_000
        calls: list[Awaitable[object]] = [
            rig.broker.transactions.prepare([a_half(name)]),
            rig.broker.send([an_envelope(name, deliver_at_ms=due_ms if number % 4 < 2 else 0)]),
        ]
        told = await asyncio.gather(*(calls if number % 2 else reversed(calls)), return_exceptions=True)
        assert sorted(type(each) is Refused for each in told) == [False, True]


@every_durable_broker()
async def test_it_is_forgotten_after_the_window(rig: EmbeddedRig) -> None:
    """Then a decision hears that nothing is known, which is what is true."""
    transaction_id = await prepare_one(rig)
    await rig.broker.transactions.commit(TOPIC, transaction_id)
    for _ in range(3):
        rig.clock.advance(16 * 60_000)
        await send(rig, f"other-{rig.clock.now_ms()}")
    late = await refusal(rig, transaction_id, commits=True)
    assert (late.rule, "nothing is known" in late.why) == (Rule.TRANSACTION_ID, True)


@every_durable_broker()
async def test_transaction_ids_of_others_are_refused(rig: EmbeddedRig) -> None:
    """Blank ones, cut ones, recall handles, those of another topic: by the rule for transaction ids."""
    transaction_id = await prepare_one(rig)
    (delayed,) = await send(rig, "later", deliver_at_ms=rig.clock.now_ms() + 60_000)
    assert delayed.recall_handle
    for wrong in ("", " ", "x", "é", "\0", transaction_id[:-1], transaction_id + "AAAA", delayed.recall_handle):
        assert (await refusal(rig, wrong, commits=True)).rule is Rule.TRANSACTION_ID, wrong
    transactions = rig.broker.transactions
    with pytest.raises(Refused) as refused:
        await transactions.commit("others", transaction_id)
    assert refused.value.rule is Rule.TRANSACTION_ID
    with pytest.raises(Refused) as refused:
        await rig.broker.recall(TOPIC, transaction_id)
    assert refused.value.rule is Rule.REQUEST
    assert halves(rig) == 1


# -- accepting --------------------------------------------------------------------------------------------------------


@every_durable_broker()
async def test_a_half_message_that_is_sent_again_is_the_same(rig: EmbeddedRig) -> None:
    """It gets the same transaction id, waiting, checked, or committed; after a rollback it hears the truth."""
    Producer(rig)
    (first,) = await prepare(rig, a_half())
    await rig.pass_ms(FIRST_MS)
    (again,) = await prepare(rig, a_half(payload=b"other"))
    assert again == first._replace(repeated=True)
    assert halves(rig) == 1
    await rig.broker.transactions.commit(TOPIC, again.transaction_id)
    (late,) = await prepare(rig, a_half())
    assert late == again
    assert [each.payload for each in await receive(rig)] == [b"payload"]
    await rig.broker.transactions.roll_back(TOPIC, await prepare_one(rig, "m-2"))
    (ended,) = await prepare(rig, a_half("m-2"))
    assert (ended.repeated, "was rolled back at" in ended.ended) == (True, True)
    assert halves(rig) == 0


@every_durable_broker()
async def test_half_messages_of_two_topics_do_not_meet(rig: EmbeddedRig) -> None:
    """One id in two topics: each is a message of its own."""
    mine = await prepare_one(rig)
    other = a_half()._replace(envelope=an_envelope("m-1", topic="others"))
    (theirs,) = await rig.broker.transactions.prepare([other])
    await rig.broker.transactions.roll_back(TOPIC, mine)
    await rig.broker.transactions.commit("others", theirs.transaction_id)
    assert not await receive(rig)
    assert ids(await receive(rig, topic="others")) == ["m-1"]


@every_durable_broker()
async def test_a_full_disk_refuses_half_messages_and_takes_decisions(rig: EmbeddedRig) -> None:
    """What was begun can be ended."""
    good, bad = await prepare_one(rig, "good"), await prepare_one(rig, "bad")
    rig.store.is_disk_low = lambda: True  # type: ignore[method-assign]
    with pytest.raises(Overloaded):
        await prepare(rig)
    await rig.broker.transactions.commit(TOPIC, good)
    await rig.broker.transactions.roll_back(TOPIC, bad)
    assert (ids(await receive(rig)), rig.broker.sends.refused_total) == (["good"], 1)


# -- delays -----------------------------------------------------------------------------------------------------------


@every_durable_broker()
async def test_a_relative_delay_begins_at_the_commit(rig: EmbeddedRig) -> None:
    """However long the decision took."""
    transaction_id = await prepare_one(rig, delay_ms=10_000)
    await rig.pass_ms(60_000)
    await rig.broker.transactions.commit(TOPIC, transaction_id)
    due_ms = rig.clock.now_ms() + 10_000
    await rig.pass_ms(9_999)
    assert not await receive(rig)
    await rig.pass_ms(1)
    (found,) = await receive(rig)
    assert (found.message_id, found.deliver_at_ms) == ("m-1", due_ms)
    (scheduled,) = told(rig, EventKind.SCHEDULED)
    (committed,) = told(rig, EventKind.COMMITTED)
    assert scheduled.time_ms == committed.time_ms == due_ms


@every_durable_broker()
async def test_an_absolute_time_stays(rig: EmbeddedRig) -> None:
    """One that lies ahead at the commit is waited for; one that has passed is due at once."""
    due_ms = rig.clock.now_ms() + 10_000
    early, late = await prepare_one(rig, "early", due_ms=due_ms), await prepare_one(rig, "late", due_ms=due_ms)
    await rig.broker.transactions.commit(TOPIC, early)
    await rig.settle()
    assert not await receive(rig)
    await rig.pass_ms(10_000)
    assert ids(await receive(rig)) == ["early"]
    await rig.broker.transactions.commit(TOPIC, late)
    (found,) = await receive(rig)
    assert (found.message_id, found.deliver_at_ms) == ("late", due_ms)


# -- how it lies there ------------------------------------------------------------------------------------------------


@every_durable_broker()
async def test_a_snapshot_can_read_it(rig: EmbeddedRig) -> None:
    """Its facts are those of a waiting entry: topic, id, the next check, how many there were."""
    Producer(rig)
    begun_ms = rig.clock.now_ms()
    await prepare_one(rig, delay_ms=5)
    await rig.pass_ms(FIRST_MS)
    ((_, value),) = waiting_rows(rig.store)
    topic_id = rig.broker.names.topics[TOPIC].topic_id
    due_ms = begun_ms + FIRST_MS + EVERY_MS
    assert read_waiting(value) == Waiting(EntryKind.TRANSACTION, topic_id, 0, pack_id("m-1"), due_ms, 1, begun_ms)


def test_a_decision_is_visible_only_when_durable(tmp_path: Path) -> None:
    """While the commit is being synced, a second one and a rollback wait for it: it may yet be lost."""
    gates: list[GatedEngine] = []

    def gated(engine: Engine) -> Engine:
        gates.append(GatedEngine(engine))
        return gates[-1]

    async def scenario(rig: EmbeddedRig) -> None:
        transactions, loop = rig.broker.transactions, asyncio.get_running_loop()
        transaction_id = await prepare_one(rig)
        gates[-1].hold()
        first = loop.create_task(transactions.commit(TOPIC, transaction_id))
        await loop.run_in_executor(None, gates[-1].await_sync)
        others = [
            loop.create_task(call(TOPIC, transaction_id)) for call in (transactions.commit, transactions.roll_back)
        ]
        for _ in range(20):  # they have read what became of it by then
            await rig.broker.reader.values(Family.META, [b"F"])
        assert [each.done() for each in (first, *others)] == [False] * 3
        gates[-1].let_go()
        await first
        await others[0]
        with pytest.raises(Refused, match="was committed at"):
            await others[1]

    asyncio.run(play(EmbeddedRig(tmp_path, on_disk=False, wrap=gated), scenario))
