"""Messages with a key of their sender: at most one of a topic waits under it, and what becomes of others is told."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from support.forges.messages.half import a_half, prepare
from support.forges.messages.own_keys import KEY, SOON_MS, keyed, put, waiting_under_keys
from support.models.store.outbox import read_outbox
from support.rigs.broker.rig import TOPIC, EmbeddedRig, End, Rig, ack, every_durable_broker, ids, play, receive
from support.rigs.store.rows import all_rows

from broker_adapter.contracts.adapter import TopicRoute
from broker_adapter.contracts.errors import Refused
from broker_adapter.contracts.message import MessageType, pack_id, unpack_id
from broker_adapter.contracts.own_keys import OWN_KEY
from broker_adapter.wire.mapping import decode
from dmq.broker.delayed.changes import Changed, ChangeOutcome, Meant, rescheduled
from dmq.broker.topics.settings import FlowChange
from dmq.cluster.broker import ClusterBroker
from dmq.config.units import TopicPatterns
from dmq.store.schema.keys import Family, index_place
from dmq.store.schema.messages.own_keys import own_key_scope
from dmq.store.store import StoreOptions
from dmq.store.writer.operations import HandOver, Hold, Reschedule, Withdraw
from dmq.trail.events import NO_QUEUE, EventKind, encode_event, gap_event

pytestmark = pytest.mark.contract
LATER_MS = 60_000
_OF_KEYS = {
    *(EventKind.SCHEDULED, EventKind.QUEUED, EventKind.DELIVERED, EventKind.RECALLED),
    *(EventKind.REPLACED, EventKind.ABSORBED, EventKind.COMMITTED),
}


async def taken(rig: EmbeddedRig) -> list[str]:
    """Receive what is there, and acknowledge it."""
    found = await receive(rig)
    if found:
        await ack(rig, *found)
    return ids(found)


async def after(rig: EmbeddedRig, ms: int) -> list[str]:
    """Let time pass, and return what comes."""
    await rig.pass_ms(ms)
    waiting_under_keys(rig.store)
    return await taken(rig)


def told(rig: EmbeddedRig) -> list[tuple[str, str]]:
    """What the trail says of messages, in its order."""
    return [
        (each.event.kind.name, unpack_id(each.event.message_id))
        for each in read_outbox(rig.store)
        if each.event.kind in _OF_KEYS
    ]


@every_durable_broker()
async def test_a_later_message_replaces_the_pending_one(rig: EmbeddedRig) -> None:
    """Debounce: its body and its time are the ones that count, sooner or later; what it replaced never comes."""
    await put(rig, "a")
    await put(rig, "b", LATER_MS)
    assert waiting_under_keys(rig.store) == {KEY: "b"}
    assert await after(rig, SOON_MS) == []
    await put(rig, "c")
    assert await after(rig, SOON_MS) == ["c"]
    assert await after(rig, LATER_MS) == []
    assert told(rig) == [
        *[("SCHEDULED", "a"), ("REPLACED", "a"), ("SCHEDULED", "b"), ("REPLACED", "b"), ("SCHEDULED", "c")],
        ("DELIVERED", "c"),
    ]


@every_durable_broker()
async def test_the_first_message_stays_if_the_later_one_asks_for_it(rig: EmbeddedRig) -> None:
    """Throttle: the later one is not stored, and is answered with the one that waits; after that the key is free."""
    first = await put(rig, "a", keeps=True)
    later = await put(rig, "b", 1, keeps=True)
    assert (later.message_id, later.recall_handle) == ("a", first.recall_handle)
    assert not later.repeated
    assert rig.broker.sends.accepted_total == 1
    assert await after(rig, SOON_MS) == ["a"]
    assert (await put(rig, "c", keeps=True)).message_id == "c"
    assert told(rig)[:3] == [("SCHEDULED", "a"), ("ABSORBED", "b"), ("DELIVERED", "a")]


@every_durable_broker()
async def test_a_repeated_send_is_answered_as_the_first_was(rig: EmbeddedRig) -> None:
    """Also one that was replaced since, or absorbed, or delivered: it never takes the place of what came after it."""
    sent = {name: await put(rig, name) for name in ("a", "b")}
    sent["c"] = await put(rig, "c", keeps=True)
    for _ in range(2):
        for name, first in sent.items():
            again = await put(rig, name, keeps=name == "c")
            assert again == first._replace(repeated=True)
        assert waiting_under_keys(rig.store) == {KEY: "b"}
        await rig.restart(End.KILL)
    assert await after(rig, SOON_MS) == ["b"]
    await put(rig, "d")
    for name, first in sent.items():
        again = await put(rig, name, keeps=name == "c")
        assert (again.message_id, again.repeated) == (first.message_id, True)
    assert waiting_under_keys(rig.store) == {KEY: "d"}
    assert await after(rig, SOON_MS) == ["d"]


@every_durable_broker()
async def test_an_undelayed_message_decides_about_the_pending_one(rig: EmbeddedRig) -> None:
    """It replaces it and goes out at once, or is absorbed by it; where nothing waits it leaves the key free."""
    assert (await put(rig, "a", 0)).queue_id >= 0
    assert (await put(rig, "b", 0, keeps=True)).queue_id >= 0
    assert sorted(await after(rig, 0)) == ["a", "b"]
    await put(rig, "c")
    assert (await put(rig, "d", 0, keeps=True)).message_id == "c"
    assert await after(rig, 0) == []
    await put(rig, "e", 0)
    assert waiting_under_keys(rig.store) == {}
    assert await after(rig, SOON_MS) == ["e"]
    assert told(rig)[-4:] == [("SCHEDULED", "c"), ("ABSORBED", "d"), ("REPLACED", "c"), ("QUEUED", "e")]


@every_durable_broker()
async def test_messages_of_one_batch_decide_in_their_order(rig: EmbeddedRig) -> None:
    """The last one of a request waits; of those that keep what waits, the first one. Other keys are others' affair."""
    at_ms = rig.clock.now_ms() + SOON_MS
    receipts = await rig.broker.send(
        [
            *(keyed(each, at_ms) for each in ("a", "b", "a", "c")),
            *(keyed(each, at_ms, key="other", keeps=True) for each in ("d", "e", "e")),
            keyed("f", at_ms, topic="elsewhere"),
        ]
    )
    assert [each.message_id for each in receipts] == ["a", "b", "a", "c", "d", "d", "d", "f"]
    assert [each.repeated for each in receipts] == [False, False, True, False, False, False, True, False]
    rows = rig.store.pending()
    assert [rows[rig.broker.names.topics[each].topic_id] for each in (TOPIC, "elsewhere")] == [2, 1]
    assert sorted(await after(rig, SOON_MS)) == ["c", "d"]


@every_durable_broker()
async def test_units_of_one_batch_that_move_and_replace(rig: EmbeddedRig) -> None:
    """What is rescheduled and replaced in one batch, in whichever order, leaves one entry, and one row of its key."""
    await put(rig, "a")
    moved = asyncio.ensure_future(rig.broker.delayed.reschedule(TOPIC, [Meant(pack_id("a"))], LATER_MS * 10**6))
    others: list[asyncio.Future[object]] = []
    for number in range(20):
        others.append(asyncio.ensure_future(put(rig, f"b-{number}")))
        await asyncio.sleep(0)
        if number % 4 == 0:
            cancelled = rig.broker.delayed.cancel(TOPIC, [Meant(pack_id(f"b-{number}"))])
            others.append(asyncio.ensure_future(cancelled))
    ((outcome, _),) = await moved
    assert outcome in {ChangeOutcome.DONE, ChangeOutcome.REPLACED}
    await asyncio.gather(*others)
    assert waiting_under_keys(rig.store) == {KEY: "b-19"}
    assert await after(rig, SOON_MS) == ["b-19"]


@every_durable_broker()
async def test_events_on_a_message_in_the_batch_that_replaces_it(rig: EmbeddedRig) -> None:
    """One entry, one row of the key and one count for what is left, whatever the batch did with it before."""
    for first in ("hold", "reschedule", "hand over", "withdraw"):
        await put(rig, first)
        store, placement, due_ms = rig.store, rig.broker.placement, rig.clock.now_ms() + SOON_MS
        topic, message_id = rig.broker.names.topics[TOPIC], pack_id(first)
        receipt = store.find(topic.topic_id, message_id)
        assert receipt is not None
        (value,) = store.get_many(Family.TIMELINE, [receipt.key])
        assert value is not None
        (handed,) = placement.hand_over([(receipt.key, value)], due_ms)
        op: Hold | Reschedule | HandOver | Withdraw = handed
        if first == "hold":
            op = Hold(receipt.key, topic.topic_id, message_id, value)
        elif first == "reschedule":
            op = rescheduled(message_id, receipt, value, due_ms + LATER_MS, due_ms)
        elif first == "withdraw":
            event = encode_event(EventKind.RECALLED, topic.topic_id, 0, NO_QUEUE, 0, due_ms, message_id)
            place = receipt.key, topic.topic_id, message_id, due_ms, len(value)
            op = Withdraw(*place, event=event, own_key=handed.own_key)
        later = [keyed(f"{first} {each}", due_ms + LATER_MS) for each in ("b", "c")]
        answers = await store.commit_async([op, *(placement.accept(topic, each, due_ms) for each in later)])
        assert all(each.state is not None for each in answers)
        assert waiting_under_keys(store) == {KEY: f"{first} c"}
        assert store.pending() == {topic.topic_id: 1}
        assert not store.held()
        rig.clock.advance(SOON_MS)
        assert sorted(await after(rig, LATER_MS)) == ([first] if first == "hand over" else []) + [f"{first} c"]


@every_durable_broker()
async def test_a_replaced_message_is_marked(rig: EmbeddedRig) -> None:
    """To who would recall or move it: it does not wait, and another message comes."""
    handle = (await put(rig, "a")).recall_handle
    rig.clock.advance(1)
    replaced_ms = rig.clock.now_ms()
    await put(rig, "b")
    rig.clock.advance(1)
    assert await rig.broker.delayed.fire(TOPIC, [Meant(pack_id("a"))]) == [Changed(ChangeOutcome.REPLACED, replaced_ms)]
    with pytest.raises(Refused, match="a later message under its own key took its place at"):
        await rig.broker.recall(TOPIC, handle)
    assert await rig.broker.delayed.cancel(TOPIC, [Meant(pack_id("b"))]) == [(ChangeOutcome.DONE, rig.clock.now_ms())]
    assert waiting_under_keys(rig.store) == {}


@every_durable_broker()
async def test_a_pending_message_is_found_by_its_key(rig: EmbeddedRig) -> None:
    """It is moved, fired and cancelled by it, and follows no key that is free."""
    await put(rig, "a")
    broker = rig.broker.delayed
    later_ms = rig.clock.now_ms() + LATER_MS
    a = pack_id("a")
    changed = await broker.by_key(TOPIC, [KEY, "free"], lambda meant: broker.reschedule(TOPIC, meant, later_ms))
    assert changed == [(a, (ChangeOutcome.DONE, later_ms)), (b"", (ChangeOutcome.UNKNOWN, 0))]
    assert await after(rig, SOON_MS) == []
    assert await broker.under(TOPIC, [KEY, "free"]) == [Meant(a, 1), None]
    changed = await broker.by_key(TOPIC, [KEY], lambda meant: broker.fire(TOPIC, meant))
    assert changed == [(a, (ChangeOutcome.DONE, rig.clock.now_ms()))]
    assert await after(rig, 2) == ["a"]
    await put(rig, "b")
    assert await broker.by_key(TOPIC, [KEY] * 2, lambda meant: broker.cancel(TOPIC, meant)) == [
        (pack_id("b"), (ChangeOutcome.DONE, rig.clock.now_ms())),
        (pack_id("b"), (ChangeOutcome.CANCELLED, rig.clock.now_ms())),
    ]


@every_durable_broker()
async def test_a_change_by_key_follows_a_replacement(rig: EmbeddedRig) -> None:
    """What takes the place of the message that was found is meant; one that was delivered is said to be."""
    await put(rig, "a")
    broker = rig.broker.delayed
    turns = iter(("replace", "go on", "deliver"))

    async def cancel(meant: Sequence[Meant]) -> Sequence[Changed]:
        turn = next(turns)
        if turn == "replace":
            await put(rig, "b")
        elif turn == "deliver":
            assert await after(rig, SOON_MS) == ["c"]
        return await broker.cancel(TOPIC, meant)

    assert await broker.by_key(TOPIC, [KEY], cancel) == [(pack_id("b"), (ChangeOutcome.DONE, rig.clock.now_ms()))]
    await put(rig, "c")
    ((message_id, (outcome, at_ms)),) = await broker.by_key(TOPIC, [KEY], cancel)
    assert (message_id, outcome, at_ms) == (pack_id("c"), ChangeOutcome.TOO_LATE, rig.clock.now_ms())


async def by_key(rig: EmbeddedRig, change: str, own_key: str = KEY) -> tuple[str, ChangeOutcome, int]:
    """Cancel or fire the message under an own key; return its id, the outcome and the time of the outcome."""
    delayed = rig.broker.delayed
    call = delayed.cancel if change == "cancel" else delayed.fire
    ((message_id, (outcome, at_ms)),) = await delayed.by_key(TOPIC, [own_key], lambda meant: call(TOPIC, meant))
    return unpack_id(message_id) if message_id else "", outcome, at_ms


@every_durable_broker()
async def test_a_change_repeated_by_key_names_the_last_holder(rig: EmbeddedRig) -> None:
    """A change repeated after a lost answer returns the message that ended and its outcome, also after a kill."""
    await put(rig, "a")
    cancelled_ms = rig.clock.now_ms()
    assert await by_key(rig, "cancel") == ("a", ChangeOutcome.DONE, cancelled_ms)
    await rig.restart(End.KILL, down_ms=1)
    assert await by_key(rig, "cancel") == ("a", ChangeOutcome.CANCELLED, cancelled_ms)
    assert await by_key(rig, "fire") == ("a", ChangeOutcome.CANCELLED, cancelled_ms)
    assert await by_key(rig, "cancel", "free") == ("", ChangeOutcome.UNKNOWN, 0)

    await put(rig, "b")
    assert await by_key(rig, "fire") == ("b", ChangeOutcome.DONE, rig.clock.now_ms())
    await rig.pass_ms(2)
    delivered_ms = rig.clock.now_ms()
    await rig.restart(End.KILL, down_ms=1)
    assert await by_key(rig, "fire") == ("b", ChangeOutcome.TOO_LATE, delivered_ms)

    await put(rig, "c")
    replaced_ms = rig.clock.now_ms()
    await put(rig, "d", 0)  # delivered at once: the key is free, and "d" never held it
    rig.clock.advance(1)
    assert await by_key(rig, "cancel") == ("c", ChangeOutcome.REPLACED, replaced_ms)


@every_durable_broker()
async def test_the_holder_of_a_key_precedes_the_last_one(rig: EmbeddedRig) -> None:
    """A pending message is the one that a change by key applies to, also if an earlier one ended in the same batch."""
    at_ms = rig.clock.now_ms() + SOON_MS
    await put(rig, "a")
    await by_key(rig, "cancel")
    await rig.broker.send([keyed("b", at_ms), keyed("at once"), keyed("c", at_ms)])
    assert (await by_key(rig, "cancel"))[:2] == ("c", ChangeOutcome.DONE)
    assert (await by_key(rig, "cancel"))[:2] == ("c", ChangeOutcome.CANCELLED)
    await rig.broker.send([keyed("d", at_ms), keyed("e", at_ms), keyed("at once again")])
    assert (await by_key(rig, "cancel"))[:2] == ("e", ChangeOutcome.REPLACED)


@pytest.mark.parametrize("on_disk", [True, False])
def test_the_last_holder_is_forgotten_with_its_end(tmp_path: Path, on_disk: bool) -> None:
    """After two idempotency windows a change by the key is answered as unknown, and the index has no row of the key."""
    options = StoreOptions(gap_event=gap_event, idempotency_window_ms=LATER_MS)

    async def scenario(rig: EmbeddedRig) -> None:
        await put(rig, "a")
        await by_key(rig, "cancel")
        cancelled_ms = rig.clock.now_ms()
        rig.clock.advance(LATER_MS)
        await put(rig, "b", 2 * LATER_MS)  # the next generation
        rig.clock.advance(1)
        await by_key(rig, "cancel")
        assert (await by_key(rig, "cancel"))[:2] == ("b", ChangeOutcome.CANCELLED)
        assert await rig.broker.delayed.cancel(TOPIC, [Meant(pack_id("a"))]) == [
            (ChangeOutcome.CANCELLED, cancelled_ms)
        ]
        for _ in range(2):
            rig.clock.advance(LATER_MS)
            await rig.broker.send([keyed("other", key="other")])
        assert await by_key(rig, "cancel") == ("", ChangeOutcome.UNKNOWN, 0)
        scope = own_key_scope(rig.broker.names.topics[TOPIC].topic_id)
        assert not [row for row in all_rows(rig.store, Family.INDEX) if index_place(row[0])[1] == scope]

    asyncio.run(play(EmbeddedRig(tmp_path, on_disk=on_disk, options=options), scenario))


@every_durable_broker()
async def test_only_a_key_that_becomes_free_has_a_row_of_its_last_holder(rig: EmbeddedRig) -> None:
    """Neither a message without an own key nor a replacement pays for one."""
    now_ms = rig.clock.now_ms()
    plain = [keyed(f"p-{number}", now_ms + 1)._replace(own_key="") for number in range(3)]
    await rig.broker.send([*plain, keyed("a", now_ms + 1), keyed("b", now_ms + 1)])
    topic_id = rig.broker.names.topics[TOPIC].topic_id

    def rows() -> dict[int, int]:
        return Counter(index_place(key)[1] for key, _ in all_rows(rig.store, Family.INDEX))

    assert rows() == {topic_id: 5}
    await rig.pass_ms(1)
    assert rows() == {topic_id: 5, own_key_scope(topic_id): 1}


@every_durable_broker()
async def test_the_hand_over_frees_the_key(rig: EmbeddedRig) -> None:
    """Whoever receives the message sees its key as a property; its retries and a kill leave the key free."""
    await put(rig, "a")
    assert await after(rig, SOON_MS - 1) == []
    await rig.pass_ms(1)
    assert waiting_under_keys(rig.store) == {}
    await rig.restart(End.KILL)
    (came,) = await receive(rig)
    assert decode(came.payload).properties == {OWN_KEY: KEY}
    await put(rig, "b")
    await rig.broker.send_back("workers", TOPIC, came.receipt_handle, 1)
    assert waiting_under_keys(rig.store) == {KEY: "b"}
    assert sorted(await after(rig, LATER_MS)) == ["a", "b"]


@every_durable_broker()
async def test_a_half_message_has_its_key_from_its_commit_on(rig: EmbeddedRig) -> None:
    """Until then it replaces nothing; a rolled back one never does, and a committed one may be absorbed."""
    await put(rig, "a")

    async def half(name: str, *, keeps: bool = False, due_ms: int = 0) -> str:
        wanted = keyed(name, due_ms, keeps=keeps)
        (receipt,) = await prepare(rig, a_half(name)._replace(envelope=wanted))
        return receipt.transaction_id

    soon_ms = rig.clock.now_ms() + SOON_MS
    kept, gone, replaces, goes = [
        await half("kept", keeps=True),
        await half("gone"),
        await half("replaces", due_ms=soon_ms),
        await half("goes"),
    ]
    assert waiting_under_keys(rig.store) == {KEY: "a"}
    await rig.restart(End.KILL)
    await rig.broker.transactions.commit(TOPIC, kept)
    await rig.broker.transactions.roll_back(TOPIC, gone)
    assert waiting_under_keys(rig.store) == {KEY: "a"}
    await rig.broker.transactions.commit(TOPIC, kept)
    await rig.broker.transactions.commit(TOPIC, replaces)
    assert waiting_under_keys(rig.store) == {KEY: "replaces"}
    await rig.broker.transactions.commit(TOPIC, goes)
    assert waiting_under_keys(rig.store) == {}
    assert await after(rig, SOON_MS) == ["goes"]
    assert told(rig)[1:] == [
        *[("COMMITTED", "kept"), ("ABSORBED", "kept")],
        *[("COMMITTED", "replaces"), ("REPLACED", "a"), ("SCHEDULED", "replaces")],
        *[("COMMITTED", "goes"), ("REPLACED", "replaces"), ("QUEUED", "goes")],
    ]


@every_durable_broker()
async def test_messages_of_a_group_keep_the_order_of_their_times(rig: EmbeddedRig) -> None:
    """One that is replaced leaves its place, and the other one comes at its own time, in whichever group it is."""
    at_ms = rig.clock.now_ms() + SOON_MS
    await rig.broker.send(
        [
            *(keyed(each, at_ms + number, key=each, message_group="g") for number, each in enumerate("abc")),
            keyed("A", at_ms + 3, key="a", message_group="g"),
            keyed("B", at_ms, key="b", message_group="other"),
        ]
    )
    await rig.pass_ms(SOON_MS + 3)
    came = await taken(rig)
    assert sorted(came) == ["A", "B", "c"]
    assert came.index("c") < came.index("A")


@every_durable_broker()
async def test_a_held_message_of_a_paused_topic_is_replaced(rig: EmbeddedRig) -> None:
    """Due or not, it waits; a replacement of it that is due is held as well."""
    await put(rig, "a")
    await rig.broker.operator.set_topic(TOPIC, flow=FlowChange(is_paused=True))
    assert await after(rig, SOON_MS) == []
    assert rig.store.held()
    await put(rig, "b", 1)
    assert not rig.store.held()
    assert await after(rig, 1) == []
    assert (await put(rig, "c", keeps=True)).message_id == "b"
    await rig.broker.operator.set_topic(TOPIC, flow=FlowChange(is_paused=False))
    assert await after(rig, LATER_MS) == ["b"]


@every_durable_broker()
async def test_the_keys_of_a_removed_topic_go_with_it(rig: EmbeddedRig) -> None:
    """A topic made anew under its name knows nothing of them."""
    await put(rig, "a")
    await rig.broker.operator.remove_topic(TOPIC, is_forced=True)
    assert waiting_under_keys(rig.store) == {}
    assert (await put(rig, "b", keeps=True)).message_id == "b"
    assert await after(rig, SOON_MS) == ["b"]


@every_durable_broker()
async def test_a_delay_that_a_step_of_the_clock_moves_keeps_its_key(rig: EmbeddedRig) -> None:
    """What waits is replaced, under its new time and with its counts, after a step back as before it."""
    rig.clock.step_to(rig.clock.now_ms() + 3_600_000)
    wanted = keyed("a", rig.clock.now_ms() + LATER_MS)._replace(is_relative=True)
    await rig.broker.send([wanted])
    rig.clock.step_to(rig.clock.now_ms() - 3_600_000)
    await rig.settle()
    assert waiting_under_keys(rig.store) == {KEY: "a"}
    assert EventKind.RESCHEDULED in {each.event.kind for each in read_outbox(rig.store)}
    await put(rig, "b")
    assert await after(rig, SOON_MS) == ["b"]
    assert await after(rig, 2 * 3_600_000) == []


@every_durable_broker()
async def test_a_restored_backup_has_its_keys(rig: EmbeddedRig) -> None:
    """Those of the moment it was made: what was replaced since waits, and is replaced again."""
    await put(rig, "a")
    backup = rig.back_up()
    await put(rig, "b")
    await rig.restore(backup)
    assert waiting_under_keys(rig.store) == {KEY: "a"}
    await put(rig, "c")
    assert await after(rig, SOON_MS) == ["c"]


class Elsewhere:
    """A cluster that must not be asked, and a forwarder that has nothing."""

    def __init__(self) -> None:
        self.is_away = False
        self.lanes: dict[str, object] = {}

    def known_route(self, topic: str) -> TopicRoute:
        return TopicRoute(topic, 1, (MessageType.NORMAL, MessageType.TRANSACTION))


def test_in_front_of_a_cluster_keyed_messages_stay_here(tmp_path: Path) -> None:
    """Delayed or not, it decides about what waits here; the cluster's half messages cannot have one."""

    async def scenario(rig: Rig) -> None:
        assert isinstance(rig, EmbeddedRig)
        away: Any = Elsewhere()
        front = ClusterBroker(rig.broker, away, away, accepts_while_away=True, timeout_ms=1, here=away)
        await front.send([keyed("a", rig.clock.now_ms() + SOON_MS)])
        await front.send([keyed("b")])
        assert waiting_under_keys(rig.store) == {}
        assert told(rig) == [("SCHEDULED", "a"), ("REPLACED", "a"), ("QUEUED", "b")]
        with pytest.raises(Refused, match="cannot have an own key"):
            await front.prepare([a_half("h")._replace(envelope=keyed("h"))])

    asyncio.run(play(EmbeddedRig(tmp_path, on_disk=False, stay=TopicPatterns()), scenario))
