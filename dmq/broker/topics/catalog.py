"""Catalog of topics and groups: finds them by name, and auto-creates them at first use if configured."""

from __future__ import annotations

from typing import NamedTuple

from broker_adapter.contracts.errors import Refused, Rule, group_unknown, topic_unknown
from broker_adapter.contracts.limits import QUEUES_PER_TOPIC_DEFAULT
from broker_adapter.contracts.topics import DEAD_LETTER_PREFIX, RETRY_PREFIX, check_group, check_topic, retry_topic
from dmq.broker.io import Commits
from dmq.broker.topics.registry import FORWARDER_GROUP, Group, Names, Topic
from dmq.store.schema.topics.names import MIXED, TopicSettings
from retry.policy import RetryPolicy

DEFAULT_POLICY = RetryPolicy()
QUEUES_DEFAULT = QUEUES_PER_TOPIC_DEFAULT  # of an auto-created topic


class AutoCreate(NamedTuple):
    """Whether unknown topics and groups are created at first use."""

    topics: bool = True
    groups: bool = True


AUTO_CREATE = AutoCreate()


class ScheduleLimits(NamedTuple):
    """Maximum number of schedules of recurring messages, in total and per topic."""

    total: int = 10_000
    per_topic: int = 1_000


LIMITS_DEFAULT = ScheduleLimits()


class Catalog:
    """Topics and groups by name. It belongs to the event loop."""

    def __init__(
        self, names: Names, commits: Commits, *, queues_per_topic: int, auto_create: AutoCreate = AUTO_CREATE
    ) -> None:
        self.names = names
        self._commits = commits
        self._clock = commits.store.clock
        self._queues_per_topic = queues_per_topic
        self._auto_create = auto_create

    async def topic(self, name: str) -> Topic:
        """Return a topic; create it if it is unknown and topics are auto-created, else raise ``Refused``."""
        found = self.names.topics.get(name)
        if found is not None:
            return found
        is_made = self._auto_create.topics or name.removeprefix(DEAD_LETTER_PREFIX) in self.names.groups
        if not is_made and check_topic(name):
            raise Refused(Rule.TOPIC_UNKNOWN, "it does not exist, and topic_auto_create is off", value=name)
        return await self.make_topic(name)

    def is_known(self, kind: str, name: str) -> bool:
        """Return True if using a name of kind ``topics`` or ``groups`` would not auto-create it."""
        if kind == "topics":
            return name in self.names.topics or not self._auto_create.topics
        return name in self.names.groups or not self._auto_create.groups

    async def make_topic(self, name: str, queues: int = 0, settings: TopicSettings = MIXED) -> Topic:
        """Create a topic, durable on return; ``queues`` 0 applies the configured number."""
        if check_topic(name).startswith(RETRY_PREFIX):
            why = "retries are received under the original topic, not the retry topic"
            raise Refused(Rule.TOPIC, why, value=name)
        queues = queues or (1 if name.startswith(DEAD_LETTER_PREFIX) else self._queues_per_topic)
        return await self._make_topic(name, queues, settings)

    async def retry_topic(self, group: str) -> Topic:
        """Return the retry topic of a group for sent-back messages; create it, and the group, if missing.

        Only groups of consumers that divide queues among themselves have one. Other groups use retry lanes.
        """
        name = retry_topic(check_group(group))
        await self.group(group)
        return self.names.topics.get(name) or await self._make_topic(name, 1, MIXED)

    async def _make_topic(self, name: str, queues: int, settings: TopicSettings) -> Topic:
        if (Topic, name) in self.names.removing:
            raise Refused(Rule.TOPIC_UNKNOWN, "it is being removed", value=name)
        topic, ops = self.names.plan_topic(name, queues, self._clock.now_ms(), settings)
        done = self._commits.submit(ops)
        self.names.add_topic(topic)  # later units commit after this one, so the id may be used at once
        await self._commits.committed(done)
        return self.known_topic(name)

    def known_topic(self, name: str) -> Topic:
        """Return an existing topic; raise ``Refused`` otherwise, for example if it was removed during an await."""
        found = self.names.topics.get(name)
        if found is None:
            raise topic_unknown(name)
        return found

    async def group(self, name: str) -> Group:
        """Return a group; create it if it is unknown and groups are auto-created, else raise ``Refused``."""
        found = self.names.groups.get(name)
        if found is not None:
            return found
        if not self._auto_create.groups and check_group(name):
            raise Refused(Rule.GROUP_UNKNOWN, "it does not exist, and group_auto_create is off", value=name)
        return await self.make_group(name)

    async def make_group(self, name: str) -> Group:
        """Create a group, durable on return."""
        check_not_forwarder(name)
        if (Group, check_group(name)) in self.names.removing:
            raise Refused(Rule.GROUP_UNKNOWN, "it is being removed", value=name)
        group, ops = self.names.plan_group(name, self._clock.now_ms())
        done = self._commits.submit(ops)
        self.names.add_group(group)
        await self._commits.committed(done)
        return self.known_group(name)

    def known_group(self, name: str) -> Group:
        """As ``known_topic``, for a group."""
        found = self.names.groups.get(name)
        if found is None:
            raise group_unknown(name)
        return found

    def policy(self, group_id: int) -> RetryPolicy:
        """Return the current retry policy of a group."""
        return self.names.groups_by_id[group_id].policy or DEFAULT_POLICY


def check_not_forwarder(group: str) -> None:
    """Refuse the use of the forwarder group by clients and operators: messages skipped for it would not reach the
    cluster.
    """
    if group == FORWARDER_GROUP:
        why = "this group forwards messages to the cluster and cannot be read or moved; 'topic rm --force' discards"
        raise Refused(Rule.GROUP, why, value=group)
