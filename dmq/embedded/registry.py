"""What the embedded broker knows while it runs: topics, groups, and the subscriptions that are loaded.

Everything in memory belongs to one event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

from broker_adapter.clock import moment
from broker_adapter.errors import (
    BrokerError,
    BrokerUnavailable,
    Overloaded,
    Refused,
    Rule,
    group_unknown,
    topic_unknown,
)
from broker_adapter.topics import DEAD_LETTER_PREFIX, RETRY_PREFIX, check_group, check_topic
from dmq.audit.events import subscribed_event
from dmq.embedded.entry_handle import EntryHandles
from dmq.embedded.group_queue import GroupQueue, Lease
from dmq.embedded.names import Group, Names, Topic
from dmq.embedded.reader import Reader
from dmq.embedded.receipt import ReceiptHandles
from dmq.embedded.recent import LAG_MAX
from dmq.embedded.subscription import Subscription
from dmq.embedded.tail import Tail
from dmq.embedded.topic_settings import MIXED, TopicSettings
from dmq.errors import StoreBusy, StoreError
from dmq.store.commit import Unit
from dmq.store.keys import reset_key, unpack_u64
from dmq.store.ops import Appended, Emit, Family, Op, Receipt
from dmq.store.store import Store
from retry.policy import RetryPolicy

DEFAULT_POLICY = RetryPolicy()


class AutoCreate(NamedTuple):
    """Whether what is used and not known is made."""

    topics: bool = True
    groups: bool = True


AUTO_CREATE = AutoCreate()


class Registry:
    """Finds and makes topics, groups and subscriptions; ``submit`` and ``committed`` are the way to the store."""

    def __init__(
        self,
        store: Store,
        reader: Reader,
        *,
        queues_per_topic: int,
        group_start: Literal["earliest", "latest"],
        auto_create: AutoCreate = AUTO_CREATE,
    ) -> None:
        self.store = store
        self.names = Names(store)
        self.clock = store.clock
        self.reader = reader
        # Lets a lease end in its time; set by the leases, which need the registry to be made.
        self.watch: Callable[[GroupQueue, int, Lease], None] = lambda *_: None
        self._queues_per_topic = queues_per_topic
        self._group_start = group_start
        self._auto_create = auto_create
        self.subscriptions: dict[tuple[int, int], Subscription] = {}
        self.readers: dict[int, set[int]] = {}  # groups, by topic, of all subscriptions there were in this run
        self._by_topic: dict[int, list[Subscription]] = {}
        self._by_lane: dict[int, Subscription] = {}
        self._retired: list[Subscription] = []
        self.ledgers: dict[int, GroupQueue] = {}
        self.tails: dict[tuple[int, int], Tail] = {}  # of the queues that are pulled from
        self.looked: dict[tuple[int, int], int] = {}  # queues retention looks at: lowest offset committed meanwhile
        self.begins: dict[tuple[int, int], int] = {}  # of queues that lost their front in this run, from the order on
        self.receipt_handles = ReceiptHandles(store.identity)
        self.entry_handles = EntryHandles(store.identity)
        self.epoch = store.boot << 32  # of the last hand-out: greater than every one of an earlier run

    # -- topics and groups --------------------------------------------------------------------------------------------

    async def topic(self, name: str) -> Topic:
        """Return a topic, made if it is not known and topics are made by using them; else ``Refused``."""
        found = self.names.topics.get(name)
        if found is not None:
            return found
        is_made = self._auto_create.topics or name.removeprefix(DEAD_LETTER_PREFIX) in self.names.groups
        if not is_made and check_topic(name):
            raise Refused(Rule.TOPIC_UNKNOWN, "it does not exist, and topic_auto_create is off", value=name)
        return await self.make_topic(name)

    def is_known(self, kind: str, name: str) -> bool:
        """Say whether using one of ``topics`` or ``groups`` makes none: there is one, or none is made by using it."""
        if kind == "topics":
            return name in self.names.topics or not self._auto_create.topics
        return name in self.names.groups or not self._auto_create.groups

    async def make_topic(self, name: str, queues: int = 0, settings: TopicSettings = MIXED) -> Topic:
        """Make a topic, durable on return; with ``queues`` 0 it has as many as the configuration says."""
        if check_topic(name).startswith(RETRY_PREFIX):
            why = "what a group failed comes to its consumers under the topic it was sent to"
            raise Refused(Rule.TOPIC, why, value=name)
        if (Topic, name) in self.names.removing:
            raise Refused(Rule.TOPIC_UNKNOWN, "it is being removed", value=name)
        queues = queues or (1 if name.startswith(DEAD_LETTER_PREFIX) else self._queues_per_topic)
        topic, ops = self.names.plan_topic(name, queues, self.clock.now_ms(), settings)
        done = self.submit(ops)
        self.names.add_topic(topic)  # later units are committed after this one, so its id may be used at once
        await self.committed(done)
        return self.known_topic(name)

    def known_topic(self, name: str) -> Topic:
        """Return a topic that is known; one that was a moment ago may have been removed since."""
        found = self.names.topics.get(name)
        if found is None:
            raise topic_unknown(name)
        return found

    async def group(self, name: str) -> Group:
        """Return a group, made if it is not known and groups are made by using them; else ``Refused``."""
        found = self.names.groups.get(name)
        if found is not None:
            return found
        if not self._auto_create.groups and check_group(name):
            raise Refused(Rule.GROUP_UNKNOWN, "it does not exist, and group_auto_create is off", value=name)
        return await self.make_group(name)

    async def make_group(self, name: str) -> Group:
        """Make a group, durable on return."""
        if (Group, check_group(name)) in self.names.removing:
            raise Refused(Rule.GROUP_UNKNOWN, "it is being removed", value=name)
        group, ops = self.names.plan_group(name, self.clock.now_ms())
        done = self.submit(ops)
        self.names.add_group(group)
        await self.committed(done)
        return self.known_group(name)

    def known_group(self, name: str) -> Group:
        """As ``known_topic``, of a group."""
        found = self.names.groups.get(name)
        if found is None:
            raise group_unknown(name)
        return found

    def policy(self, group_id: int) -> RetryPolicy:
        """Return the retry policy of a group as it is now."""
        return self.names.groups_by_id[group_id].policy or DEFAULT_POLICY

    def next_epoch(self) -> int:
        """Return an epoch that no hand-out has."""
        self.epoch += 1
        return self.epoch

    # -- subscriptions ------------------------------------------------------------------------------------------------

    def subscription_of(self, queue: GroupQueue) -> Subscription:
        """Return the subscription a loaded queue belongs to."""
        return self._by_lane.get(queue.topic_id) or self.subscriptions[queue.group_id, queue.topic_id]

    async def subscribe_known(self, group_name: str, topic_name: str) -> Subscription:
        """As ``subscribe``, for a receipt handle: create nothing, since it was given out for names that exist."""
        if group_name not in self.names.groups or topic_name not in self.names.topics:
            raise Refused(Rule.RECEIPT_HANDLE, "no such delivery", value=f"{group_name}, {topic_name}")
        return await self.subscribe(group_name, topic_name)

    async def subscribe(self, group_name: str, topic_name: str) -> Subscription:
        """Return the state of (group, topic), loaded; creates what is missing."""
        await self.group(group_name)
        await self.topic(topic_name)
        while True:  # either may have been removed while something was awaited
            group, topic = self.known_group(group_name), self.known_topic(topic_name)
            known = self.subscriptions.get((group.group_id, topic.topic_id))
            if known is None:
                break
            if known.is_loaded.is_set():
                return known
            await known.is_loaded.wait()  # and look again: whoever loads it may fail, or be cancelled
        found = Subscription(group.group_id, topic)
        self.subscriptions[group.group_id, topic.topic_id] = found
        self.readers.setdefault(topic.topic_id, set()).add(group.group_id)
        self._by_topic.setdefault(topic.topic_id, []).append(found)  # from here on it hears of new messages
        lane = self.names.lanes.get((group.group_id, topic.topic_id))
        if lane is not None:
            self._attach(found, lane)
        try:
            await self._load(found)
        except BaseException:
            self._detach(found)
            raise
        finally:
            found.is_loaded.set()
        return found

    def _detach(self, found: Subscription) -> None:
        key = found.group_id, found.topic.topic_id
        if self.subscriptions.get(key) is found:  # and not what holds its place
            del self.subscriptions[key]
        if found in self._by_topic.get(found.topic.topic_id, ()):
            self._by_topic[found.topic.topic_id].remove(found)
        if found.lane is not None:
            self._by_topic.pop(found.lane.topic_id, None)
            self._by_lane.pop(found.lane.topic_id, None)

    def subscribed_to(self, topic_id: int) -> list[Subscription]:
        """Return the subscriptions to a topic that are loaded, or about to be."""
        return [found for found in self._by_topic.get(topic_id, ()) if not found.is_retired]

    # -- retiring subscriptions: of a topic (no group id), of a group (no topic id), or one ---------------------------

    def retire(self, topic_id: int, group_id: int, *, is_held: bool) -> None:
        """Stop serving subscriptions. With ``is_held`` who subscribes waits until they are let go."""
        for key, found in self.subscriptions.items():
            if group_id in {0, key[0]} and topic_id in {0, key[1]} and not found.is_retired:
                found.retire()
                self._retired.append(found)
        if is_held:
            held = self.subscriptions[group_id, topic_id] = Subscription(group_id, self.names.topics_by_id[topic_id])
            held.retire()  # nobody gets it: it only holds the place

    async def retired(self, topic_id: int, group_id: int) -> None:
        """Return when nothing that was under way on retired subscriptions writes any more, and all of it is written."""
        for found in self._retired_of(topic_id, group_id):
            await found.is_loaded.wait()
            found.retire()  # with the leases it was loaded with
        await self.committed(self.submit([]))

    def let_go(self, topic_id: int, group_id: int) -> None:
        """Forget retired subscriptions: who subscribes now begins with what is stored."""
        for found in self._retired_of(topic_id, group_id):
            self._retired.remove(found)
            self._detach(found)
        held = self.subscriptions.pop((group_id, topic_id), None)
        if held is not None:
            held.is_loaded.set()
        if not topic_id:
            for groups in self.readers.values():
                groups.discard(group_id)
        if not group_id:
            self.readers.pop(topic_id, None)
            self.tails = {place: tail for place, tail in self.tails.items() if place[0] != topic_id}
            self.begins = {place: begin for place, begin in self.begins.items() if place[0] != topic_id}

    def _retired_of(self, topic_id: int, group_id: int) -> list[Subscription]:
        return [
            found
            for found in self._retired
            if group_id in {0, found.group_id} and topic_id in {0, found.topic.topic_id}
        ]

    async def successor(self, found: Subscription) -> Subscription:
        """Return what took the place of a retired subscription; ``Refused`` if its topic or its group was removed."""
        group_name, topic_name = self.names.groups_by_id[found.group_id].name, found.topic.name
        group, topic = self.known_group(group_name), self.known_topic(topic_name)
        if group.group_id != found.group_id:
            raise Refused(Rule.GROUP_UNKNOWN, "it was removed, and made anew", value=group_name)
        if topic.topic_id != found.topic.topic_id:
            raise Refused(Rule.TOPIC_UNKNOWN, "it was removed, and made anew", value=topic_name)
        return await self.subscribe(group_name, topic_name)

    async def _load(self, found: Subscription) -> None:
        ops: list[Op] = []
        (reset,) = await self.reader.values(Family.META, [reset_key(found.group_id, found.topic.topic_id)])
        found.reset_epoch = unpack_u64(reset) if reset is not None else 0
        queues = found.all_queues
        if found.topic.name.startswith(DEAD_LETTER_PREFIX):
            await self.ledger(found.topic.topic_id)
        for queue, (rows, begin, end) in zip(queues, await self.reader.progress(queues), strict=True):
            queue.end = max(queue.end, end)
            begin = max(begin, self.begins.get((queue.topic_id, queue.queue_id), 0))  # noqa: PLW2901
            if rows:
                queue.load(rows, moment(self.clock))
                ops += queue.skip_to(begin)
            else:
                ops += self._begin(found, queue, begin)
        # Also without ops: behind this unit, what lies below the ends that were read is durable.
        await self.committed(self.submit(ops))
        for queue in queues:
            for offset, lease in queue.leases.items():
                self.watch(queue, offset, lease)

    def _begin(self, found: Subscription, queue: GroupQueue, begin: int) -> list[Op]:
        """Let a group begin on a queue. Its retry lane is its own from the start, so that one makes no event."""
        if queue is found.lane:
            return queue.start_at(begin)
        offset = queue.end if self._group_start == "latest" else begin
        event = subscribed_event(queue.topic_id, queue.group_id, queue.queue_id, offset)
        return [*queue.start_at(offset), Emit(event, offset)]

    async def ledger(self, topic_id: int) -> GroupQueue:
        """Return which dead letters of a dead-letter queue have an outcome: the progress of group 0 on it."""
        known = self.ledgers.get(topic_id)
        if known is not None:
            return known
        ledger = GroupQueue(0, topic_id, 0)
        ((rows, begin, _),) = await self.reader.progress([ledger])
        ledger.load(rows)
        ledger.skip_to(begin)
        return self.ledgers.setdefault(topic_id, ledger)

    def lane(self, found: Subscription) -> tuple[GroupQueue, list[Op]]:
        """Return where retries of a loaded subscription go, and the ops that must ride with its first use."""
        if found.lane is not None:
            return found.lane, []
        group = self.names.groups_by_id[found.group_id]
        lane, ops = self.names.lane(group, found.topic.topic_id, self.clock.now_ms())
        queue = self._attach(found, lane)
        return queue, [*ops, *queue.start_at(0)]

    def lane_id(self, group: Group, topic: Topic) -> tuple[int, list[Op]]:
        """As ``lane``, whether the group is there or has ever read the topic or not: the id of where retries go."""
        found = self.subscriptions.get((group.group_id, topic.topic_id))
        if found is not None and not found.is_retired:
            queue, ops = self.lane(found)
            return queue.topic_id, ops
        lane, ops = self.names.lane(group, topic.topic_id, self.clock.now_ms())
        start = GroupQueue(group.group_id, lane.topic_id, 0).start_at(0)
        return lane.topic_id, [*ops, *start] if ops else []

    def _attach(self, found: Subscription, lane: Topic) -> GroupQueue:
        self._by_lane[lane.topic_id] = found
        self._by_topic[lane.topic_id] = [found]
        return found.attach(GroupQueue(found.group_id, lane.topic_id, 0))

    def heard(self, place: tuple[int, int], offset: int) -> None:
        """Note that a group which pulls continues at ``offset``, for who is about to remove what all have read."""
        if place in self.looked:
            self.looked[place] = min(self.looked[place], offset)

    def on_appended(self, appended: Appended) -> None:
        """Tell who waits that queues have grown."""
        grown: dict[Subscription, None] = {}
        for place, growth in appended.items():
            if (tail := self.tails.get(place)) is not None:
                tail.grew(growth.end)
            is_awaited = False
            for found in self._by_topic.get(place[0], ()):
                queue = found.queue_at(*place)
                if queue is not None:
                    queue.end = max(queue.end, growth.end)
                    is_awaited = is_awaited or growth.first - queue.cursor <= LAG_MAX
                    grown[found] = None
            if is_awaited:
                self.reader.recent.keep(place, growth)
            else:
                self.reader.recent.forget(place)
        for found in grown:
            found.wake_next()  # one: who takes something and leaves something wakes the next

    # -- the store ----------------------------------------------------------------------------------------------------

    def submit(self, ops: Sequence[Op], *, is_urgent: bool = True) -> asyncio.Future[list[Receipt]]:
        """Submit a unit; errors as a broker's."""
        try:
            return self.store.commit_async(ops, is_urgent=is_urgent)
        except StoreError as error:
            raise _not_taken(error) from error

    def submit_then(self, ops: Sequence[Op], settle: Callable[[Unit], None]) -> None:
        """Submit a unit that is not urgent and have ``settle`` called with it on the loop; errors as a broker's."""
        try:
            self.store.commit_then(ops, settle)
        except StoreError as error:
            raise _not_taken(error) from error

    async def committed(self, done: asyncio.Future[list[Receipt]]) -> list[Receipt]:
        """Wait until a unit is durable."""
        done.add_done_callback(look_at)  # its failure reaches everybody else too, should the caller go away
        try:
            return await asyncio.shield(done)  # a caller that goes away does not undo what was submitted
        except StoreError as error:
            raise BrokerUnavailable(str(error)) from error

    @staticmethod
    async def wait(done: asyncio.Future[Any]) -> None:
        """As ``committed``, where there are no receipts."""
        done.add_done_callback(look_at)
        try:
            await asyncio.shield(done)
        except StoreError as error:
            raise BrokerUnavailable(str(error)) from error


def _not_taken(error: StoreError) -> BrokerError:
    if isinstance(error, StoreBusy):
        return Overloaded("the store is busy", limit="pending_sends_max")
    return BrokerUnavailable(str(error))


def look_at(done: asyncio.Future[Any]) -> None:
    """Take note of a failure that reaches everybody else anyway."""
    if not done.cancelled():
        done.exception()
