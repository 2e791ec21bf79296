"""Quotas of topics: what is sent above one is refused whole, and nothing else is."""

from __future__ import annotations

import asyncio

import pytest
from support.forges.messages.half import a_half, prepare
from support.models.store.outbox import read_outbox
from support.rigs.broker.rig import GROUP, TOPIC, EmbeddedRig, End, an_envelope, every_durable_broker, receive, send
from support.rigs.store.rows import recount_bytes

from broker_adapter.contracts.errors import BrokerError, Refused
from broker_adapter.contracts.message import Envelope, SendReceipt, pack_id, unpack_id
from dmq.broker.delayed.changes import ChangeOutcome, Meant
from dmq.broker.limits.topic_quotas import OverTopicQuota
from dmq.broker.topics.settings import BACK, FlowChange, QuotaChange
from dmq.store.schema.keys import half_scope
from dmq.store.schema.topics.names import NO_QUOTAS, TopicQuotas
from dmq.trail.events import NO_QUEUE, EventKind, encode_event

pytestmark = pytest.mark.contract
DELAY_MS = 90_000
OTHER = "other"


async def limit(rig: EmbeddedRig, topic: str = TOPIC, **quotas: int) -> None:
    """Give a topic quotas; it is made if need be."""
    await rig.broker.catalog.topic(topic)
    await rig.broker.operator.set_topic(topic, quotas=QuotaChange(**quotas))


def later(rig: EmbeddedRig, *names: str, topic: str = TOPIC) -> list[Envelope]:
    """Messages that are due later."""
    at_ms = rig.clock.now_ms() + DELAY_MS
    return [an_envelope(name, topic=topic, deliver_at_ms=at_ms) for name in names]


async def delayed(rig: EmbeddedRig, *names: str, topic: str = TOPIC) -> list[SendReceipt]:
    """Send them, in one call."""
    return list(await rig.broker.send(later(rig, *names, topic=topic)))


async def over(rig: EmbeddedRig, *names: str, topic: str = TOPIC) -> OverTopicQuota:
    """They are refused, and nothing is written."""
    before = rig.store.pending(), rig.store.pending_bytes(), rig.store.outbox_state
    with pytest.raises(OverTopicQuota) as caught:
        await delayed(rig, *names, topic=topic)
    assert (rig.store.pending(), rig.store.pending_bytes(), rig.store.outbox_state) == before
    return caught.value


def pending(rig: EmbeddedRig, topic: str = TOPIC) -> int:
    """How many wait, half messages included."""
    topic_id, found = rig.broker.names.topics[topic].topic_id, rig.store.pending()
    return found.get(topic_id, 0) + found.get(half_scope(topic_id), 0)


@every_durable_broker()
async def test_a_send_above_the_pending_limit_is_refused(rig: EmbeddedRig) -> None:
    """Of several in a call all are accepted or none; the error names the quota, what is there and when to retry."""
    await limit(rig, max_pending=3)
    await delayed(rig, "m-1", "m-2")
    error = await over(rig, "m-3", "m-4")
    now_ms = rig.clock.now_ms()
    left_s = -(-((now_ms + DELAY_MS) // 60_000 * 60_000 + 60_000 - now_ms) // 1000)
    retry = f"{left_s // 60}m{left_s % 60}s" if left_s % 60 else f"{left_s // 60}m"
    said = f"quota max_pending of topic {TOPIC}: 2 pending, 2 more asked for (limit 3); try again in {retry}"
    assert str(error) == said
    await delayed(rig, "m-3")
    await over(rig, "m-4")
    assert rig.broker.quotas.refused == {"max_pending": 3, "max_pending_bytes": 0, "send_rate": 0}
    assert rig.broker.sends.refused_total == 3
    assert "more than the topic may have" in str(await over(rig, *(f"n-{number}" for number in range(4))))


@every_durable_broker()
async def test_there_is_room_again_once_messages_left(rig: EmbeddedRig) -> None:
    """Delivered or cancelled, and at once when the quota is raised or taken back."""
    await limit(rig, max_pending=1)
    (told,) = await delayed(rig, "m-1")
    await rig.broker.recall(TOPIC, told.recall_handle)
    await delayed(rig, "m-2")
    await over(rig, "m-3")
    await rig.pass_ms(DELAY_MS)
    await delayed(rig, "m-3")
    await over(rig, "m-4")
    await limit(rig, max_pending=2)
    await delayed(rig, "m-4")
    await over(rig, "m-5")
    await limit(rig, max_pending=0)
    await delayed(rig, "m-5")


@every_durable_broker()
async def test_a_message_due_at_once_is_not_pending(rig: EmbeddedRig) -> None:
    """And what waits in another topic is none of this one's."""
    await limit(rig, max_pending=1)
    await delayed(rig, "m-1")
    await send(rig, "m-2")
    await delayed(rig, "m-3", "m-4", topic=OTHER)
    await over(rig, "m-5")


@every_durable_broker()
async def test_a_repeated_send_is_answered_above_the_limit(rig: EmbeddedRig) -> None:
    """By every quota: a client that did not hear the first answer is told it; it costs nothing of the rate."""
    await limit(rig, max_pending=1, max_pending_bytes=1, send_rate=3)
    with pytest.raises(OverTopicQuota):
        await delayed(rig, "m-1")
    await limit(rig, max_pending_bytes=0)
    (first,) = await delayed(rig, "m-1")
    for _ in range(20):
        (again,) = await delayed(rig, "m-1")
        assert again == first._replace(repeated=True)
    rig.clock.advance(1_000)
    await send(rig, *(f"n-{number}" for number in range(3)))
    (again,) = await delayed(rig, "m-1")
    assert again.repeated
    with pytest.raises(OverTopicQuota, match="send_rate"):
        await rig.broker.send([*later(rig, "m-1"), an_envelope("n-9")])


@every_durable_broker()
async def test_concurrent_sends_never_go_above_the_limit(rig: EmbeddedRig) -> None:
    """Each call decides by all that were accepted before it, however many are under way at a time."""
    await limit(rig, max_pending=10)
    found = await asyncio.gather(*(delayed(rig, f"m-{number}") for number in range(64)), return_exceptions=True)
    assert sum(isinstance(each, OverTopicQuota) for each in found) == 54
    assert pending(rig) == 10


@every_durable_broker()
async def test_quotas_and_their_counts_survive_a_kill(rig: EmbeddedRig) -> None:
    """Also the bytes; and what the configuration says counts where the topic says nothing."""
    await limit(rig, max_pending=2, max_pending_bytes=10_000)
    await delayed(rig, "m-1", "m-2")
    there = rig.store.pending_bytes()
    rig.quotas = TopicQuotas(max_pending=1, send_rate=50)
    await rig.restart(End.KILL)
    assert rig.store.pending_bytes() == there
    topic = rig.broker.names.topics[TOPIC]
    assert topic.quotas == TopicQuotas(2, 10_000, None)
    assert rig.broker.quotas.of(topic) == TopicQuotas(2, 10_000, 50)
    assert (await over(rig, "m-3")).limit == 2
    await delayed(rig, "o-1", topic=OTHER)
    await over(rig, "o-2", topic=OTHER)
    await limit(rig, max_pending=BACK, max_pending_bytes=BACK)
    assert rig.broker.names.topics[TOPIC].quotas == NO_QUOTAS
    assert (await over(rig, "m-3")).limit == 1


@every_durable_broker()
async def test_bytes_that_are_pending_have_a_limit_of_their_own(rig: EmbeddedRig) -> None:
    """To the byte, as ``pending_bytes`` counts them."""
    await delayed(rig, "m-1")
    ((_, size),) = rig.store.pending_bytes().items()
    await limit(rig, max_pending_bytes=2 * size)
    await delayed(rig, "m-2")
    error = await over(rig, "m-3")
    assert str(error).startswith(
        f"quota max_pending_bytes of topic {TOPIC}: {2 * size} bytes pending, {size} more asked for (limit {2 * size})"
    )


@every_durable_broker()
async def test_half_messages_are_pending_and_a_commit_is_never_refused(rig: EmbeddedRig) -> None:
    """They count when they are accepted; what a commit makes of one takes its place."""
    await limit(rig, max_pending=2)
    told = await prepare(rig, a_half("h-1"), a_half("h-2", due_ms=rig.clock.now_ms() + DELAY_MS))
    with pytest.raises(OverTopicQuota, match="2 pending, 1 more"):
        await prepare(rig, a_half("h-3"))
    await over(rig, "m-1")
    again = await prepare(rig, a_half("h-1"))
    assert [each.repeated for each in again] == [True]
    await rig.broker.transactions.commit(TOPIC, told[1].transaction_id)
    assert pending(rig) == 2
    await rig.broker.transactions.commit(TOPIC, told[0].transaction_id)
    assert pending(rig) == 1
    await limit(rig, max_pending=1, send_rate=1)
    with pytest.raises(OverTopicQuota):
        await prepare(rig, a_half("h-4"))


@every_durable_broker()
async def test_a_message_accepted_elsewhere_is_not_refused(rig: EmbeddedRig) -> None:
    """What was taken from a cluster, or may be there; it counts where it waits."""
    await limit(rig, max_pending=1, send_rate=1)
    note = encode_event(EventKind.FETCHED, 1, 0, NO_QUEUE, 0, 0, b"\1" * 17)
    await rig.broker.send(later(rig, "m-1", "m-2", "m-3"), lambda *_: note)
    assert pending(rig) == 3
    assert (await over(rig, "m-4")).limit == 1


@every_durable_broker()
async def test_a_message_that_waits_may_be_given_another_time(rig: EmbeddedRig) -> None:
    """And one that is held waits as before: neither is more than there was."""
    await limit(rig, max_pending=1)
    await delayed(rig, "m-1")
    at_ms = rig.clock.now_ms() + 2 * DELAY_MS
    (changed,) = await rig.broker.delayed.reschedule(TOPIC, [Meant(pack_id("m-1"))], at_ms)
    assert changed.outcome is ChangeOutcome.DONE
    await rig.broker.operator.set_topic(TOPIC, flow=FlowChange(is_paused=True))
    await rig.pass_ms(3 * DELAY_MS)
    error = await over(rig, "m-2")
    assert str(error).endswith("try again once the topic, which is paused, is resumed, or some were cancelled")


@every_durable_broker()
async def test_a_send_rate_holds(rig: EmbeddedRig) -> None:
    """What one second brings may be sent at once, then as fast as the rate; a refused send costs nothing."""
    await limit(rig, send_rate=10)
    await send(rig, *(f"m-{number}" for number in range(10)))
    for _ in range(5):
        with pytest.raises(OverTopicQuota) as caught:
            await send(rig, "m-10")
        assert str(caught.value) == (
            f"quota send_rate of topic {TOPIC}: sent as many in a second, 1 more asked for (limit 10); "
            "try again in 100ms"
        )
    rig.clock.advance(100)
    await send(rig, "m-10")
    with pytest.raises(OverTopicQuota):
        await send(rig, "m-11")
    assert rig.broker.quotas.used_rate(rig.broker.names.topics[TOPIC]) == 10
    rig.clock.advance(1_000)
    await send(rig, *(f"n-{number}" for number in range(25)))  # a single call waits, and is served
    rig.clock.advance(2_400)
    with pytest.raises(OverTopicQuota):
        await rig.broker.send([an_envelope(f"o-{number}") for number in range(10)])
    rig.clock.advance(100)
    await send(rig, *(f"o-{number}" for number in range(10)))


@every_durable_broker()
async def test_the_rate_does_not_follow_the_wall_clock(rig: EmbeddedRig) -> None:
    """A step of the host's clock brings nothing and takes nothing."""
    await limit(rig, send_rate=1)
    await send(rig, "m-1")
    rig.clock.step_to(rig.clock.now_ms() + 3_600_000)
    with pytest.raises(OverTopicQuota, match="try again in 1s"):
        await send(rig, "m-2")


@every_durable_broker()
async def test_a_message_that_was_refused_leaves_the_topic_as_it_was(rig: EmbeddedRig) -> None:
    """What a topic holds is on disk before others rely on it, also if the first message of its kind is refused."""
    await limit(rig, max_pending=1)
    await over(rig, "m-1", "m-2")
    await delayed(rig, "m-1")
    holds = rig.broker.names.topics[TOPIC].holds
    await rig.restart(End.KILL)
    assert rig.broker.names.topics[TOPIC].holds == holds


@every_durable_broker()
async def test_an_impossible_quota_is_refused(rig: EmbeddedRig) -> None:
    """And retries and dead letters have none, not even those of the configuration."""
    await rig.broker.catalog.topic(TOPIC)
    for wrong in (QuotaChange(-2), QuotaChange(max_pending_bytes=2**63), QuotaChange(send_rate=1_000_001)):
        with pytest.raises(Refused, match="out of range"):
            await rig.broker.operator.set_topic(TOPIC, quotas=wrong)
    await rig.broker.catalog.make_group("g")
    letters = await rig.broker.catalog.topic("%DLQ%g")
    with pytest.raises(Refused, match="has no quotas"):
        await rig.broker.operator.set_topic("%DLQ%g", quotas=QuotaChange(send_rate=1))
    rig.quotas = TopicQuotas(1, 1, 1)
    await rig.restart(End.CLOSE)
    assert rig.broker.quotas.of(letters) == NO_QUOTAS


@every_durable_broker()
async def test_the_trail_shows_a_changed_quota(rig: EmbeddedRig) -> None:
    """As it does of a rate."""
    await limit(rig, max_pending=5, send_rate=BACK)
    said = [each.event for each in read_outbox(rig.store) if each.event.kind == EventKind.TOPIC_CHANGED]
    assert [unpack_id(each.message_id) for each in said] == ["max_pending=5 send_rate=default"]


@every_durable_broker()
async def test_a_removed_topic_leaves_no_figures(rig: EmbeddedRig) -> None:
    """And one of its name that is made anew has no quota."""
    await limit(rig, max_pending=1)
    await delayed(rig, "m-1")
    await rig.broker.operator.remove_topic(TOPIC, is_forced=True)
    assert (rig.store.pending(), rig.store.pending_bytes()) == ({}, {})
    await delayed(rig, "m-1", "m-2")
    assert not await receive(rig)


def test_the_error_is_one_of_a_broker() -> None:
    """So every way in answers it as a bound that is reached."""
    assert issubclass(OverTopicQuota, BrokerError)
    assert OverTopicQuota.retriable


# -- what groups are handed out ---------------------------------------------------------------------------------------


async def slow(rig: EmbeddedRig, rate: int) -> None:
    """Give the group a rate."""
    await rig.broker.catalog.group(GROUP)
    await rig.broker.set_group(GROUP, deliver_rate=rate)


@every_durable_broker()
async def test_a_group_is_handed_out_so_many_a_second(rig: EmbeddedRig) -> None:
    """A quarter of a second's worth at once, then as fast as the rate; another group is not slowed; over a kill."""
    await send(rig, *(f"m-{number}" for number in range(40)))
    await slow(rig, 20)
    for _ in range(2):
        assert len(await receive(rig, batch_max=32)) == 5
        assert not await receive(rig, batch_max=32)
        rig.clock.advance(100)
        assert len(await receive(rig, batch_max=32)) == 2
        await rig.restart(End.KILL)
    assert rig.broker.names.groups[GROUP].deliver_rate == 20
    assert len(await receive(rig, group=OTHER, batch_max=32)) == 32
    await slow(rig, 0)
    assert GROUP not in rig.broker.names.rates
    assert len(await receive(rig, batch_max=32)) == 32


@every_durable_broker()
async def test_a_receive_waits_for_the_rate(rig: EmbeddedRig) -> None:
    """It gets a message once there is one for it, and what it was not given is there for others."""
    await send(rig, "m-1", "m-2")
    await slow(rig, 2)
    (first,) = await receive(rig)
    waiting = asyncio.ensure_future(receive(rig, wait_ms=20_000))
    while not waiting.done():
        rig.clock.advance(50)
        await asyncio.sleep(0.01)
    (second,) = await waiting
    assert {first.message_id, second.message_id} == {"m-1", "m-2"}


@every_durable_broker()
async def test_a_resumed_group_continues_no_faster_than_its_rate(rig: EmbeddedRig) -> None:
    """The ramp and the rate hold both."""
    await send(rig, *(f"m-{number}" for number in range(40)))
    await slow(rig, 4)
    await rig.broker.set_group(GROUP, is_paused=True)
    assert not await receive(rig, batch_max=32)
    await rig.broker.set_group(GROUP, is_paused=False)
    assert len(await receive(rig, batch_max=32)) == 1
    got = 0
    for _ in range(40):
        rig.clock.advance(500)
        got += len(await receive(rig, batch_max=32))
    assert got <= 39
    assert got >= 38


@every_durable_broker()
async def test_a_rate_of_a_group_that_cannot_be_is_refused(rig: EmbeddedRig) -> None:
    """Nor has a group that nobody knows one."""
    with pytest.raises(Refused, match="there is none"):
        await rig.broker.set_group("nobody", deliver_rate=1)
    with pytest.raises(Refused, match="out of range"):
        await slow(rig, -1)


@every_durable_broker()
async def test_messages_passed_to_a_cluster_spend_the_rate(rig: EmbeddedRig) -> None:
    """It counts once, also if it is kept here in the end; of a topic that nobody knows here there is no rate."""
    await limit(rig, send_rate=2)
    two = [an_envelope("m-1"), an_envelope("m-2")]
    rig.broker.quotas.spend_at_once(two)
    await rig.broker.sends.send(two, is_spent=True)
    with pytest.raises(OverTopicQuota, match="send_rate"):
        rig.broker.quotas.spend_at_once([an_envelope("m-3")])
    rig.clock.advance(500)
    rig.broker.quotas.spend_at_once([an_envelope("m-3"), an_envelope("x", topic="unknown")])
    assert rig.broker.quotas.refused["send_rate"] == 1


@every_durable_broker()
async def test_a_message_that_takes_the_place_of_another_is_not_one_more(rig: EmbeddedRig) -> None:
    """By an own key, above the limit too; nor is one that is absorbed. Bytes count by how much larger it is."""
    at_ms = rig.clock.now_ms() + DELAY_MS

    def under(message_id: str, payload: bytes = b"1", *, keeps_first: bool = False) -> Envelope:
        found = an_envelope(message_id, payload=payload, deliver_at_ms=at_ms)
        return found._replace(own_key="k", keeps_first=keeps_first)

    await limit(rig, max_pending=1)
    await rig.broker.send([under("m-1")])
    for number in range(2, 5):
        await rig.broker.send([under(f"m-{number}")])
    await rig.broker.send([under("m-5", keeps_first=True)])
    assert pending(rig) == 1
    assert rig.store.pending_bytes() == recount_bytes(rig.store)
    await over(rig, "n-1")
    ((_, size),) = rig.store.pending_bytes().items()
    await limit(rig, max_pending_bytes=size + 5)
    await rig.broker.send([under("m-6", b"123456")])
    with pytest.raises(OverTopicQuota, match=f"{size + 5} bytes pending, 1 more"):
        await rig.broker.send([under("m-7", b"1234567")])
    await rig.broker.send([under("m-8")])
    assert rig.store.pending_bytes() == recount_bytes(rig.store)
