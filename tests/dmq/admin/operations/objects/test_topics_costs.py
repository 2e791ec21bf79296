"""What operators look at and change costs no more than it has to, and others have their turns meanwhile."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from support.clients.embedded.admin_answers import ask, groups_of
from support.clients.embedded.failing import change, pushed, pushed_one
from support.forges.messages.letters import die_many, page
from support.rigs.broker.rig import GROUP, EmbeddedRig, an_envelope, every_durable_broker, receive
from support.rigs.store.rows import GatedEngine

from broker_adapter.contracts.errors import Refused
from broker_adapter.contracts.topics import retry_topic
from dmq.admin import admin_v1 as wire
from dmq.admin.operations.daemon import OverdueCount
from dmq.admin.operations.objects import topics as topics_module
from dmq.admin.operations.objects.groups import GroupCalls
from dmq.broker.groups.queue_front import edges
from dmq.broker.groups.subscriptions import Subscriptions
from dmq.broker.io.commits import Commits
from dmq.broker.io.reader import Reader
from dmq.broker.operations.admin import END
from dmq.broker.operations.dead_letters import DeadLetters
from dmq.broker.operations.progress import ProgressReader
from dmq.broker.topics.settings import FlowChange
from dmq.store.engines.engine import Engine, Rows
from dmq.store.schema.accounting.counts import DueCount
from dmq.store.schema.keys import Family, waiting_range
from dmq.store.schema.topics.names import TopicQuotas
from dmq.store.store import Store
from dmq.store.writer.operations import Op

pytestmark = pytest.mark.contract


class Turns:
    """Counts the turns of the event loop that others have."""

    def __init__(self) -> None:
        self.count = 0
        self._counting = asyncio.get_running_loop().create_task(self._count())

    async def _count(self) -> None:
        while True:
            self.count += 1
            await asyncio.sleep(0)

    async def end(self) -> None:
        """Count no longer."""
        self._counting.cancel()
        await asyncio.gather(self._counting, return_exceptions=True)


@every_durable_broker(queues=1)
async def test_a_page_of_dead_letters_is_read_in_pieces(rig: EmbeddedRig) -> None:
    """Danger: each page, a short one too, took 2,000 messages apart in one turn, a tenth of a second for everybody."""
    await die_many(rig, 300)
    turns, taken_apart = Turns(), Counter[int]()
    row = DeadLetters._row

    def counted(*arguments: object) -> object:
        taken_apart[turns.count] += 1
        return row(*arguments)  # type: ignore[arg-type]

    with patch.object(DeadLetters, "_row", counted):
        assert len((await page(rig, limit=10)).letters) == 10
        assert taken_apart.total() <= 64
        assert len((await page(rig, limit=300)).letters) == 300
    await turns.end()
    assert max(taken_apart.values()) <= 64


@every_durable_broker(queues=2)
async def test_reports_of_one_topic_read_no_other(rig: EmbeddedRig) -> None:
    """Danger: to make or change a topic read the ends of all queues of all topics."""
    for number in range(5):
        await rig.broker.send([an_envelope(topic=f"t-{number}")])
    with patch.object(topics_module, "edges", wraps=edges) as looked:
        await ask(rig, wire.CreateTopicRequest(topic="made", queues=3))
        await ask(rig, wire.SetTopicRequest(topic="t-1", queues=4))
        found = (await ask(rig, wire.GetTopicRequest(topic="t-2"))).topic
    assert (found.name, found.stored) == ("t-2", 1)
    ids = {name: topic.topic_id for name, topic in rig.broker.names.topics.items()}
    assert [each.args[1] for each in looked.call_args_list] == [ids["made"], ids["t-1"], ids["t-2"]]


@every_durable_broker(queues=1)
async def test_a_retry_topic_is_shown_with_any_rows_under_its_name(rig: EmbeddedRig) -> None:
    """What the group failed here comes first; what a classic consumer sent back there is another topic of that name."""
    name = retry_topic(GROUP)
    await rig.set_group(GROUP, max_attempts=5, delays_ms=(60_000,))
    await rig.broker.send([an_envelope("m-1")])
    await change(rig, await pushed_one(rig))
    assert (await ask(rig, wire.GetTopicRequest(topic=name))).topic.pending == 1
    await rig.broker.catalog.retry_topic(GROUP)
    every = (await ask(rig, wire.ListTopicsRequest())).topics
    assert [each.pending for each in every if each.name == name] == [1, 0]
    assert (await ask(rig, wire.GetTopicRequest(topic=name))).topic.pending == 1


@every_durable_broker(queues=2)
async def test_groups_are_asked_only_about_queues_that_are_added(rig: EmbeddedRig) -> None:
    """Danger: whatever was changed of a topic, a pause for example, looked for each group there is in the store."""
    await rig.broker.send([an_envelope(topic="orders")])
    with patch.object(ProgressReader, "readers_of", return_value=[]) as asked:
        await rig.broker.operator.set_topic("orders", queues=2, flow=FlowChange(True, None))
        assert not asked.called
        await rig.broker.operator.set_topic("orders", queues=3)
        assert asked.called


@every_durable_broker(queues=2)
async def test_a_group_is_asked_about_and_removed_without_a_wait_for_each_topic(rig: EmbeddedRig) -> None:
    """Danger: a turn of the reading thread and a sync of the disk for each topic there is, 3.6 s for 3,000."""
    for number in range(40):
        await rig.broker.send([an_envelope(topic=f"t-{number}")])
    await receive(rig, topic="t-7")
    commit, run = Commits.commit, Reader.run
    waits: Counter[str] = Counter()

    async def committed(commits: Commits, ops: Sequence[Op]) -> None:
        waits["commit"] += 1
        await commit(commits, ops)

    async def looked(reader: Reader, read: Callable[[Store], object]) -> object:
        waits["look"] += 1
        return await run(reader, read)

    with patch.object(Commits, "commit", committed), patch.object(Reader, "run", looked):
        assert [each.topic for each in await rig.broker.operator.unread(rig.broker.names.groups[GROUP])] == ["t-7"]
        await rig.broker.operator.reset_group(GROUP, "t-7", END)
        await rig.broker.operator.remove_group(GROUP, is_forced=False)
    assert waits["commit"] < 20, waits
    assert waits["look"] < 20, waits


@every_durable_broker(queues=1)
async def test_groups_are_listed_by_one_look_at_the_subscriptions(rig: EmbeddedRig) -> None:
    """Danger: each group went through the subscriptions of all, which grew with their square."""
    for number in range(5):
        await rig.broker.ensure_group(f"group-{number}")
    everything = Subscriptions.all
    looks: list[Subscriptions] = []

    def counted(subscriptions: Subscriptions) -> object:
        looks.append(subscriptions)
        return everything(subscriptions)

    with patch.object(rig.broker.lags, "look", return_value=[]), patch.object(Subscriptions, "all", counted):
        assert [each.name for each in await groups_of(rig)] == [f"group-{number}" for number in range(5)]
    assert len(looks) == 1


@every_durable_broker(queues=1)
async def test_overdue_messages_are_counted_without_a_look_at_each_topic(rig: EmbeddedRig) -> None:
    """Danger: each status scanned the counts of every topic with pending messages, 20 to 90 ms for 5,000 topics."""
    minute_ms, store = 60_000, rig.store
    rig.scheduler.turn()
    at_ms = rig.clock.now_ms() + 10 * minute_ms
    for number in range(20):
        await rig.broker.send([an_envelope(topic=f"t-{number}", deliver_at_ms=at_ms)])
    count = OverdueCount(store)
    with patch.object(Store, "due_counts", autospec=True, side_effect=Store.due_counts) as looked:
        assert count() == 0
        assert not looked.called
    rig.clock.advance(12 * minute_ms)

    def slow(*given: Any, **options: Any) -> list[DueCount]:  # noqa: ANN401 - those of the store
        rig.clock.advance(1)
        return due_counts(*given, **options)

    due_counts = Store.due_counts
    with patch.object(Store, "due_counts", autospec=True, side_effect=slow) as looked:
        assert (count(), count()) == (20, 20)
        assert looked.call_count == 20, "the second answer is that of the first"
        rig.clock.advance(400)
        count()
        assert looked.call_count == 40


@pytest.mark.parametrize("topics", [5, 5_000])
def test_a_status_reads_no_row_for_a_topic(tmp_path: Path, topics: int) -> None:
    """Danger: one row for each topic with pending messages and for each with a quota, 20 to 90 ms for 5,000 topics."""
    engines: list[ReadCounter] = []

    def counting(engine: Engine) -> Engine:
        engines.append(ReadCounter(engine))
        return engines[-1]

    async def body() -> None:
        quotas = TopicQuotas(max_pending=100, max_pending_bytes=10**6)
        rig = EmbeddedRig(tmp_path, on_disk=False, queues=1, wrap=counting, quotas=quotas)
        await rig.open()
        at_ms = rig.clock.now_ms() + 600_000
        await rig.broker.send([an_envelope(topic=f"t-{n}", deliver_at_ms=at_ms + n) for n in range(topics)])
        rig.scheduler.turn()
        before = engines[-1].reads
        found = await ask(rig, wire.GetStatusRequest())
        assert engines[-1].reads - before <= 2, "the first entry of the timeline"
        assert (found.timeline.pending, found.timeline.overdue) == (topics, 0)
        assert len(found.topic_quotas) == 10
        await rig.close()

    asyncio.run(body())


class ReadCounter(GatedEngine):
    """Counts the rows that are read from an engine."""

    reads = 0

    def get_many(self, family: Family, keys: Sequence[bytes]) -> list[bytes | None]:
        self.reads += len(keys)
        return super().get_many(family, keys)

    def scan(self, family: Family, start: bytes, stop: bytes, *, limit: int, bytes_max: int = 2**62) -> Rows:
        found = super().scan(family, start, stop, limit=limit, bytes_max=bytes_max)
        self.reads += len(found.rows)
        return found

    def last(self, family: Family, start: bytes, stop: bytes) -> tuple[bytes, bytes] | None:
        self.reads += 1
        return super().last(family, start, stop)


@every_durable_broker(queues=1)
async def test_topics_and_groups_come_in_pages(rig: EmbeddedRig) -> None:
    """Each once, by name, whatever the size of a page; a page reads the ends of its own queues alone."""
    for number in range(7):
        await rig.broker.send([an_envelope(topic=f"t-{number}")])
        await rig.broker.ensure_group(f"g-{number}")
    for limit in (1, 3, 7, 1_000):
        for kind, request in (("t", wire.ListTopicsRequest(limit=limit)), ("g", wire.ListGroupsRequest(limit=limit))):
            found = list[str]()
            with patch.object(topics_module, "edges", wraps=edges) as looked:
                while True:
                    page = await ask(rig, request)
                    rows = page.topics if kind == "t" else page.groups
                    assert len(rows) <= limit
                    assert looked.call_count in {0, len(rows)}
                    looked.reset_mock()
                    found += [each.name for each in rows]
                    request.token = page.next_token
                    if not page.next_token:
                        break
            assert found == [f"{kind}-{number}" for number in range(7)]
    groups = GroupCalls(rig.store, rig.broker)
    with patch.object(rig.broker.lags, "look", return_value=[]) as looked:
        first = await groups.list_groups(wire.ListGroupsRequest(limit=3))
        await groups.list_groups(wire.ListGroupsRequest(limit=3, token=first.next_token))
        assert looked.call_count == 1, "all pages of a list share the read of the ledger"
        await groups.list_groups(wire.ListGroupsRequest())
        assert looked.call_count == 2
    for limit in (-1, 1_001):
        with pytest.raises(Refused):
            await ask(rig, wire.ListTopicsRequest(limit=limit))


class IndexScans:
    """Counts the scans of the index that begin where its entries of a scope begin, and the commits of nothing."""

    def __init__(self) -> None:
        self.from_start = self.empty_commits = 0

    async def of(self, removal: Callable[[], Awaitable[None]], scope: int) -> None:
        """Run a removal and count."""
        commit, rows = Commits.commit, Reader.rows

        async def committed(commits: Commits, ops: Sequence[Op]) -> object:
            self.empty_commits += not ops
            return await commit(commits, ops)

        async def scanned(
            reader: Reader, family: Family, start: bytes, stop: bytes, *, limit: int, bytes_max: int = 2**62
        ) -> Rows:
            self.from_start += (family, start) == (Family.INDEX, waiting_range(scope)[0])
            return await rows(reader, family, start, stop, limit=limit, bytes_max=bytes_max)

        with patch.object(Commits, "commit", committed), patch.object(Reader, "rows", scanned):
            await removal()


@every_durable_broker(queues=1)
async def test_a_topic_is_removed_without_a_scan_of_deleted_rows_for_each_unit(rig: EmbeddedRig) -> None:
    """Danger: each unit scanned all rows deleted before and synced twice, 26 s for 100,000 pending messages."""
    at_ms, found = rig.clock.now_ms() + 600_000, list[IndexScans]()
    for count in (40, 400):
        topic = f"with-{count}"
        await rig.broker.send([an_envelope(f"m-{n}", topic=topic, deliver_at_ms=at_ms + n) for n in range(count)])
        topic_id = rig.broker.names.topics[topic].topic_id
        found.append(IndexScans())
        await found[-1].of(partial(rig.broker.operator.remove_topic, topic, is_forced=True), topic_id)
        assert not rig.store.pending().get(topic_id)
    assert [(each.from_start, each.empty_commits) for each in found] == [(2, found[0].empty_commits)] * 2


@every_durable_broker(queues=1)
async def test_retries_are_moved_without_a_scan_of_deleted_rows_for_each_unit(rig: EmbeddedRig) -> None:
    """Danger: each unit of a group's removal scanned all pending retries that were moved before."""
    found = list[IndexScans]()
    for count in (40, 400):
        group = f"failing-{count}"
        await rig.set_group(group, max_attempts=5, delays_ms=(600_000,))
        await rig.broker.send([an_envelope(f"m-{n}", topic=group) for n in range(count)])
        while deliveries := await pushed(rig, group=group, topic=group):
            for delivery in deliveries:
                await change(rig, delivery, group=group)
        group_id = rig.broker.names.groups[group].group_id
        assert rig.store.pending()[group_id] == count
        found.append(IndexScans())
        await found[-1].of(partial(rig.broker.operator.remove_group, group, is_forced=True), group_id)
        assert not rig.store.pending().get(group_id)
    assert [each.from_start for each in found] == [2, 2]
