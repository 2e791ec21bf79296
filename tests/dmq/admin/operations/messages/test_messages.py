"""What a topic holds, page by page: all of it, once, in order, and never more than some rows a call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import pytest
from support.clients.embedded.admin_answers import ask
from support.forges.messages.letters import a_message
from support.rigs.broker.rig import TOPIC, EmbeddedRig, every_durable_broker, receive

from broker_adapter.contracts.errors import Refused
from broker_adapter.contracts.message import pack_id
from dmq.admin import admin_v1 as wire
from dmq.admin.operations.messages import messages as listing
from dmq.admin.operations.messages.messages import MessageCalls
from dmq.broker.delayed.changes import Meant
from dmq.errors import StoreCorrupt
from dmq.store.schema.keys import Family
from dmq.store.store import Store

pytestmark = pytest.mark.contract
HOUR_MS = 3_600_000
Page = Sequence[wire.ListedMessage]


async def fill(rig: EmbeddedRig) -> tuple[list[str], list[str]]:
    """Return the ids of what is ready and of what waits, each in its order; another topic has some in between."""
    now_ms = rig.clock.now_ms()
    ready: list[str] = []
    for number in range(30):
        await rig.broker.send([a_message(f"r-{number}", tag="odd" if number % 2 else "even", keys=[f"k-{number % 5}"])])
        await rig.broker.send([a_message(f"o-{number}", topic="other", deliver_at_ms=now_ms + number * HOUR_MS + 1)])
        ready.append(f"r-{number}")
        rig.clock.advance(1)
    waiting = [f"w-{number}" for number in range(40)]
    for number in reversed(range(40)):
        due_ms = now_ms + (number + 1) * HOUR_MS
        await rig.broker.send([a_message(f"w-{number}", keys=[f"k-{number % 5}"], deliver_at_ms=due_ms)])
    return ready, waiting


def want(
    state: int = 0,
    due_after_ms: int = 0,
    due_before_ms: int = 0,
    **fields: Any,  # noqa: ANN401 - of the request
) -> wire.ListMessagesRequest:
    """Return the request of a list."""
    return wire.ListMessagesRequest(
        topic=TOPIC,
        state=wire.MessageState.Name(state),
        due_after_ms=due_after_ms,
        due_before_ms=due_before_ms,
        **fields,
    )


async def pages(rig: EmbeddedRig, wanted: wire.ListMessagesRequest, *, limit: int = 7) -> list[Page]:
    """Every page of a list."""
    found: list[Page] = []
    wanted.limit, wanted.token = limit, ""
    while True:
        page = await ask(rig, wanted)
        assert len(page.messages) <= limit
        found.append(page.messages)
        wanted.token = page.next_token
        if not page.next_token:
            return found


async def listed(rig: EmbeddedRig, wanted: wire.ListMessagesRequest, *, limit: int = 7) -> list[str]:
    """The ids of a list."""
    return [each.message_id for page in await pages(rig, wanted, limit=limit) for each in page]


@every_durable_broker()
async def test_all_of_it_in_order(rig: EmbeddedRig) -> None:
    """Queues by when it was stored, then the timeline by when it is due, and all that turned round."""
    ready, waiting = await fill(rig)
    await receive(rig, batch_max=5)  # a lease is nothing to a list
    for limit in (1, 7, 1000):
        assert await listed(rig, want(), limit=limit) == ready + waiting
        assert await listed(rig, want(newest_first=True), limit=limit) == (ready + waiting)[::-1]
        assert await listed(rig, want(wire.WAITING), limit=limit) == waiting
        assert await listed(rig, want(wire.QUEUED, newest_first=True), limit=limit) == ready[::-1]
    shown = (await pages(rig, want(), limit=1000))[0][0]
    assert (shown.state, shown.queue_offset, shown.HasField("content")) == (wire.QUEUED, 0, True)


@every_durable_broker()
async def test_filters(rig: EmbeddedRig) -> None:
    """By tag, by key, and by when it is or was due; from the first time on, below the second."""
    start_ms = rig.clock.now_ms()
    ready, waiting = await fill(rig)
    assert await listed(rig, want(tag="odd")) == ready[1::2]
    assert await listed(rig, want(key="k-3")) == ready[3::5] + waiting[3::5]
    for newest_first, step in ((False, 1), (True, -1)):
        span = want(0, start_ms + 5 * HOUR_MS, start_ms + 9 * HOUR_MS, newest_first=newest_first)
        assert await listed(rig, span) == waiting[4:8][::step]
        stored = want(0, start_ms + 5, start_ms + 9, newest_first=newest_first)
        assert await listed(rig, stored) == ready[5:9][::step]
    assert await listed(rig, want(tag="none")) == []


@every_durable_broker()
async def test_a_query_means_the_same_as_the_fields(rig: EmbeddedRig) -> None:
    """By state, tag, time and id; the held messages of a paused topic are found without the others."""
    ready, waiting = await fill(rig)
    assert await listed(rig, want(query="tag:odd order:newest")) == ready[1::2][::-1]
    assert await listed(rig, want(query="state:waiting due-before:+5h key:k-3")) == waiting[3:4]
    for message_id, query in (("w-3", "id:w-3"), ("r-1", "id:r-1 tag:odd state:queued")):
        assert await listed(rig, want(query=query)) == [message_id]
    for query in ("id:r-1 tag:even", "id:r-1 state:waiting", "id:unknown", "id:w-3 due-before:+1h", "state:held"):
        assert await listed(rig, want(query=query)) == []
    with pytest.raises(Refused, match="query, position 7: unknown state 'lost'"):
        await listed(rig, want(query="state:lost"))
    await ask(rig, wire.SetTopicRequest(topic=TOPIC, is_paused=True))
    rig.clock.advance(3 * HOUR_MS)
    rig.scheduler.turn()
    for order, step in (("oldest", 1), ("newest", -1)):
        assert await listed(rig, want(query=f"state:held order:{order}")) == waiting[:3][::step]
    assert await listed(rig, want(query="id:w-1 state:held")) == ["w-1"]
    with pytest.raises(Refused, match="not held"):
        await listed(rig, want(wire.QUEUED, only_held=True))


@every_durable_broker()
async def test_an_overdue_entry_is_found_by_its_true_time(rig: EmbeddedRig) -> None:
    """It lies on the timeline under a later one."""
    now_ms = rig.clock.now_ms()
    rig.scheduler.turn()
    await rig.broker.send([a_message("late", message_group="g", deliver_at_ms=now_ms - HOUR_MS)])
    for newest_first in (False, True):
        assert await listed(rig, want(wire.WAITING, 0, now_ms, newest_first=newest_first)) == ["late"]
        assert await listed(rig, want(wire.WAITING, now_ms, newest_first=newest_first)) == []


@every_durable_broker()
async def test_a_call_looks_at_a_bounded_number_of_rows(rig: EmbeddedRig) -> None:
    """A filter that finds nothing ends its page soon, and says where the next one goes on; the next ones find it."""
    ready, waiting = await fill(rig)
    with patch.object(listing, "ROWS_PER_CALL_MAX", 10), patch.object(listing, "_ROWS_PER_STEP", 4):
        for newest_first in (False, True):
            found = await pages(rig, want(key="k-4", newest_first=newest_first), limit=1000)
            assert len(found) >= (len(ready) + len(waiting)) // 14
            assert sorted(each.message_id for page in found for each in page) == sorted(ready[4::5] + waiting[4::5])


@every_durable_broker()
async def test_other_topics_cost_no_look(rig: EmbeddedRig) -> None:
    """Where only others wait is passed over by the counts, forwards and backwards."""
    now_ms = rig.clock.now_ms()
    others = [a_message(f"o-{at}", topic="other", deliver_at_ms=now_ms + (at + 2) * HOUR_MS) for at in range(500)]
    await rig.broker.send([*others, a_message("w-0", deliver_at_ms=now_ms + 600 * HOUR_MS)])
    await rig.broker.send([a_message("w-1", deliver_at_ms=now_ms + HOUR_MS)])
    looked = 0
    scan, last = rig.store.scan, rig.store.last

    def scanned(family: Family, *arguments: bytes, limit: int, bytes_max: int = 2**62) -> object:
        nonlocal looked
        rows = scan(family, *arguments, limit=limit, bytes_max=bytes_max)
        looked += len(rows.rows) if family is Family.TIMELINE else 0
        return rows

    def sought(family: Family, *arguments: bytes) -> object:
        nonlocal looked
        looked += family is Family.TIMELINE
        return last(family, *arguments)

    with patch.object(rig.store, "scan", scanned), patch.object(rig.store, "last", sought):
        assert await listed(rig, want(wire.WAITING), limit=1) == ["w-1", "w-0"]
        assert looked <= 300
        looked = 0
        assert await listed(rig, want(wire.WAITING, newest_first=True), limit=1) == ["w-0", "w-1"]
        assert looked <= 300


@every_durable_broker()
async def test_a_page_continues_correctly_while_messages_are_rescheduled(rig: EmbeddedRig) -> None:
    """Between any two pages some move, ahead of the list and behind it: all that stay where they are come once."""
    _, waiting = await fill(rig)
    moving, now_ms = waiting[::4], rig.clock.now_ms()
    for newest_first in (False, True):
        found, token = list[str](), ""
        for turn in range(100):
            span = now_ms, now_ms + 60 * HOUR_MS
            page = await ask(rig, want(wire.WAITING, *span, newest_first=newest_first, token=token, limit=3))
            found += [each.message_id for each in page.messages]
            token = page.next_token
            if not token:
                break
            meant = [Meant(pack_id(each)) for each in (moving[turn % 10], moving[-turn % 10])]
            await rig.broker.delayed.reschedule(TOPIC, meant, now_ms + (turn * 13 % 50 + 1) * HOUR_MS + turn % 2)
        assert not token
        still = [each for each in (waiting[::-1] if newest_first else waiting) if each not in moving]
        assert [each for each in found if each not in moving] == still


@every_durable_broker()
async def test_a_token_of_another_list_is_refused(rig: EmbeddedRig) -> None:
    """So is one that nobody made; and an unknown topic is."""
    await fill(rig)
    first = await ask(rig, want(limit=1))
    for token in ("x", "w:", "q:zz", "w:" + "f" * 32, "q:" + ".".join("0" * 99), f"-{first.next_token}", "q:1.2.3.4.5"):
        with pytest.raises(Refused):
            await ask(rig, want(wire.QUEUED if token == "w:" else 0, token=token, limit=1))
    with pytest.raises(Refused):
        await ask(rig, wire.ListMessagesRequest(topic="nobody", limit=1))


@every_durable_broker(queues=1)
async def test_an_entry_that_is_gone_is_looked_for_a_few_times(rig: EmbeddedRig) -> None:
    """Of a damaged store; danger: it was looked for until Python allowed no more calls within calls."""
    await rig.broker.send([a_message("m-1", deliver_at_ms=rig.clock.now_ms() + HOUR_MS)])
    with (
        patch.object(Store, "get_many", lambda *_: [None]),
        pytest.raises(StoreCorrupt, match="'m-1' of topic '" + TOPIC + "' is pending, but not on the timeline"),
    ):
        await MessageCalls(rig.store, rig.broker).find(TOPIC, "m-1")
