"""What a daemon in front of a cluster takes over when a group fails it, and what it leaves to the cluster.

The cluster is a fake that hands out what it is told to and notes what it is told.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Coroutine, Sequence
from pathlib import Path
from typing import Any

import pytest
from support.clients.embedded.failing import dead_letters
from support.models.broker.progress_check import assert_taken_progress
from support.models.costs.unread import UnreadDict
from support.rigs.broker.rig import GROUP, PATIENCE_S, TOPIC, EmbeddedRig, play, receive, until

from broker_adapter.contracts.adapter import GroupSettings, PopBroker, Subscription
from broker_adapter.contracts.errors import BrokerUnavailable, Refused
from broker_adapter.contracts.message import Delivery
from broker_adapter.runtime import lease_timers
from broker_adapter.wire import rocketmq_v2 as wire
from dmq.cluster import retries_here
from dmq.cluster.retries_here import LONGER_MS, ReceiveParameters, RetriesHere
from dmq.config.units import TopicPatterns
from retry.dead_letter import DeadFilter
from retry.failure_reason import FailureReason
from retry.policy import MAX_ATTEMPTS_LIMIT, Fixed, RetryPolicy

pytestmark = pytest.mark.contract
ID = "01" + "0" * 32
PUSH = ReceiveParameters(GROUP, Subscription(TOPIC), 8, 30_000, "push")
SIMPLE = PUSH._replace(renew_for="")


class FakeCluster:
    """Answers as it is told, and notes what it is asked."""

    def __init__(self) -> None:
        self.acked: list[str] = []
        self.given_back: list[tuple[str, int]] = []
        self.dead: list[str] = []
        self.is_away = self.is_fifo = False

    def group_settings(self, group: str, topics: Collection[str] = ()) -> GroupSettings:
        return GroupSettings(self.is_fifo, 17, (1_000,))

    async def ack(self, group: str, topic: str, receipt_handles: Sequence[str]) -> Sequence[Exception | None]:
        if self.is_away:
            raise BrokerUnavailable("away")
        self.acked += receipt_handles
        return [None] * len(receipt_handles)

    async def change_invisible(
        self,
        group: str,
        topic: str,
        receipt_handle: str,
        invisible_ms: int,
        *,
        suspend: bool = False,
    ) -> str:
        if self.is_away:
            raise BrokerUnavailable("away")
        self.given_back.append((receipt_handle, invisible_ms))
        return f"{receipt_handle}+"

    async def dead_letter(self, group: str, topic: str, receipt_handle: str, *, attempts: int) -> None:
        self.dead.append(receipt_handle)


def a_delivery(handle: str, *, attempt: int = 1, message_id: str = ID, message_group: str = "") -> Delivery:
    """What the cluster hands out."""
    payload = wire.Message(body=b"x").SerializeToString()
    return Delivery(TOPIC, message_id, payload, 0, 7, handle, attempt, 30_000, 1_000, 0, message_group=message_group)


Scene = Callable[[EmbeddedRig, RetriesHere, FakeCluster], Awaitable[None]]


def on_stage(scene: Scene) -> Callable[[Path], None]:
    """Run a scene in front of a fake cluster, with a group whose retries are here."""

    def test(tmp_path: Path) -> None:
        rig, cluster = EmbeddedRig(tmp_path, on_disk=False, queues=1, stay=TopicPatterns()), FakeCluster()

        async def scenario(_: object) -> None:
            policy = RetryPolicy(backoff=Fixed(1_000), max_attempts=3)
            await rig.broker.set_group(GROUP, policy=policy, retries="here")
            here = RetriesHere(rig.broker, _as_broker(cluster), rig.clock, default="cluster")
            try:
                await scene(rig, here, cluster)
                assert_taken_progress(here)
            finally:
                await here.close()

        asyncio.run(play(rig, scenario))

    test.__name__, test.__doc__ = scene.__name__, scene.__doc__
    return test


def _as_broker(cluster: FakeCluster) -> PopBroker:
    return cluster  # type: ignore[return-value]  # it needs these four alone


async def handed_out(here: RetriesHere, asked: ReceiveParameters, *deliveries: Delivery) -> list[Delivery]:
    """Hand out what the cluster gave, as a receive does."""
    passed = await here.sift(asked, deliveries)
    here.hold(asked, passed)
    return passed


async def come(rig: EmbeddedRig) -> list[Delivery]:
    """What is due again here."""
    await rig.pass_ms(1_000)
    return list(await receive(rig))


@on_stage
async def test_a_failure_is_stored_here_before_the_cluster_hears_of_it(
    rig: EmbeddedRig, here: RetriesHere, cluster: FakeCluster
) -> None:
    """It comes with the next attempt, its handle is refused from then on; and while the cluster is away it is here."""
    await handed_out(here, PUSH, a_delivery("a"))
    cluster.is_away = True
    await here.change_invisible(GROUP, TOPIC, "a", 10)
    assert not cluster.acked
    (again,) = await come(rig)
    assert (again.message_id, again.delivery_attempt) == (ID, 2)
    cluster.is_away = False
    await until(lambda: cluster.acked == ["a"])
    for late in (here.change_invisible(GROUP, TOPIC, "a", 10), here.dead_letter(GROUP, TOPIC, "a", attempts=1)):
        with pytest.raises(Refused):
            await late
    (refused,) = await here.ack(GROUP, TOPIC, ["a"])
    assert isinstance(refused, Refused)


@on_stage
async def test_a_reported_reason_is_kept_with_an_adopted_failure(
    rig: EmbeddedRig, here: RetriesHere, cluster: FakeCluster
) -> None:
    """Of a delivery of the cluster's; one that the cluster keeps has no reasons here, and says so."""
    reason = FailureReason("RuntimeError", "no courier", "worker-7", "client-1", "192.0.2.7")
    await handed_out(here, PUSH, a_delivery("a"))
    assert here.note_failure(GROUP, "a", reason)
    assert not here.note_failure(GROUP, "unknown", reason)
    assert not here.note_failure("another", "a", reason)
    await here.dead_letter(GROUP, TOPIC, "a", attempts=MAX_ATTEMPTS_LIMIT + 1)
    page = await rig.broker.dead_letters.page(GROUP, DeadFilter(), offset=0, limit=10, with_outcome=False)
    assert [letter.dead.failure for letter in page.letters] == [reason]


@on_stage
async def test_an_acknowledgement_during_a_failure_has_one_outcome(
    rig: EmbeddedRig, here: RetriesHere, cluster: FakeCluster
) -> None:
    """Of both, the failure came first: the acknowledgement is refused, not answered OK for what comes again."""
    await handed_out(here, PUSH, a_delivery("a"))
    failing = asyncio.ensure_future(here.change_invisible(GROUP, TOPIC, "a", 10))
    await asyncio.sleep(0)  # it has begun, and is not on disk yet
    (refused,) = await here.ack(GROUP, TOPIC, ["a"])
    await failing
    assert isinstance(refused, Refused)
    (again,) = await come(rig)
    assert (again.message_id, again.delivery_attempt) == (ID, 2)


@on_stage
async def test_a_message_from_the_adapter_is_delivered_for_its_remaining_time(
    rig: EmbeddedRig, here: RetriesHere, cluster: FakeCluster
) -> None:
    """We are first at its end also then, and it fails here."""
    left = a_delivery("a")._replace(invisible_ms=SIMPLE.invisible_ms + LONGER_MS - 20_000)
    (passed,) = await handed_out(here, SIMPLE, left)
    assert passed.invisible_ms == 10_000
    rig.clock.advance(10_000)
    await until(lambda: cluster.acked == ["a"])
    assert here.taken_over_total == 1


@on_stage
async def test_only_retries_kept_here_are_known_at_both(
    rig: EmbeddedRig, here: RetriesHere, cluster: FakeCluster
) -> None:
    """A copy that waits, is visible, or lies dead; not another message with its id, and not once it is finished."""
    await handed_out(here, PUSH, a_delivery("a"))
    await here.change_invisible(GROUP, TOPIC, "a", 10)
    assert not await handed_out(here, PUSH, a_delivery("b", attempt=2))  # it waits
    assert await handed_out(here, PUSH, a_delivery("c"))  # sent twice: it is another one
    await here.ack(GROUP, TOPIC, ["c"])
    (again,) = await come(rig)
    assert not await handed_out(here, PUSH, a_delivery("d", attempt=2))  # it is visible
    await until(lambda: {"a", "b", "d"} <= set(cluster.acked))
    await rig.broker.ack(GROUP, TOPIC, [again.receipt_handle])
    assert await handed_out(here, PUSH, a_delivery("e", attempt=2))  # it was finished: nobody knows what this one is
    await here.dead_letter(GROUP, TOPIC, "e", attempts=3)
    other = a_delivery("g", attempt=3, message_id=ID[:-1] + "1")
    assert await handed_out(here, PUSH, a_delivery("f", attempt=3), other) == [other]  # the first one lies dead


@on_stage
async def test_a_push_consumer_that_means_it_makes_a_dead_letter_here(
    rig: EmbeddedRig, here: RetriesHere, cluster: FakeCluster
) -> None:
    """With the one attempt that it had, as it gave it up."""
    await handed_out(here, PUSH, a_delivery("a"))
    await here.dead_letter(GROUP, TOPIC, "a", attempts=MAX_ATTEMPTS_LIMIT + 1)
    ((message_id, facts),) = await dead_letters(rig)
    assert (message_id, facts.attempts, facts.reason) == (ID, 1, "forwarded")


@on_stage
async def test_a_message_not_finished_in_time(rig: EmbeddedRig, here: RetriesHere, cluster: FakeCluster) -> None:
    """A simple consumer's is taken over at its end and not before; a push consumer's when its client is gone."""
    await handed_out(here, SIMPLE, a_delivery("a"))
    assert here.hidden_ms(SIMPLE) == 30_000 + LONGER_MS
    rig.clock.advance(20_000)
    new = await here.change_invisible(GROUP, TOPIC, "a", 30_000)
    assert cluster.given_back == [("a", 30_000 + LONGER_MS)]
    rig.clock.advance(29_000)
    assert len(here) == 1
    rig.clock.advance(1_000)
    await until(lambda: cluster.acked == [new])
    await handed_out(here, PUSH, a_delivery("b", message_id=ID[:-1] + "1"))
    here.client_gone("push")
    rig.clock.advance(1_000)
    await until(lambda: cluster.acked == [new, "b"])
    assert sorted(each.delivery_attempt for each in await come(rig)) == [2, 2]
    assert (len(here), here.held_bytes) == (0, 0)


@on_stage
async def test_messages_of_a_dead_consumer_fail_here(rig: EmbeddedRig, here: RetriesHere, cluster: FakeCluster) -> None:
    """Also where nothing else is leased here, and nobody else is heard of: that is silence, and no standstill."""
    clients, looked = rig.broker.lease_ends.clients, asyncio.Event()
    look = clients.look

    def seen_to_look() -> float:
        looked.set()
        return look()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lease_timers, "_NAP_S_MAX", 0.001)
        patch.setattr(clients, "look", seen_to_look)
        await handed_out(here, PUSH, a_delivery("a"))
        for _ in range(6):
            assert not here.taken_over_total
            looked.clear()
            rig.clock.advance(10_000)
            await asyncio.wait_for(looked.wait(), PATIENCE_S)
        await until(lambda: cluster.acked == ["a"])
    assert here.taken_over_total == 1


@on_stage
async def test_an_unregistration_visits_no_messages_of_others(
    rig: EmbeddedRig, here: RetriesHere, cluster: FakeCluster
) -> None:
    """Danger: each goodbye, as often as a client likes, went through all that is remembered, ten thousand."""
    await handed_out(here, PUSH, a_delivery("a"))
    await handed_out(here, PUSH._replace(renew_for="leaves"), a_delivery("b", message_id=ID[:-1] + "1"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(here, "_held", UnreadDict(here._held))
        here.client_gone("leaves")
        here.client_gone("stranger")
        rig.clock.advance(1_000)
        await until(lambda: cluster.acked == ["b"])
    here._held.pop("b")  # of the dict that was replaced
    await here.ack(GROUP, TOPIC, ["a"])
    assert not here._renewed


@on_stage
async def test_an_acknowledgement_at_the_end_of_its_time_has_one_outcome(
    rig: EmbeddedRig, here: RetriesHere, cluster: FakeCluster
) -> None:
    """It comes between the moment that its time is seen to be over and what follows: OK, and nothing is retried."""
    acking: list[asyncio.Task[Sequence[Exception | None]]] = []
    spawn = here._spawn

    def spawned_behind_an_ack(work: Coroutine[Any, Any, None]) -> None:
        acking.append(asyncio.ensure_future(here.ack(GROUP, TOPIC, ["a"])))
        spawn(work)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(here, "_spawn", spawned_behind_an_ack)
        await handed_out(here, SIMPLE, a_delivery("a"))
        rig.clock.advance(30_000)
        await until(lambda: bool(acking))
        assert await acking[0] == [None]
    await until(lambda: not here._tasks)
    assert (cluster.acked, here.taken_over_total, len(here)) == (["a"], 0, 0)


@on_stage
async def test_failures_that_are_called_off_are_not_kept_for_ever(
    rig: EmbeddedRig, here: RetriesHere, cluster: FakeCluster
) -> None:
    """A client that ends its call while its failure is written leaves no more behind than one that waits."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(retries_here, "_MOVED_KEPT", 2)
        for number in range(4):
            await handed_out(here, PUSH, a_delivery(f"a{number}"))
            failing = asyncio.ensure_future(here.change_invisible(GROUP, TOPIC, f"a{number}", 10))
            await asyncio.sleep(0)  # it has begun
            failing.cancel()
            await asyncio.gather(failing, return_exceptions=True)
    assert len(here._moved) == 2


@on_stage
async def test_a_forgotten_message_is_the_clusters(rig: EmbeddedRig, here: RetriesHere, cluster: FakeCluster) -> None:
    """Beyond the bound, of a message group, on a disk that is almost full, of a group that was removed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(retries_here, "HELD_MAX", 1)
        await handed_out(here, SIMPLE, a_delivery("a"), a_delivery("b", message_id=ID[:-1] + "1"))
        assert len(here) == 1
        await here.change_invisible(GROUP, TOPIC, "b", 0)
        await here.ack(GROUP, TOPIC, ["a"])
    await handed_out(here, PUSH, a_delivery("c", message_group="g"))
    await here.change_invisible(GROUP, TOPIC, "c", 10)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rig.store, "is_disk_low", lambda: True)
        await handed_out(here, PUSH, a_delivery("d"))
        await here.change_invisible(GROUP, TOPIC, "d", 10)
        await handed_out(here, PUSH, a_delivery("e"))
        await here.dead_letter(GROUP, TOPIC, "e", attempts=9)
    await handed_out(here, PUSH, a_delivery("f"))
    await rig.broker.set_group("others", retries="here")
    await here.change_invisible("others", TOPIC, "f", 10)  # not theirs
    await rig.broker.operator.remove_group(GROUP, is_forced=True)
    await here.change_invisible(GROUP, TOPIC, "f", 10)
    assert cluster.given_back == [("b", 0), ("c", 10), ("d", 10), ("f", 10), ("f", 10)]
    assert (cluster.dead, here.taken_over_total) == (["e"], 0)
    await rig.broker.set_group(GROUP, retries="here")
    assert here.keeps(GROUP)
    assert not here.keeps("another")
    cluster.is_fifo = True
    assert not here.keeps(GROUP)


@on_stage
async def test_remembered_messages_have_a_bound_in_bytes(
    rig: EmbeddedRig, here: RetriesHere, cluster: FakeCluster
) -> None:
    """Room for two payloads: the third is the cluster's, until one of the two is finished; a grouped one takes none."""
    size = len(a_delivery("a").payload)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(retries_here, "HELD_BYTES_MAX", 2 * size)
        grouped = a_delivery("grouped", message_group="g")
        await handed_out(here, PUSH, grouped, *(a_delivery(handle) for handle in "abc"))
        assert (len(here), here.held_bytes) == (2, 2 * size)
        await here.ack(GROUP, TOPIC, ["a"])
        await handed_out(here, PUSH, a_delivery("d"), a_delivery("e"))
        assert (len(here), here.held_bytes) == (2, 2 * size)
    for handle in "bcde":
        await here.change_invisible(GROUP, TOPIC, handle, 10)
    assert [handle for handle, _ in cluster.given_back] == ["c", "e"]
    assert (len(here), here.held_bytes) == (0, 0)


@on_stage
async def test_a_cluster_that_is_away_leaves_it_as_it_was(
    rig: EmbeddedRig, here: RetriesHere, cluster: FakeCluster
) -> None:
    """What could not be acknowledged, or hidden for longer, is still remembered: it can fail later, or be finished."""
    await handed_out(here, PUSH, a_delivery("a"))
    await handed_out(here, SIMPLE, a_delivery("b", message_id=ID[:-1] + "1"))
    cluster.is_away = True
    with pytest.raises(BrokerUnavailable):
        await here.ack(GROUP, TOPIC, ["a"])
    with pytest.raises(BrokerUnavailable):
        await here.change_invisible(GROUP, TOPIC, "b", 10_000)
    cluster.is_away = False
    assert len(here) == 2
    await here.ack(GROUP, TOPIC, ["b"])
    await here.change_invisible(GROUP, TOPIC, "a", 10)
    (again,) = await come(rig)
    assert (again.message_id, again.message_group) == (ID, "")
