"""Every change of state and its audit event are in one batch: what each batch does to the rows is compared with what
it says in the outbox. Calls run concurrently, so one batch holds the work of many.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.clients.embedded.failing import CLIENT
from support.effort import EFFORT
from support.forges.messages.letters import PURGE, REDRIVE, a_message, ended, start
from support.models.store.outbox import read_outbox
from support.models.store.watch import WatchedEngine
from support.rigs.broker.rig import TOPIC, EmbeddedRig, ack, an_envelope, play, receive

from broker_adapter.contracts.errors import Refused
from broker_adapter.contracts.message import Delivery
from dmq.store.engines.engine import Batch, Engine
from dmq.store.schema.keys import Family
from dmq.store.store import StoreOptions
from dmq.trail.events import EventKind, gap_count, gap_event
from retry.dead_letter import Job
from retry.policy import RetryPolicy, Table

pytestmark = pytest.mark.property
GROUPS, TOPICS = ("one", "two"), (TOPIC, "%DLQ%one")
# What no broker writes: the daemon that a run began and ended, the outbox what it cut, the exporter that it runs and
# what was lost, a spool its sends. And two that nothing writes yet.
OF_OTHERS = {
    *(EventKind.OPENED, EventKind.CLOSED, EventKind.GAP, EventKind.HEARTBEAT, EventKind.TAIL_LOST),
    EventKind.PROMOTED,
    *(EventKind.CLOCK_CHANGED, EventKind.CLOCK_ACCEPTED),
    *(
        EventKind.RECALLED,
        EventKind.REPLACED,
        EventKind.ABSORBED,
        EventKind.RESCHEDULED,
        EventKind.EXPIRED,
        EventKind.OFFSET_SET,
    ),
    *(EventKind.TOPIC_CHANGED, EventKind.TOPIC_REMOVED, EventKind.GROUP_REMOVED, EventKind.RESET),
    *(EventKind.HALF, EventKind.COMMITTED, EventKind.ROLLED_BACK, EventKind.TX_CHECKED, EventKind.TX_GIVEN_UP),
    *(EventKind.TX_TOO_OLD, EventKind.DEAD_TOO_LATE),
    *(EventKind.SENT, EventKind.SEND_FAILED, EventKind.SEND_DEAD, EventKind.REQUEUED, EventKind.DROPPED),
    *(EventKind.FORWARDED, EventKind.FORWARD_REFUSED, EventKind.FORWARD_IN_DOUBT, EventKind.FETCHED),
    *(EventKind.TAKEN_OVER, EventKind.OCCURRED, EventKind.SCHEDULE_CHANGED, EventKind.OPERATED),
}

picks, message_groups = st.integers(0, 50), st.sampled_from(("", "", "a", "b"))
groups, topics, tags = st.sampled_from(GROUPS), st.sampled_from((TOPIC, *TOPICS)), st.sampled_from(("", "x"))
sends = st.tuples(st.just("send"), st.integers(0, 30), st.sampled_from((0, 0, 500, 1_500)), tags, message_groups)
bursts = st.tuples(st.just("send_many"), st.integers(0, 30), message_groups)
receives = st.tuples(st.just("receive"), groups, st.integers(1, 8), tags, st.booleans(), topics)
acks = st.tuples(st.just("ack"), picks, st.integers(1, 4))
changes = st.tuples(st.just("change"), picks, st.sampled_from((0, 700, 5_000)), st.booleans())
others = st.one_of(
    st.tuples(st.just("give_up"), picks, st.integers(0, 4)),
    st.tuples(st.just("send_back"), picks, st.sampled_from((-1, 0, 1))),
    st.tuples(st.just("set_policy"), groups, st.integers(1, 4), st.sampled_from(((300,), (0, 700), (5_000,)))),
    st.tuples(st.just("leave")),
    st.tuples(st.just("job"), groups, st.sampled_from((REDRIVE, PURGE))),
    st.tuples(st.just("operate"), groups, st.sampled_from(("run_now", "end"))),
)
rounds = st.lists(
    st.tuples(
        st.lists(
            st.one_of(sends, bursts, receives, receives, receives, acks, changes, changes, others),
            min_size=1,
            max_size=8,
        ),
        st.integers(0, 900),
    ),
    min_size=5,
    max_size=25,
)


class Player:
    """Plays rounds of concurrent calls. What is refused, because it is stale or finished by now, is just that."""

    def __init__(self, rig: EmbeddedRig) -> None:
        self.rig = rig
        self.held: list[tuple[str, Delivery]] = []
        self._retries = rig.broker.retries

    async def begin(self) -> None:
        """Let groups fail for good soon."""
        for group in GROUPS:
            await self._set_policy(group, 2, (300,))

    def call(self, name: str, *args: object) -> Coroutine[object, object, object]:
        """Return one call, not started yet."""
        work: Coroutine[object, object, object] = getattr(self, f"_{name}")(*args)
        return work

    async def _send(self, number: int, delay_ms: int, tag: str, message_group: str = "") -> None:
        at_ms = self.rig.clock.now_ms() + delay_ms if delay_ms else 0
        message = a_message(f"m-{number}", tag=tag, deliver_at_ms=at_ms, message_group=message_group)
        await self.rig.broker.send([message, a_message("m-0")])

    async def _send_many(self, number: int, message_group: str) -> None:
        await self.rig.broker.send([a_message(f"m-{number + i}", message_group=message_group) for i in range(6)])

    async def _receive(
        self,
        group: str,
        batch_max: int,
        tag: str,
        is_push: bool = False,
        topic: str = TOPIC,
    ) -> None:
        found = await receive(
            self.rig,
            group=group,
            topic=topic,
            batch_max=batch_max,
            tags=[tag] if tag else [],
            invisible_ms=1_000,
            renew_for=CLIENT if is_push else "",
        )
        self.held += [(group, each) for each in found]

    async def _ack(self, pick: int, count: int) -> None:
        for group, delivery in self.held[pick % (len(self.held) + 1) :][:count]:
            await ack(self.rig, delivery, delivery, group=group, topic=delivery.topic)

    async def _change(self, pick: int, invisible_ms: int, suspend: bool = False) -> None:
        for group, delivery in self._one(pick):
            with suppress(Refused):
                handle = delivery.receipt_handle
                await self.rig.broker.change_invisible(group, delivery.topic, handle, invisible_ms, suspend=suspend)

    async def _give_up(self, pick: int, attempts: int) -> None:
        for group, delivery in self._one(pick):
            with suppress(Refused):
                await self.rig.broker.dead_letter(group, delivery.topic, delivery.receipt_handle, attempts=attempts)

    async def _send_back(self, pick: int, level: int) -> None:
        for group, delivery in self._one(pick):
            with suppress(Refused):
                await self.rig.broker.send_back(group, delivery.topic, delivery.receipt_handle, level)

    async def _set_policy(
        self, group: str, max_attempts: int, delays_ms: tuple[int, ...], max_age_ms: int | None = None
    ) -> None:
        policy = RetryPolicy(backoff=Table(delays_ms), max_attempts=max_attempts, max_age_ms=max_age_ms)
        await self.rig.broker.set_group(group, policy=policy)

    async def _leave(self) -> None:
        self.rig.broker.client_gone(CLIENT)

    async def _job(self, group: str, job: Job) -> None:
        with suppress(Refused):  # another one is running, or there is nothing to work on
            await ended(self.rig, await start(self.rig, replace(job, group=group)))

    async def _operate(self, group: str, how: str) -> None:
        with suppress(Refused):  # nobody knows the group yet
            found = await self._retries.page(group, topic="", token="", limit=3)
            await getattr(self._retries, how)(group, [each.entry for each in found.retries])

    def _one(self, pick: int) -> list[tuple[str, Delivery]]:
        return self.held[pick % (len(self.held) + 1) :][:1]


@settings(max_examples=60 * EFFORT)
@given(history=rounds)
def test_every_change_and_its_event_are_one_batch(history: list[tuple[list[tuple[object, ...]], int]]) -> None:
    """Whatever the calls were, and however the writer put them together."""
    engines: list[WatchedEngine] = []

    def watched(engine: Engine) -> Engine:
        engines.append(WatchedEngine(engine))
        return engines[-1]

    async def scenario(rig: EmbeddedRig) -> None:
        player = Player(rig)
        await player.begin()
        for calls, pass_ms in history:
            await asyncio.gather(*(player.call(str(name), *args) for name, *args in calls))
            await rig.pass_ms(pass_ms)
        assert not engines[0].broken, engines[0].broken

    asyncio.run(play(EmbeddedRig(Path(), on_disk=False, queues=2, wrap=watched), scenario))


def test_the_watch_sees_every_kind(tmp_path: Path) -> None:
    """One plain history with each kind of event in it, so that the property above is not an empty one."""
    engines: list[WatchedEngine] = []

    def watched(engine: Engine) -> Engine:
        engines.append(WatchedEngine(engine))
        return engines[-1]

    async def scenario(rig: EmbeddedRig) -> None:
        player = Player(rig)
        await player.call("send", 1, 0, "x")
        await player.call("send", 2, 500, "x")
        await rig.pass_ms(500)
        await player.call("receive", "one", 8, "x")  # m-0 is passed over
        await player.call("change", 0, 700)
        await player.call("change", 1, 0)
        await rig.pass_ms(700)  # one was given back, the other's lease has ended
        await player.call("receive", "one", 8, "")
        await player.call("ack", 2, 4)
        await fail_in_every_way(player)
        assert not engines[0].broken, engines[0].broken
        assert engines[0].seen == set(EventKind) - OF_OTHERS

    asyncio.run(play(EmbeddedRig(tmp_path, on_disk=False, queues=2, wrap=watched), scenario))


async def fail_in_every_way(player: Player) -> None:
    """Retries by their time and by hand, a death for each reason, and letters that are redriven and purged."""
    rig = player.rig

    async def held(number: int, message_group: str = "", *, is_push: bool = True) -> int:
        """Let a message be sent, if it is not known, and handed out; return where it is among what is held."""
        await player.call("send", number, 0, "", message_group)
        await player.call("receive", "two", 8, "", is_push)
        (found,) = [at for at, (_, each) in enumerate(player.held) if each.message_id == f"m-{number}"][-1:]
        return found

    await player.call("set_policy", "two", 4, (300,))
    for _ in range(2):
        await player.call("change", await held(3), 0)
        await rig.pass_ms(300)
    await held(3, is_push=False)
    await rig.pass_ms(1_000)  # until its lease ends
    await player.call("change", await held(3), 0)  # for the fourth time
    for number, end in ((4, "run_now"), (5, "end")):
        await player.call("change", await held(number), 0)
        await player.call("operate", "two", end)
    await player.call("give_up", await held(6, is_push=False), 1)
    await player.call("send_back", await held(7), -1)
    await player.call("change", await held(8, "a"), 0)  # hidden in its place
    await player.call("job", "two", REDRIVE)
    too_old = await held(9)
    await player.call("set_policy", "two", 9, (300,), 299)
    await player.call("change", too_old, 0)
    await player.call("job", "two", PURGE)


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda batch: batch.puts.pop(0), "a row is missing"),
        (lambda batch: batch.puts.remove(next(put for put in batch.puts if put[0] == Family.AUDIT)), "an event is"),
    ],
)
def test_the_watch_can_fail(spoil: object, says: str) -> None:
    """A batch with an event too many or too few is found."""
    engines: list[WatchedEngine] = []

    class Spoilt(WatchedEngine):
        def write(self, batch: Batch) -> None:
            if any(put[0] == Family.QUEUE for put in batch.puts):
                batch.puts.sort(key=lambda put: put[0] != Family.QUEUE)
                assert callable(spoil)
                spoil(batch)
            super().write(batch)

    def spoilt(engine: Engine) -> Engine:
        engines.append(Spoilt(engine))
        return engines[-1]

    async def scenario(rig: EmbeddedRig) -> None:
        rig.is_whole = False
        await Player(rig).call("send", 1, 0, "x")
        assert engines[0].broken, says

    asyncio.run(play(EmbeddedRig(Path(), on_disk=False, queues=2, wrap=spoilt), scenario))


def test_a_bounded_outbox_reports_the_cut(tmp_path: Path) -> None:
    """Events that had to go leave one that counts them, so sequences have no unexplained hole."""

    async def scenario(rig: EmbeddedRig) -> None:
        for number in range(200):
            await rig.broker.send([an_envelope(f"m-{number}")])
        told = list(read_outbox(rig.store))
        gaps = [(each.event.time_ms, gap_count(each.event)) for each in told if each.event.kind is EventKind.GAP]
        assert gaps
        missing = {first + step for first, count in gaps for step in range(count)}
        seen = {each.record.sequence for each in told}
        assert not missing & seen
        everything = range(1, rig.store.outbox_state.next_sequence)
        # Gap events can be cut in their turn; what they stood for lies in front of the oldest that is left.
        assert set(range(min(missing), everything.stop)) == (missing | seen)

    options = StoreOptions(outbox_bytes_max=4_000, gap_event=gap_event)
    asyncio.run(play(EmbeddedRig(tmp_path, on_disk=False, options=options), scenario))
