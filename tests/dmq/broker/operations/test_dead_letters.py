"""Looking through dead-letter queues: what a letter tells, pages, filters, and what a look may cost."""

from __future__ import annotations

from unittest.mock import patch

import pytest
from support.clients.embedded.failing import change, pushed_one
from support.forges.messages.letters import (
    ALL,
    DEAD,
    REDRIVE,
    UNDERTAKER,
    a_message,
    damage,
    dead_count,
    die,
    die_many,
    finish,
    forward,
    letter_ids,
    letters,
    page,
)
from support.rigs.broker.rig import GROUP, TOPIC, EmbeddedRig, End, ack, an_envelope, every_durable_broker, ids, receive

from dmq.broker.operations import dead_letters as dead_letters_module
from dmq.broker.operations.dead_letters import Page
from dmq.errors import StoreCorrupt
from dmq.store.schema.keys import Family
from dmq.store.schema.messages.record import History, encode_body, encode_history, encode_queued
from dmq.store.schema.topics.group import pack_group_key
from dmq.store.writer.operations import Put
from retry.dead_letter import DeadFilter
from retry.policy import Reason

pytestmark = pytest.mark.contract
WORK_MS = 77


@every_durable_broker(queues=1)
async def test_a_letter_shows_its_message_and_its_end(rig: EmbeddedRig) -> None:
    """Every fact, and the message as it was sent; in a later run too."""
    await rig.set_group(GROUP, max_attempts=2, delays_ms=(1_000,))
    envelope = a_message("m-1", body=b"as sent", tag="blue", keys=("k1", "k2"))
    await rig.broker.send([envelope])
    first = await pushed_one(rig)
    await rig.pass_ms(WORK_MS)
    first_failed_at_ms = rig.clock.now_ms()
    await change(rig, first)
    await rig.pass_ms(1_000)
    second = await pushed_one(rig)
    await rig.pass_ms(WORK_MS)
    died_at_ms = rig.clock.now_ms()
    await change(rig, second)
    for _ in range(2):
        (letter,) = await letters(rig)
        dead = letter.dead
        assert (dead.offset, dead.message_id, dead.origin_topic, dead.tag, dead.keys) == (
            0,
            "m-1",
            TOPIC,
            "blue",
            ("k1", "k2"),
        )
        assert (dead.reason, dead.attempts) == (Reason.EXHAUSTED, 2)
        assert (dead.first_failed_at_ms, dead.last_failed_at_ms) == (first_failed_at_ms, died_at_ms)
        assert (letter.payload, letter.dead_at_ms, letter.outcome) == (envelope.payload, died_at_ms, None)
        await rig.restart(End.KILL)


@every_durable_broker(queues=1)
async def test_letters_are_listed_in_the_order_of_their_death(rig: EmbeddedRig) -> None:
    """Whatever order they were sent in, and whatever topic they came from."""
    await rig.broker.send([a_message("m-1", topic="refunds"), a_message("m-2"), a_message("m-3", topic="fees")])
    for topic in (TOPIC, "fees", "refunds"):
        await forward(rig, topic=topic)
    assert [(each.dead.message_id, each.dead.origin_topic) for each in await letters(rig)] == [
        ("m-2", TOPIC),
        ("m-3", "fees"),
        ("m-1", "refunds"),
    ]


@every_durable_broker(queues=1)
async def test_pages_join_without_a_gap_or_a_repetition(rig: EmbeddedRig) -> None:
    """Any limit: as many as asked for, then where to go on; -1 when nothing is left."""
    wanted = await die_many(rig, 7)
    for limit in (1, 2, 3, 6, 7, 8):
        found: list[str] = []
        offset = 0
        while offset >= 0:
            some = await page(rig, offset=offset, limit=limit)
            assert len(some.letters) == min(limit, 7 - len(found))
            found += [each.dead.message_id for each in some.letters]
            offset = some.next_offset
        assert found == wanted
    assert await page(rig, offset=7) == Page([], -1)
    assert [each.dead.message_id for each in (await page(rig, offset=5)).letters] == wanted[5:]


@every_durable_broker(queues=1)
async def test_each_filter_lists_its_matches(rig: EmbeddedRig) -> None:
    """Reason, topic, key, id, a span of time, and several of them at once."""
    await rig.set_group(GROUP, max_attempts=1, delays_ms=(1_000,))
    times: list[int] = []
    for number, (topic, keys) in enumerate(
        [(TOPIC, ("a",)), ("refunds", ("a", "b")), (TOPIC, ("b", "c")), ("refunds", ())]
    ):
        envelope = a_message(f"m-{number}", topic=topic, keys=keys)
        await rig.pass_ms(1_000)
        times.append(rig.clock.now_ms())
        if number != 2:
            await die(rig, envelope)
        else:
            await rig.broker.send([envelope])
            await change(rig, await pushed_one(rig))
    for chosen, wanted in (
        (ALL, [0, 1, 2, 3]),
        (DeadFilter(reasons=frozenset({Reason.FORWARDED})), [0, 1, 3]),
        (DeadFilter(reasons=frozenset({Reason.EXHAUSTED, Reason.TOO_OLD})), [2]),
        (DeadFilter(topics=frozenset({"refunds"})), [1, 3]),
        (DeadFilter(topics=frozenset({"refunds", TOPIC})), [0, 1, 2, 3]),
        (DeadFilter(keys=frozenset({"a"})), [0, 1]),
        (DeadFilter(keys=frozenset({"c", "z"})), [2]),
        (DeadFilter(message_ids=frozenset({"m-3", "m-0", "m-9"})), [0, 3]),
        (DeadFilter(since_ms=times[1]), [1, 2, 3]),
        (DeadFilter(until_ms=times[2]), [0, 1]),
        (DeadFilter(since_ms=times[1], until_ms=times[1] + 1), [1]),
        (DeadFilter(topics=frozenset({TOPIC}), keys=frozenset({"b"})), [2]),
        (DeadFilter(topics=frozenset({"nowhere"})), []),
    ):
        assert await letter_ids(rig, chosen) == [f"m-{number}" for number in wanted], chosen


@every_durable_broker(queues=1)
async def test_one_look_is_bounded_in_messages(rig: EmbeddedRig) -> None:
    """A page may be short, or empty, before the end; going on finds everything."""
    await die_many(rig, 10)
    last = DeadFilter(message_ids=frozenset({"m-9"}))
    with patch.object(dead_letters_module, "ROWS_PER_CALL_MAX", 4):
        assert await page(rig, last) == Page([], 4)
        assert await page(rig, last, offset=4) == Page([], 8)
        assert (await page(rig, last, offset=8)).next_offset == -1
        assert len((await page(rig)).letters) == 4
        assert await letter_ids(rig, last) == ["m-9"]


@every_durable_broker(queues=1)
async def test_one_look_is_bounded_in_bytes(rig: EmbeddedRig) -> None:
    """Large letters come a few at a time, and at least one at a time."""
    await die(rig, *(a_message(f"m-{number}", body=bytes(10_000)) for number in range(5)))
    with patch.object(dead_letters_module, "BYTES_PER_CALL_MAX", 25_000):
        assert len((await page(rig)).letters) == 3
    with patch.object(dead_letters_module, "BYTES_PER_CALL_MAX", 1):
        assert len((await page(rig)).letters) == 1
        assert len(await letters(rig)) == 5


@every_durable_broker(queues=1)
async def test_a_look_skips_settled_letters(rig: EmbeddedRig) -> None:
    """Letters in front that all have an outcome cost a look nothing, unless they are asked for; nor a job."""
    await die_many(rig, 10)
    await finish(rig, REDRIVE)
    await rig.restart(End.KILL)
    await forward_the_children(rig, 10)
    with patch.object(dead_letters_module, "ROWS_PER_CALL_MAX", 2):
        assert [each.dead.offset for each in (await page(rig)).letters] == [10, 11]
        assert [each.dead.offset for each in (await page(rig, with_outcome=True)).letters] == [0, 1]
    job = await finish(rig, REDRIVE)
    assert (job.first_offset, job.end_offset, job.done, job.passed) == (10, 20, 10, 0)


async def forward_the_children(rig: EmbeddedRig, count: int) -> None:
    """Let what was redriven die again."""
    for each in await receive(rig):
        await rig.broker.dead_letter(GROUP, TOPIC, each.receipt_handle, attempts=1)
        count -= 1
    assert count == 0


@every_durable_broker(queues=1)
async def test_reading_the_queue_as_a_consumer_changes_nothing_here(rig: EmbeddedRig) -> None:
    """Letters that an ops group received and finished are still letters without an outcome."""
    wanted = await die_many(rig, 3)
    taken = await receive(rig, group=UNDERTAKER, topic=DEAD)
    assert ids(taken) == wanted
    await ack(rig, *taken[:2], group=UNDERTAKER, topic=DEAD)
    assert await letter_ids(rig) == wanted
    assert await dead_count(rig) == 3


@every_durable_broker(queues=1)
async def test_a_message_sent_to_the_queue_is_a_letter_without_a_history(rig: EmbeddedRig) -> None:
    """It has no origin and no reason, so no filter by those finds it; its time is when it came."""
    await die_many(rig, 1)
    await rig.pass_ms(1_000)
    now_ms = rig.clock.now_ms()
    envelope = a_message("by-hand", topic=DEAD, keys=("k",), tag="t")
    await rig.broker.send([envelope])
    _, letter = await letters(rig)
    dead = letter.dead
    assert (dead.message_id, dead.origin_topic, dead.reason, dead.attempts) == ("by-hand", "", None, 0)
    assert (dead.tag, dead.keys, dead.first_failed_at_ms, dead.last_failed_at_ms) == ("t", ("k",), 0, now_ms)
    assert (letter.payload, letter.dead_at_ms) == (envelope.payload, now_ms)
    assert await letter_ids(rig, DeadFilter(reasons=frozenset(Reason))) == ["m-0"]
    assert await letter_ids(rig, DeadFilter(since_ms=now_ms)) == ["by-hand"]


@every_durable_broker(queues=1)
async def test_where_nothing_died_there_is_nothing_to_see(rig: EmbeddedRig) -> None:
    """A group without a dead-letter queue, and looking makes none; an empty queue."""
    assert await page(rig) == Page([], -1)
    assert DEAD not in rig.broker.names.topics
    await rig.broker.route(DEAD)
    assert await page(rig) == Page([], -1)
    assert await dead_count(rig) == 0


@every_durable_broker(queues=1)
async def test_an_unreadable_row_is_still_visible(rig: EmbeddedRig) -> None:
    """A payload that is no message has no keys; a record that is none, or names what is not, has an offset only."""
    await die(rig, a_message("m-0"), an_envelope("m-1", payload=b"\xff\xff"), *(a_message("m-2") for _ in range(1)))
    await die_many(rig, 4, first=3)
    body = encode_body(b"\0x", b"", b"", b"")
    for offset, value in (
        (2, b"\xff"),
        (3, encode_queued(1, 1, 0, encode_history(History(999, 0, 0, 1, 1, 1, 1)) + body, has_history=True)),
        (4, encode_queued(1, 1, 0, encode_history(History(1, 0, 0, 1, 1, 1, 99)) + body, has_history=True)),
        (5, encode_queued(1, 1, 0, encode_body(b"\0\xff", b"", b"", b""))),
    ):
        await damage(rig, offset, value)
    found = await letters(rig)
    assert [(each.dead.offset, each.dead.message_id) for each in found] == [
        (0, "m-0"),
        (1, "m-1"),
        (2, ""),
        (3, ""),
        (4, ""),
        (5, ""),
        (6, "m-6"),
    ]
    assert (found[1].payload, found[1].dead.keys, found[2].payload) == (b"\xff\xff", (), b"")
    assert await dead_count(rig) == 7


@every_durable_broker(queues=1)
async def test_a_damaged_outcome_is_an_error(rig: EmbeddedRig) -> None:
    """It never looks like a letter without one."""
    await die_many(rig, 1)
    await finish(rig, REDRIVE)
    topic_id = rig.broker.names.topics[DEAD].topic_id
    for value in (b"", b"{", b"[]", b'{"what": "redriven"}'):
        await rig.store.commit_async([Put(Family.GROUP, pack_group_key(0, topic_id, 1, 4, 0), value)])
        with pytest.raises(StoreCorrupt):
            await page(rig, with_outcome=True)
