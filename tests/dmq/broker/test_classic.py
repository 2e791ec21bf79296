"""What the embedded broker promises its classic clients beside the contract: what is durable, and once."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace

import pytest
from support.forges.messages.letters import PURGE, REDRIVE, counts, finish
from support.models.store.outbox import read_outbox
from support.rigs.broker.rig import End, an_envelope, until
from support.rigs.rocketmq.classic import (
    ALL,
    SEND_MS,
    EmbeddedClassicRig,
    Heard,
    a_message,
    beat,
    every_embedded_classic,
    joined,
    pull_all,
    pull_some,
    queues_of,
    send,
)

from broker_adapter.contracts.classic import Decision, Filter, MessageQueue, Outgoing, Presence, ReceivedMessage
from broker_adapter.contracts.errors import Refused, Rule
from broker_adapter.contracts.message import unpack_id
from broker_adapter.contracts.own_keys import OWN_KEY
from broker_adapter.contracts.topics import dead_letter_topic, retry_topic
from dmq.broker.classic.clients import HEARTBEAT_S, SILENT_S_MAX
from dmq.trail.events import LANE, EventKind

pytestmark = pytest.mark.contract

TOPIC, GROUP = "orders", "workers"
_LEVEL_1_MS = 1_000


async def one(rig: EmbeddedClassicRig, body: bytes = b"body") -> tuple[MessageQueue, ReceivedMessage]:
    """A message in queue 2 of the topic, and a consumer that pulled it."""
    await rig.embedded.broker.catalog.topic(TOPIC)
    client = rig.client("a")
    await joined(client, GROUP, TOPIC)
    queue = MessageQueue(TOPIC, "embedded", 2)
    await send(client, queue, body)
    (found,) = await pull_all(rig, client, GROUP, queue, 1)
    return queue, found


async def copies(rig: EmbeddedClassicRig, topic: str) -> list[ReceivedMessage]:
    """What lies in a retry topic or a dead-letter queue, after all delays."""
    await rig.later(10_000)
    client = rig.client("looker")
    await joined(client, GROUP, TOPIC)
    found: list[ReceivedMessage] = []
    for queue in await queues_of(client, topic):
        found += await pull_some(client, GROUP, queue)
    return found


@every_embedded_classic()
async def test_a_message_keeps_its_queue_through_a_restart(rig: EmbeddedClassicRig) -> None:
    """While it waits for its time, or is a half message; each comes where its producer put it."""
    await rig.embedded.broker.catalog.topic(TOPIC)
    client, queue = rig.client("a"), MessageQueue(TOPIC, "embedded", 3)
    for number in range(3):
        await send(client, queue, b"late-%d" % number, delay_level=1)
    (half,) = await send(client, queue, b"half", is_half=True)
    (late_half,) = await send(client, queue, b"late half", is_half=True, delay_level=1)
    await rig.embedded.restart(End.KILL)
    client = rig.client("b")
    await joined(client, GROUP, TOPIC)
    await client.end_transaction("producers", half, Decision.COMMIT)
    await client.end_transaction("producers", late_half, Decision.COMMIT)
    await rig.later(_LEVEL_1_MS)
    found = await pull_all(rig, client, GROUP, queue, 5)
    assert {each.message.body for each in found} == {b"late-0", b"late-1", b"late-2", b"half", b"late half"}
    assert {each.attempts_failed for each in found} == {0}


@every_embedded_classic()
async def test_a_send_back_that_is_repeated_is_kept_once(rig: EmbeddedClassicRig) -> None:
    """One after the other or at once, also after a kill; one that came in between is kept anew."""
    _, found = await one(rig)
    client = rig.clients[-1]
    calls = [client.send_back(GROUP, found, delay_level=1, attempts_max=16) for _ in range(3)]
    await asyncio.gather(*calls)
    await rig.embedded.restart(End.KILL)
    client = rig.client("b")
    await client.send_back(GROUP, found, delay_level=1, attempts_max=16)
    assert [each.attempts_failed for each in await copies(rig, retry_topic(GROUP))] == [1]
    await client.send_back(GROUP, found, delay_level=1, attempts_max=16)
    assert [each.attempts_failed for each in await copies(rig, retry_topic(GROUP))] == [1, 1]


@every_embedded_classic()
async def test_a_letter_that_is_sent_again_and_again_is_one(rig: EmbeddedClassicRig) -> None:
    """Until somebody deals with it: what dies after that is another one."""
    _, found = await one(rig)
    client = rig.clients[-1]
    await asyncio.gather(*(client.send_back(GROUP, found, delay_level=-1, attempts_max=16) for _ in range(3)))
    await rig.embedded.restart(End.KILL)
    client = rig.client("b")
    await client.send_back(GROUP, found, delay_level=-1, attempts_max=16)
    letters = dead_letter_topic(GROUP)
    assert len(await copies(rig, letters)) == 1
    assert counts(await finish(rig.embedded, PURGE)) == (1, 0, 0)
    assert await copies(rig, letters) == []
    await client.send_back(GROUP, found, delay_level=-1, attempts_max=16)
    assert len(await copies(rig, letters)) == 1


@every_embedded_classic()
async def test_a_power_cut_leaves_a_send_back_before_or_after(rig: EmbeddedClassicRig) -> None:
    """The message is in its queue and not committed, or it is there and in one copy: never gone."""
    end = End.KILL if rig.embedded._on_disk else End.POWER_LOSS
    queue, found = await one(rig)
    calling = asyncio.ensure_future(rig.clients[-1].send_back(GROUP, found, delay_level=1, attempts_max=16))
    for _ in range(20):
        await asyncio.sleep(0)
    await rig.embedded.restart(end)
    calling.cancel()  # whoever waited for it died
    await asyncio.wait((calling,))
    _ = calling.cancelled() or calling.exception()
    client = rig.client("b")
    await joined(client, GROUP, TOPIC)
    assert await client.committed_offset(GROUP, queue) is None
    (again,) = await pull_all(rig, client, GROUP, queue, 1)
    await client.send_back(GROUP, again, delay_level=1, attempts_max=16)
    assert [each.message.message_id for each in await copies(rig, retry_topic(GROUP))] == [found.message.message_id]


@every_embedded_classic()
async def test_delays_grow_with_the_failures(rig: EmbeddedClassicRig) -> None:
    """Level 0 is the broker's: level 3, 10 s, after the first failure, then the next ones."""
    _, found = await one(rig)
    client = rig.clients[-1]
    (retries,) = await queues_of(client, retry_topic(GROUP))
    for number, delay_ms in enumerate((10_000, 30_000, 60_000)):
        await client.send_back(GROUP, found, delay_level=0, attempts_max=16)
        await rig.later(delay_ms - 1)
        assert not await pull_some(client, GROUP, retries, at=number)
        await rig.later(1)
        (found,) = await pull_some(client, GROUP, retries, at=number)


@every_embedded_classic()
async def test_operators_send_letters_to_where_the_group_pulls(rig: EmbeddedClassicRig) -> None:
    """A redrive puts them into the retry topic, as new messages that were never failed."""
    _, found = await one(rig, b"dead")
    await rig.clients[-1].send_back(GROUP, found, delay_level=-1, attempts_max=16)
    assert counts(await finish(rig.embedded, REDRIVE)) == (1, 0, 0)
    (again,) = await copies(rig, retry_topic(GROUP))
    assert (again.message.topic, again.message.body, again.attempts_failed) == (TOPIC, b"dead", 0)
    assert again.message.message_id != found.message.message_id


@every_embedded_classic()
async def test_consumers_put_messages_into_their_retry_topic(rig: EmbeddedClassicRig) -> None:
    """As often as they like under one id; failed more often than allowed they are dead."""
    _, found = await one(rig)
    client = rig.clients[-1]
    (retries,) = await queues_of(client, retry_topic(GROUP))
    message = replace(found.message, topic=retries.topic)
    for failed in (1, 2, 3):
        outgoing = Outgoing(
            message=message, delay_level=1, attempts_failed=failed, attempts_max=2, system={"RETRY_TOPIC": TOPIC}
        )
        await client.send(GROUP, retries, [outgoing], timeout_ms=SEND_MS)
    again = await copies(rig, retries.topic)
    assert [(each.message.topic, each.message.message_id, each.attempts_failed) for each in again] == [
        (TOPIC, message.message_id, 1),
        (TOPIC, message.message_id, 2),
    ]
    (dead,) = await copies(rig, dead_letter_topic(GROUP))
    assert (dead.message.topic, dead.message.message_id) == (TOPIC, message.message_id)


@every_embedded_classic()
async def test_a_failed_message_has_no_key_any_more(rig: EmbeddedClassicRig) -> None:
    """Danger: of two messages that a consumer put into its retry topic the later one cancels the other for its key."""
    _, found = await one(rig)
    client = rig.clients[-1]
    (retries,) = await queues_of(client, retry_topic(GROUP))
    for message_id in ("m-1", "m-2"):
        message = replace(found.message, topic=retries.topic, message_id=message_id, properties={OWN_KEY: "cart-17"})
        outgoing = Outgoing(message=message, delay_level=1, attempts_failed=1, system={"RETRY_TOPIC": TOPIC})
        await client.send(GROUP, retries, [outgoing], timeout_ms=SEND_MS)
    assert [each.message.message_id for each in await copies(rig, retries.topic)] == ["m-1", "m-2"]


@every_embedded_classic()
async def test_a_silent_member_is_dropped(rig: EmbeddedClassicRig) -> None:
    """After six heartbeats that did not come, at the next one of another member, which is told."""
    topic, clock = await rig.topic(), rig.embedded.clock
    alive, silent = rig.client("alive"), rig.client("silent")
    heard = await joined(alive, GROUP, topic)
    await joined(silent, GROUP, topic)
    await asyncio.sleep(0)
    heard.changed.clear()
    for _ in range(int(SILENT_S_MAX / HEARTBEAT_S) - 1):
        clock.advance(int(1000 * HEARTBEAT_S))
        await beat(alive, GROUP, topic)
        assert list(await alive.members(GROUP, topic)) == ["alive", "silent"]
    clock.advance(int(1000 * HEARTBEAT_S))
    await beat(alive, GROUP, topic)
    await asyncio.sleep(0)
    assert heard.changed == [GROUP]
    assert list(await alive.members(GROUP, topic)) == ["alive"]


@every_embedded_classic()
async def test_only_producers_of_the_group_are_asked(rig: EmbeddedClassicRig) -> None:
    """Others are not; with no producer there nothing is counted, so nothing is given up."""
    topic = await rig.topic()
    client, other = rig.client("a"), rig.client("b")
    heard: dict[str, Heard] = {"a": Heard(), "b": Heard()}
    client.attach(heard["a"])
    other.attach(heard["b"])
    (queue, *_) = await queues_of(client, topic)
    await client.heartbeat(["producers"], [])
    await other.heartbeat(["others"], [])
    await send(client, queue, b"half", is_half=True)
    for _ in range(8):
        await rig.later(5_000)
        await client.heartbeat(["producers"], [])
        await other.heartbeat(["others"], [])
    await until(lambda: len(heard["a"].checks) == 2)
    assert not heard["b"].checks
    counted = rig.embedded.broker.checks.counted_total
    await client.close()
    await other.close()
    await rig.later(60_000)
    assert rig.embedded.broker.checks.counted_total == counted


@every_embedded_classic()
async def test_the_retry_topic_goes_with_its_group(rig: EmbeddedClassicRig) -> None:
    """With what waits for it; a group that has such work is removed by force only."""
    _, found = await one(rig)
    await rig.clients[-1].send_back(GROUP, found, delay_level=1, attempts_max=16)
    operator = rig.embedded.broker.operator
    with pytest.raises(Refused, match="1 retries wait"):
        await operator.remove_group(GROUP, is_forced=False)
    with pytest.raises(Refused) as caught:
        await operator.remove_topic(retry_topic(GROUP), is_forced=True)
    assert caught.value.rule is Rule.TOPIC
    await operator.remove_group(GROUP, is_forced=True)
    assert retry_topic(GROUP) not in rig.embedded.broker.names.topics
    assert await copies(rig, retry_topic(GROUP)) == []


@every_embedded_classic()
async def test_the_trail_shows_copies_and_letters(rig: EmbeddedClassicRig) -> None:
    """A copy is a message of the retry topic; a letter is the group's from its death on, with its origin."""
    _, found = await one(rig)
    client = rig.clients[-1]
    await client.send_back(GROUP, found, delay_level=1, attempts_max=1)
    (again,) = await copies(rig, retry_topic(GROUP))
    await client.send_back(GROUP, again, delay_level=1, attempts_max=1)
    broker = rig.embedded.broker
    topic_id, retry_id = (broker.names.topics[name].topic_id for name in (TOPIC, retry_topic(GROUP)))
    events = [each.event for each in read_outbox(rig.embedded.store) if each.event.message_id]
    told = Counter((each.kind, each.topic_id, each.queue_id == LANE) for each in events)
    assert told == {
        (EventKind.QUEUED, topic_id, False): 1,
        (EventKind.SCHEDULED, retry_id, False): 1,
        (EventKind.DELIVERED, retry_id, False): 1,
        (EventKind.TAKEN_OVER, topic_id, True): 1,
        (EventKind.DEAD_EXHAUSTED, topic_id, True): 1,
    }
    (dead,) = (each for each in events if each.kind is EventKind.DEAD_EXHAUSTED)
    assert (unpack_id(dead.message_id), dead.attempt) == (found.message.message_id, 2)


@every_embedded_classic()
async def test_invalid_input_is_refused(rig: EmbeddedClassicRig) -> None:
    """A queue that is not there, a batch with a delay in it, another topic's message, what is too large."""
    queue, _ = await one(rig)
    client = rig.clients[-1]

    async def refused(queue: MessageQueue, *outgoing: Outgoing) -> Rule:
        with pytest.raises(Refused) as caught:
            await client.send("producers", queue, outgoing, timeout_ms=SEND_MS)
        return caught.value.rule

    plain, late = Outgoing(message=a_message(TOPIC)), Outgoing(message=a_message(TOPIC), delay_level=1)
    assert await refused(queue._replace(queue_id=4), plain) is Rule.REQUEST
    assert await refused(queue._replace(broker="other"), plain) is Rule.REQUEST
    assert await refused(queue._replace(topic="nobody"), plain) is Rule.TOPIC_UNKNOWN
    assert await refused(queue, plain, late) is Rule.REQUEST
    assert await refused(queue, Outgoing(message=a_message("another"))) is Rule.REQUEST
    assert await refused(queue, Outgoing(message=a_message(TOPIC, b"x" * (4 * 2**20 + 1)))) is Rule.MESSAGE_CORRUPTED
    with pytest.raises(Refused) as caught:
        await client.pull(GROUP, queue, Filter("a ||", is_sql=True), 0, batch_max=1, wait_ms=0)
    assert caught.value.rule is Rule.FILTER


@every_embedded_classic()
async def test_bytes_that_are_no_message_are_shown_and_die_at_once(rig: EmbeddedClassicRig) -> None:
    """A payload that nobody can read is none the better for waiting; the letter has it as it was."""
    await rig.embedded.broker.send([an_envelope("m-1", topic=TOPIC, payload=b"\xff")._replace(queue_id=0)])
    client, queue = rig.client("a"), MessageQueue(TOPIC, "embedded", 0)
    await client.heartbeat([], [Presence(GROUP, {TOPIC: ALL})])
    (found,) = await pull_some(client, GROUP, queue)
    assert (found.message.message_id, found.message.body) == ("m-1", b"")
    assert found.unreadable
    await client.send_back(GROUP, found, delay_level=1, attempts_max=16)
    (dead,) = await copies(rig, dead_letter_topic(GROUP))
    assert (dead.message.message_id, dead.size_bytes) == ("m-1", 1)
