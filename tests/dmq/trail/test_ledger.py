"""The ledger of a store: every message in one term of an equation. ``EmbeddedRig`` checks that wherever it is used."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from support.forges.messages.half import prepare_one
from support.forges.messages.letters import PURGE, REDRIVE, die_many, finish, only
from support.models.store.ledger_check import differences
from support.rigs.broker.rig import (
    GROUP,
    TOPIC,
    EmbeddedRig,
    End,
    ack,
    an_envelope,
    every_durable_broker,
    play,
    receive,
    send,
)

from broker_adapter.contracts.topics import dead_letter_topic
from dmq.broker.operations.admin import BEGIN
from dmq.broker.topics.settings import KeepChange
from dmq.store.engines.engine import Batch
from dmq.store.schema.accounting.ledger import Term
from dmq.store.schema.keys import META_LEDGER_HEAD, META_NAME, Family
from dmq.store.schema.topics.group import CHUNK_OFFSETS
from dmq.store.store import Store, StoreOptions
from dmq.trail.events import EventKind
from dmq.trail.ledger import LEDGER_KINDS, GroupBook, TopicBook, read_books

pytestmark = pytest.mark.contract

SOON_MS, LATER_MS = 1_000, 500_000


def topic(rig: EmbeddedRig, name: str = TOPIC) -> TopicBook:
    """The book of a topic."""
    return read_books(rig.store).topic(rig.broker.names.topics[name].topic_id)


def group(rig: EmbeddedRig, name: str = GROUP) -> GroupBook:
    """The book of a group on the topic."""
    names = rig.broker.names
    return read_books(rig.store).group(names.topics[TOPIC].topic_id, names.groups[name].group_id)


def terms(book: object, *names: str) -> dict[str, int]:
    """Some terms of a book; of a group's all that are not 0."""
    return {name: getattr(book, name) for name in names or book.__dataclass_fields__ if getattr(book, name)}  # type: ignore[attr-defined]


async def fill(rig: EmbeddedRig) -> None:
    """Something in every term: of six messages one is finished, one waits again, one came back, one is dead."""
    await rig.set_group(GROUP, max_attempts=5, delays_ms=(SOON_MS, LATER_MS))
    await send(rig, *(f"m-{number}" for number in range(6)))
    first, second, third, fourth, *_ = await receive(rig, renew_for="push")
    await ack(rig, first)
    for failed in (second, third):
        await rig.broker.change_invisible(GROUP, TOPIC, failed.receipt_handle, 0)
    await rig.broker.send_back(GROUP, TOPIC, fourth.receipt_handle, -1)
    await rig.pass_ms(SOON_MS)
    again = await receive(rig, renew_for="push", batch_max=1)
    await rig.broker.change_invisible(GROUP, TOPIC, again[0].receipt_handle, 0)
    at_ms = rig.clock.now_ms() + LATER_MS
    receipts = [(await rig.broker.send([an_envelope(f"w-{each}", deliver_at_ms=at_ms)]))[0] for each in range(3)]
    await rig.broker.recall(TOPIC, receipts[0].recall_handle)


FILLED = {"fired": 6, "acked": 1, "dead": 1, "in_retry": 1, "unread": 3}


@every_durable_broker(queues=1)
async def test_each_message_is_in_one_term(rig: EmbeddedRig) -> None:
    """Of a topic and of a group; a kill leaves the terms as they were."""
    await fill(rig)
    assert terms(topic(rig), "scheduled", "fired", "cancelled", "pending", "at_once") == {
        "scheduled": 3,
        "cancelled": 1,
        "pending": 2,
        "at_once": 6,
    }
    for _ in range(2):
        found = terms(group(rig))
        del found["group_id"]
        assert found == FILLED
        rig.check_ledger()
        await rig.restart(End.KILL)
    await rig.pass_ms(LATER_MS)
    assert terms(topic(rig), "scheduled", "fired", "cancelled", "pending") == {
        "scheduled": 3,
        "fired": 2,
        "cancelled": 1,
    }
    assert group(rig).in_retry == 0
    assert group(rig).unread == 6


@every_durable_broker(queues=1)
async def test_half_messages_have_an_equation_of_their_own(rig: EmbeddedRig) -> None:
    """A commit makes one that is scheduled or in its queue."""
    first, second, _ = [await prepare_one(rig, f"h-{each}") for each in range(3)]
    await rig.broker.transactions.commit(TOPIC, first)
    await rig.broker.transactions.roll_back(TOPIC, second)
    book = topic(rig)
    names = ("half", "committed", "rolled_back", "undecided", "at_once")
    assert terms(book, *names) == {"half": 3, "committed": 1, "rolled_back": 1, "undecided": 1, "at_once": 1}


@every_durable_broker(queues=1)
async def test_messages_repeated_by_a_reset_are_fired_again(rig: EmbeddedRig) -> None:
    """What it left is filtered, and the books balance while it is under way and after."""
    await send(rig, *(f"m-{number}" for number in range(4)))
    await ack(rig, (await receive(rig, batch_max=1))[0])
    await rig.broker.operator.reset_group(GROUP, TOPIC, BEGIN)
    found = group(rig)
    assert (found.fired, found.acked, found.filtered, found.unread) == (8, 1, 3, 4)


@every_durable_broker(queues=1)
async def test_unread_messages_removed_by_retention_are_expired(rig: EmbeddedRig) -> None:
    """For a group that is awake at once, for one that sleeps when it reads again; counted once through a kill."""
    await rig.broker.operator.create_topic(
        TOPIC, queues=1, message_type=None, keep=KeepChange(time_ms=60_000, unread="no")
    )
    for each in (GROUP, "asleep"):
        await rig.broker.operator.create_group(each)
        await rig.broker.subscriptions.subscribe(each, TOPIC)
    await send(rig, *(f"m-{number}" for number in range(3)))
    await rig.restart(End.KILL)
    await rig.broker.subscriptions.subscribe(GROUP, TOPIC)
    rig.clock.advance(61_000)
    await rig.broker.retention.turn()
    assert topic(rig).expired == 3
    assert terms(group(rig), "expired", "unread") == {"expired": 3}
    assert terms(group(rig, "asleep"), "expired", "unread") == {"unread": 3}
    rig.check_ledger()
    await rig.broker.operator.reset_group("asleep", TOPIC, BEGIN)  # looks at a copy of its progress only
    assert terms(group(rig, "asleep"), "expired", "unread") == {"expired": 3}
    await rig.restart(End.KILL)
    await rig.broker.subscriptions.subscribe("asleep", TOPIC)
    assert terms(group(rig, "asleep"), "expired", "unread") == {"expired": 3}


@every_durable_broker(queues=1)
async def test_dead_letters_have_an_equation_of_their_own(rig: EmbeddedRig) -> None:
    """Redriven, purged, left; what was redriven is fired once more."""
    await die_many(rig, 4)
    await finish(rig, replace(REDRIVE, filter=only("m-0", "m-1")))
    await finish(rig, replace(PURGE, filter=only("m-2")))
    letters = topic(rig, dead_letter_topic(GROUP)).letters
    assert letters is not None
    assert terms(letters) == {"letters": 4, "redriven": 2, "purged": 1, "left": 1}
    assert terms(group(rig), "fired", "dead", "unread") == {"fired": 6, "dead": 4, "unread": 2}


@every_durable_broker(queues=1)
async def test_a_removed_object_leaves_no_row(rig: EmbeddedRig) -> None:
    """Of a group in all topics, of a topic with all groups; a name that is taken again begins with nothing."""
    await fill(rig)
    await rig.broker.operator.remove_group(GROUP, is_forced=True)
    assert {pair[1] for pair in rig.store.ledger()[0]} <= {0}
    rig.check_ledger()
    await rig.broker.operator.remove_topic(TOPIC, is_forced=True)
    await send(rig, "anew")
    assert topic(rig).at_once == 1
    assert topic(rig).scheduled == 0


@pytest.mark.parametrize("on_disk", [False, True], ids=["memory", "rocksdb"])
@pytest.mark.parametrize("failed_topics", [1, 2])
def test_a_store_without_a_ledger_begins_with_its_contents(
    tmp_path: Path, failed_topics: int, *, on_disk: bool
) -> None:
    """One of an earlier version, and one that an earlier version wrote to in between; the books go on from there."""

    async def scenario(rig: EmbeddedRig) -> None:
        kept = rig._options
        rig._options = replace(kept, ledger_kinds=())
        await rig.restart(End.CLOSE)
        await fill(rig)
        if failed_topics == 2:
            await rig.broker.send([an_envelope("other", topic="other")])
            (other,) = await receive(rig, topic="other", renew_for="push")
            await rig.broker.change_invisible(GROUP, "other", other.receipt_handle, 0)
        for begun in range(1, 3):
            assert rig.store.ledger_head is None
            rig._options = kept
            await rig.restart(End.KILL)
            assert not differences(rig.store)
            # Of what is finished nothing is known: it lay below where the ledger began.
            assert terms(group(rig), "fired", "acked", "dead", "in_retry", "unread") == {
                "fired": 4,
                "in_retry": 1,
                "unread": 3,
            }
            assert terms(topic(rig), "scheduled", "pending") == {"scheduled": 2, "pending": 2}
            if begun == 1:
                rig._options = replace(kept, ledger_kinds=())
                await rig.restart(End.KILL)
        await rig.pass_ms(LATER_MS)
        for delivery in await receive(rig, renew_for="push"):
            await ack(rig, delivery)
        found = group(rig)
        assert found.in_retry == 0
        assert found.fired == found.acked + found.unread == 6
        rig.check_ledger()

    asyncio.run(play(EmbeddedRig(tmp_path, on_disk=on_disk, queues=1), scenario))


@every_durable_broker(queues=1)
async def test_bitmaps_above_the_floor_are_counted(rig: EmbeddedRig) -> None:
    """Finished here and there, over more than one chunk, with a hole at the front that holds the floor down."""
    count = CHUNK_OFFSETS + 40
    await rig.broker.send([an_envelope(f"m-{number}") for number in range(count)])
    taken = [each for _ in range(-(-count // 32)) for each in await receive(rig, batch_max=32)]
    await rig.broker.ack(GROUP, TOPIC, [each.receipt_handle for each in taken[1::2]])
    assert group(rig).unread == count // 2
    await rig.restart(End.KILL)
    rig.check_ledger()


@every_durable_broker(queues=1)
async def test_a_run_that_only_exports_keeps_it(rig: EmbeddedRig) -> None:
    """It begins none, but goes on with one, so that nothing is lost of it."""
    await send(rig, "m-1")
    began = rig.store.ledger_head
    rig._options = replace(rig._options, begins_ledger=False)
    await rig.restart(End.CLOSE)
    assert rig.store.ledger_head is not None
    assert began is not None
    assert rig.store.ledger_head.began_at_ms == began.began_at_ms
    assert topic(rig).at_once == 1


def test_a_store_with_damaged_names_opens_without_a_ledger(tmp_path: Path) -> None:
    """The ledger is no reason to keep a store shut; and it is not begun with what is wrong."""
    rig = EmbeddedRig(tmp_path, on_disk=False)
    batch = Batch()
    batch.puts.append((Family.META, META_NAME + bytes(4), b"?"))
    Store(rig.memory, rig.clock, StoreOptions()).close()
    engine = rig.memory.reopened()
    engine.write(batch)
    store = Store(engine, rig.clock, rig._options)
    assert store.ledger_head is None
    assert store.get_many(Family.META, [META_LEDGER_HEAD]) == [None]
    store.close()


def test_no_kind_of_event_has_the_number_of_a_term() -> None:
    """The ledger's own terms lie above all kinds; what leaves a letter is counted for its queue, not its origin."""
    assert max(EventKind) < min(Term)
    assert not {EventKind.PURGED, EventKind.REDRIVEN} & LEDGER_KINDS
