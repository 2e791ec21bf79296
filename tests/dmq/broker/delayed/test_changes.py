"""Delayed messages in their users' hands: cancelled, moved and fired, with an answer that is true for good."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from support.models.store.outbox import read_outbox
from support.rigs.broker.rig import TOPIC, EmbeddedRig, End, ack, an_envelope, ids, play, receive

from broker_adapter.contracts.errors import BrokerUnavailable, Overloaded, Refused, Rule
from broker_adapter.contracts.message import pack_id
from broker_adapter.runtime.clock import SystemClock
from dmq.broker.delayed import changes as delayed
from dmq.broker.delayed.changes import Changed, ChangeOutcome, HeldBy, Meant
from dmq.broker.topics.settings import FlowChange
from dmq.store.files.steady_clock import ClockOptions
from dmq.store.schema.accounting.counts import BUCKET_MS
from dmq.store.store import StoreOptions
from dmq.store.writer.writer import STALL_S
from dmq.trail.events import NO_QUEUE, EventKind, gap_event

pytestmark = pytest.mark.contract

SOON_MS, LATER_MS = 5_000, 600_000


def on_both(scenario: object) -> object:
    """Run a scenario on both engines."""

    def test(on_disk: bool, tmp_path: Path) -> None:
        options = StoreOptions(gap_event=gap_event, idempotency_window_ms=10 * LATER_MS)
        assert callable(scenario)
        asyncio.run(play(EmbeddedRig(tmp_path, on_disk=on_disk, queues=1, options=options), scenario))

    test.__name__, test.__doc__ = getattr(scenario, "__name__", ""), scenario.__doc__
    return pytest.mark.parametrize("on_disk", [True, False], ids=["rocksdb", "memory"])(test)


async def sent(rig: EmbeddedRig, *names: str, after_ms: int = SOON_MS, message_group: str = "") -> list[str]:
    """Send delayed messages, all due at once, and return their handles."""
    at_ms = rig.clock.now_ms() + after_ms
    receipts = await rig.broker.send(
        [an_envelope(each, deliver_at_ms=at_ms, message_group=message_group) for each in names]
    )
    return [each.recall_handle for each in receipts]


async def taken(rig: EmbeddedRig) -> list[str]:
    """Receive what is there, and acknowledge it."""
    found = await receive(rig)
    if found:
        await ack(rig, *found)
    return ids(found)


def named(*names: str) -> list[Meant]:
    return [Meant(pack_id(each)) for each in names]


@on_both
async def test_a_message_comes_at_its_new_time(rig: EmbeddedRig) -> None:
    """Later or earlier, to the millisecond; the others at theirs, and its delivery names the new time."""
    await sent(rig, "later", "earlier", "stays")
    now_ms = rig.clock.now_ms()
    assert await rig.broker.delayed.reschedule(TOPIC, named("later"), now_ms + LATER_MS) == [
        (ChangeOutcome.DONE, now_ms + LATER_MS)
    ]
    await rig.broker.delayed.reschedule(TOPIC, named("earlier"), now_ms + 1_000)
    came: list[tuple[int, list[str]]] = []
    for ms in (999, 1, SOON_MS - 1_001, 1, LATER_MS - SOON_MS - 1, 1):
        await rig.pass_ms(ms)
        came.append((rig.clock.now_ms() - now_ms, await taken(rig)))
    assert [each for each in came if each[1]] == [(1_000, ["earlier"]), (SOON_MS, ["stays"]), (LATER_MS, ["later"])]
    told = {
        each.event.message_id: each.event.time_ms - now_ms
        for each in read_outbox(rig.store)
        if each.event.kind is EventKind.DELIVERED
    }
    assert told == {pack_id("later"): LATER_MS, pack_id("earlier"): 1_000, pack_id("stays"): SOON_MS}


@on_both
async def test_a_fired_message_comes_at_once(rig: EmbeddedRig) -> None:
    """As one whose new time is over does; what is due already stays where it is, and is said to be done."""
    await sent(rig, "a", "b")
    now_ms = rig.clock.now_ms()
    assert await rig.broker.delayed.fire(TOPIC, named("a")) == [(ChangeOutcome.DONE, now_ms)]
    assert await rig.broker.delayed.reschedule(TOPIC, named("b"), 1) == [(ChangeOutcome.DONE, now_ms)]
    assert await rig.broker.delayed.fire(TOPIC, named("a", "b")) == [(ChangeOutcome.DONE, now_ms)] * 2
    await rig.pass_ms(2)
    assert sorted(ids(await receive(rig))) == ["a", "b"]
    kinds = [each.event.kind for each in read_outbox(rig.store)]
    assert kinds.count(EventKind.RESCHEDULED) == 2


@on_both
async def test_every_answer_is_true(rig: EmbeddedRig) -> None:
    """Done, delivered at, cancelled at, unknown: one for each, in the order they were named, whatever is asked."""
    await sent(rig, "comes", after_ms=1)
    await rig.pass_ms(1)
    delivered_ms = rig.clock.now_ms()
    await sent(rig, "waits", "goes")
    rig.clock.advance(1)
    cancelled_ms = rig.clock.now_ms()
    broker = rig.broker.delayed
    assert await broker.cancel(TOPIC, named("goes")) == [(ChangeOutcome.DONE, cancelled_ms)]
    rig.clock.advance(1)
    ended = [
        Changed(ChangeOutcome.TOO_LATE, delivered_ms),
        Changed(ChangeOutcome.CANCELLED, cancelled_ms),
        Changed(ChangeOutcome.UNKNOWN, 0),
    ]
    meant = named("comes", "goes", "never", "waits")
    at_ms = rig.clock.now_ms() + LATER_MS
    assert await broker.reschedule(TOPIC, meant, at_ms) == [*ended, (ChangeOutcome.DONE, at_ms)]
    assert await broker.fire(TOPIC, meant) == [*ended, (ChangeOutcome.DONE, rig.clock.now_ms())]
    assert await broker.cancel(TOPIC, meant) == [*ended, (ChangeOutcome.DONE, rig.clock.now_ms())]
    assert not ids(await receive(rig))[1:]


@on_both
async def test_it_stays_the_same_entry(rig: EmbeddedRig) -> None:
    """Its handle stays good, the counts follow it, and the trail tells of one entry."""
    (handle,) = await sent(rig, "m")
    scope = rig.broker.names.topics[TOPIC].topic_id
    at_ms = rig.clock.now_ms() + LATER_MS
    for wanted_ms in (at_ms, at_ms, at_ms + 1, at_ms):
        await rig.broker.delayed.reschedule(TOPIC, [rig.broker.recalls.meant(TOPIC, handle)], wanted_ms)
    (bucket,) = rig.store.due_counts(scope, 0, 2**50)
    assert (bucket.count, rig.store.pending()[scope]) == (1, 1)
    assert bucket.until_ms - BUCKET_MS <= at_ms < bucket.until_ms
    await rig.broker.recall(TOPIC, handle)
    trail = [each for each in read_outbox(rig.store) if each.event.message_id]
    kinds = [each.event.kind for each in trail]
    assert kinds == [EventKind.SCHEDULED, *[EventKind.RESCHEDULED] * 3, EventKind.RECALLED]
    assert len({each.record.entry_sequence for each in trail}) == 1
    moved = trail[1].event
    assert (moved.topic_id, moved.group_id, moved.queue_id, moved.time_ms) == (scope, 0, NO_QUEUE, at_ms)
    assert rig.store.pending().get(scope, 0) == 0
    await rig.broker.route("others")
    with pytest.raises(Refused, match="of a message of topic"):
        rig.broker.recalls.meant("others", handle)


@on_both
async def test_a_change_outlives_a_kill(rig: EmbeddedRig) -> None:
    """It is durable when it is answered: the message comes at its new time, and once."""
    await sent(rig, "m", "n")
    at_ms = rig.clock.now_ms() + 2 * SOON_MS
    await rig.broker.delayed.reschedule(TOPIC, named("m"), at_ms)
    await rig.broker.delayed.fire(TOPIC, named("n"))
    await rig.restart(End.KILL, down_ms=SOON_MS)
    await rig.settle()
    assert ids(await receive(rig)) == ["n"]
    await rig.pass_ms(SOON_MS)
    assert ids(await receive(rig)) == ["m"]


@on_both
async def test_a_message_group_goes_by_the_new_times(rig: EmbeddedRig) -> None:
    """Moving one changes its place among those of its group, as its user asked for."""
    await sent(rig, "m-1", "m-2", "m-3", message_group="g")
    await rig.broker.delayed.reschedule(TOPIC, named("m-1"), rig.clock.now_ms() + SOON_MS + 1)
    await rig.pass_ms(2 * SOON_MS)
    assert ids(await receive(rig)) == ["m-2", "m-3", "m-1"]


@on_both
async def test_changes_of_one_message_take_turns(rig: EmbeddedRig) -> None:
    """Fifty at once, of all kinds: one cancels it, all are told what is true, and nothing comes."""
    await sent(rig, "m")
    broker = rig.broker.delayed
    now_ms = rig.clock.now_ms()
    changes = [
        broker.cancel(TOPIC, named("m")) if number % 5 == 4 else broker.reschedule(TOPIC, named("m"), now_ms + number)
        for number in range(1, 50)
    ]
    told = [each for (each,) in await asyncio.gather(*changes)]
    cancelled = [each for number, each in enumerate(told, start=1) if number % 5 == 4]
    assert sorted(each.outcome for each in cancelled) == [ChangeOutcome.DONE] + [ChangeOutcome.CANCELLED] * (
        len(cancelled) - 1
    )
    assert {each.outcome for each in told} <= {ChangeOutcome.DONE, ChangeOutcome.CANCELLED}
    await rig.pass_ms(LATER_MS)
    assert not await receive(rig)


@on_both
async def test_many_are_changed_in_one_call(rig: EmbeddedRig) -> None:
    """More than go into a unit, and one after another where they are large; each has its answer."""
    names = [f"m-{number}" for number in range(2 * delayed.ENTRIES_PER_UNIT_MAX + 3)]
    await sent(rig, *names)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(delayed, "BYTES_PER_UNIT_MAX", 200)
        told = await rig.broker.delayed.fire(TOPIC, named(*names[:20], "never"))
    assert [each.outcome for each in told] == [ChangeOutcome.DONE] * 20 + [ChangeOutcome.UNKNOWN]
    told = await rig.broker.delayed.fire(TOPIC, named(*names))
    assert {each.outcome for each in told} == {ChangeOutcome.DONE}
    await rig.pass_ms(5)
    assert len(await receive(rig, batch_max=1_000)) == len(names)


@on_both
async def test_forbidden_text_is_refused(rig: EmbeddedRig) -> None:
    """Beyond the longest delay, with a full disk, in a topic that is unknown: nothing is changed, and why is said."""
    await sent(rig, "m")
    broker, now_ms = rig.broker.delayed, rig.clock.now_ms()
    with pytest.raises(Refused) as refused:
        await broker.fire("never-named", named("m"))
    assert refused.value.rule is Rule.TOPIC_UNKNOWN
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(broker, "_delay_max_ms", LATER_MS)
        with pytest.raises(Refused) as refused:
            await broker.reschedule(TOPIC, named("m"), now_ms + LATER_MS + 1)
        assert (refused.value.rule, refused.value.limit) == (Rule.DELIVERY_TIME, f"{LATER_MS} ms")
        await broker.reschedule(TOPIC, named("m"), now_ms + LATER_MS)
        patch.setattr(rig.store, "is_disk_low", lambda: True)
        with pytest.raises(Overloaded, match="disk"):
            await broker.fire(TOPIC, named("m"))
        assert await broker.cancel(TOPIC, named("m")) == [(ChangeOutcome.DONE, now_ms)]


@pytest.mark.parametrize("obstacle", ["the disk is full", "the disk stalls"])
def test_a_change_is_refused_at_once_where_nothing_can_be_written(tmp_path: Path, obstacle: str) -> None:
    """With no room at all, or a stalled disk, each kind of change answers ``Overloaded`` with the reason."""

    async def scenario(rig: EmbeddedRig) -> None:
        await sent(rig, "m")
        broker, at_ms = rig.broker.delayed, rig.clock.now_ms() + LATER_MS
        with pytest.MonkeyPatch.context() as patch:
            if obstacle == "the disk is full":
                patch.setattr(rig.store, "is_disk_full", lambda: True)
            else:
                rig.store.writer._began_s = SystemClock().monotonic_s() - STALL_S  # a batch that began so long ago
            changes = (
                broker.reschedule(TOPIC, named("m"), at_ms),
                broker.cancel(TOPIC, named("m")),
                broker.fire(TOPIC, named("m")),
                broker.under(TOPIC, ["key"]),
            )
            for change in changes:
                with pytest.raises(Overloaded, match=obstacle):
                    await change
            with pytest.raises(Overloaded, match=obstacle):
                await rig.broker.send([an_envelope("m-2")])
        rig.store.writer._began_s = None
        assert [each.outcome for each in await broker.cancel(TOPIC, named("m"))] == [ChangeOutcome.DONE]

    asyncio.run(play(EmbeddedRig(tmp_path, on_disk=False), scenario))


@on_both
async def test_no_message_is_moved_beyond_its_expiry(rig: EmbeddedRig) -> None:
    """By id, handle and own key, one of many: it keeps its time, is answered with its expiry, and is delivered."""
    now_ms = rig.clock.now_ms()
    at_ms, expiry_ms = now_ms + SOON_MS, now_ms + LATER_MS
    expiring = an_envelope("e", deliver_at_ms=at_ms)._replace(not_after_ms=expiry_ms, own_key="k")
    sent_back, _ = await rig.broker.send([expiring, an_envelope("m", deliver_at_ms=at_ms)])
    broker, expires = rig.broker.delayed, Changed(ChangeOutcome.EXPIRES, expiry_ms)
    assert await broker.reschedule(TOPIC, named("e", "m"), expiry_ms) == [expires, (ChangeOutcome.DONE, expiry_ms)]
    assert await broker.reschedule(TOPIC, [rig.broker.recalls.meant(TOPIC, sent_back.recall_handle)], expiry_ms) == [
        expires
    ]
    assert await broker.by_key(TOPIC, ["k"], lambda meant: broker.reschedule(TOPIC, meant, expiry_ms + 1)) == [
        (pack_id("e"), expires)
    ]
    await rig.pass_ms(SOON_MS)
    assert await taken(rig) == ["e"]


@on_both
async def test_a_message_is_moved_up_to_its_expiry(rig: EmbeddedRig) -> None:
    """The last millisecond before it is accepted; once it has expired it cannot be fired, only cancelled."""
    expiry_ms = rig.clock.now_ms() + LATER_MS
    await rig.broker.catalog.topic(TOPIC)
    await rig.broker.operator.set_topic(TOPIC, flow=FlowChange(is_paused=True))
    await rig.broker.send(
        [an_envelope("e", deliver_at_ms=rig.clock.now_ms() + SOON_MS)._replace(not_after_ms=expiry_ms)]
    )
    broker = rig.broker.delayed
    assert await broker.reschedule(TOPIC, named("e"), expiry_ms - 1) == [(ChangeOutcome.DONE, expiry_ms - 1)]
    await rig.pass_ms(LATER_MS)
    assert await broker.fire(TOPIC, named("e")) == [Changed(ChangeOutcome.EXPIRES, expiry_ms)]
    assert await broker.cancel(TOPIC, named("e")) == [(ChangeOutcome.DONE, expiry_ms)]


@on_both
async def test_the_obstacle_of_a_fired_message_is_returned(rig: EmbeddedRig) -> None:
    """The pause of its topic, its rate, or what it still holds after a resume; nothing holds one that is not due."""
    await sent(rig, "a", "b", "c", "d", "e")
    broker, operator = rig.broker.delayed, rig.broker.operator

    async def held(name: str, *, at_ms: int = 0) -> HeldBy:
        (by,) = await broker.held_by(TOPIC, await broker.reschedule(TOPIC, named(name), at_ms))
        return by

    assert await held("a") is HeldBy.NOTHING
    await operator.set_topic(TOPIC, flow=FlowChange(is_paused=True))
    assert await held("b") is HeldBy.PAUSE
    await rig.pass_ms(1)
    assert await broker.cancel(TOPIC, named("b")) == [(ChangeOutcome.DONE, rig.clock.now_ms())]
    assert await held("c", at_ms=rig.clock.now_ms() + LATER_MS) is HeldBy.NOTHING
    assert await held("d") is HeldBy.PAUSE
    await rig.pass_ms(1)
    await operator.set_topic(TOPIC, flow=FlowChange(is_paused=False))
    assert await held("e") is HeldBy.RATE
    await operator.set_topic(TOPIC, flow=FlowChange(deliver_rate=1))
    assert await held("c") is HeldBy.RATE
    assert await broker.held_by(TOPIC, await broker.cancel(TOPIC, named("never"))) == [HeldBy.NOTHING]


def test_a_change_in_doubt_is_reported_when_repeated(tmp_path: Path) -> None:
    """The sync failed: after a kill the message has its new time, after power loss the old one; it comes once."""

    async def scenario(rig: EmbeddedRig) -> None:
        for end in (End.KILL, End.POWER_LOSS):
            await sent(rig, f"m-{end.value}")
            rig.memory.fail_next_sync = True
            at_ms = rig.clock.now_ms() + LATER_MS
            with pytest.raises(BrokerUnavailable):
                await rig.broker.delayed.reschedule(TOPIC, named(f"m-{end.value}"), at_ms)
            await rig.restart(end)
            await rig.pass_ms(SOON_MS)
            assert await taken(rig) == ([] if end is End.KILL else [f"m-{end.value}"])
        await rig.pass_ms(LATER_MS)
        assert await taken(rig) == [f"m-{End.KILL.value}"]

    asyncio.run(play(EmbeddedRig(tmp_path, on_disk=False), scenario))


@on_both
async def test_a_time_that_was_given_is_moved_by_no_step(rig: EmbeddedRig) -> None:
    """A delay that was stretched by a step back is moved; one that was rescheduled meanwhile waits for its time."""
    rig.clock.step_to(rig.clock.now_ms() + LATER_MS)
    ahead_ms = rig.clock.now_ms()
    await rig.broker.send(
        [an_envelope(each, deliver_at_ms=ahead_ms + SOON_MS)._replace(is_relative=True) for each in ("given", "delay")]
    )
    await rig.broker.delayed.reschedule(TOPIC, named("given"), ahead_ms + 2 * SOON_MS)
    await rig.pass_ms(1_500)  # steps within a second are one
    rig.clock.step_to(rig.clock.now_ms() - LATER_MS)
    await rig.settle()
    await rig.pass_ms(SOON_MS)
    assert await taken(rig) == ["delay"]
    moved = [each.event for each in read_outbox(rig.store) if each.event.kind is EventKind.RESCHEDULED]
    assert [each.message_id for each in moved] == [pack_id("given"), pack_id("delay")]
    await rig.pass_ms(LATER_MS + 2 * SOON_MS)
    assert await taken(rig) == ["given"]


def test_now_is_the_time_of_the_daemon(tmp_path: Path) -> None:
    """While a large step forward is held, firing delivers at once, and a time that only the host has reached waits."""
    options = StoreOptions(gap_event=gap_event, clock=ClockOptions(jump_max_ms=LATER_MS))

    async def scenario(rig: EmbeddedRig) -> None:
        await sent(rig, "fired", "waits", after_ms=LATER_MS)
        believed_ms = rig.clock.now_ms()
        rig.clock.step_to(believed_ms + 10 * LATER_MS)
        assert rig.store.clock.status().is_held
        at_ms = believed_ms + SOON_MS
        assert await rig.broker.delayed.reschedule(TOPIC, named("waits"), at_ms) == [(ChangeOutcome.DONE, at_ms)]
        assert await rig.broker.delayed.fire(TOPIC, named("fired")) == [(ChangeOutcome.DONE, believed_ms)]
        await rig.pass_ms(5)
        assert await taken(rig) == ["fired"]
        await rig.pass_ms(SOON_MS - 6)
        assert await taken(rig) == []
        await rig.pass_ms(1)
        assert await taken(rig) == ["waits"]

    asyncio.run(play(EmbeddedRig(tmp_path, on_disk=False, options=options), scenario))
