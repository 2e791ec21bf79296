"""Environments that share a topic but use separate queues: messages of one are not consumed by another.

Environment n of the list has the queues with numbers from n times ``queues_each`` on, at every broker of the topic. The
queue number decides, not the index among all queues. So a broker that joins or leaves moves no boundary. Producers and
consumers need the same list; a new environment is appended.

A consumer's environment is the suffix of its client id: ``10.0.0.7@4711@dev1``. RocketMQ's own clients append their
unit name there, which thus also selects an environment.

``%RETRY%`` topics have one queue, shared by all members: a message there carries its environment itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from broker_adapter.contracts.message_queue import MessageQueue
from broker_adapter.contracts.topics import RETRY_PREFIX
from broker_adapter.queue_client.balance.allocation import Strategy


class TooFewQueues(ValueError):
    """A topic has fewer queues at a broker than its environments need: some would have none and lose messages."""

    def __init__(self, topic: str, broker: str, *, queues: int, needed: int) -> None:
        super().__init__(topic, broker, queues, needed)
        self.topic = topic
        self.broker = broker
        self.queues = queues
        self.needed = needed

    def __str__(self) -> str:
        return (
            f"topic {self.topic!r} has {self.queues} queues at broker {self.broker!r}, and its environments need"
            f" {self.needed}: give it more queues, or list fewer environments"
        )


class UnknownEnvironment(ValueError):
    """Environment that is not in the list."""

    def __init__(self, given: str, names: tuple[str, ...]) -> None:
        super().__init__(given, names)
        self.given = given
        self.names = names

    def __str__(self) -> str:
        return f"{self.given!r} names no environment; those there are: {', '.join(self.names)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Environments:
    """Environments of a cluster, in the order of their queues. ``ValueError`` for an invalid list."""

    names: tuple[str, ...]
    queues_each: int = 1

    def __post_init__(self) -> None:
        if not self.names or len(set(self.names)) != len(self.names):
            raise ValueError(f"environments need a list of different names, got {self.names!r}")
        if any(not name or "@" in name for name in self.names):
            raise ValueError(f"the name of an environment is not empty and has no '@', got {self.names!r}")
        if self.queues_each < 1:
            raise ValueError(f"an environment needs at least one queue, got {self.queues_each}")

    @property
    def queues_needed(self) -> int:
        """Number of queues that a topic needs at each of its brokers."""
        return len(self.names) * self.queues_each

    def queues_of(self, environment: str, queues: Sequence[MessageQueue]) -> Sequence[MessageQueue]:
        """Return the queues of an environment among those of one topic, for its producers.

        ``TooFewQueues``; ``UnknownEnvironment``.
        """
        if environment not in self.names:
            raise UnknownEnvironment(environment, self.names)
        self._check(queues)
        start = self.names.index(environment) * self.queues_each
        return [queue for queue in queues if start <= queue.queue_id < start + self.queues_each]

    def of_client(self, client_id: str) -> str | None:
        """Return the environment in a client id, or ``None`` if there is none."""
        _, at, name = client_id.rpartition("@")
        return name if at and name in self.names else None

    def _check(self, queues: Sequence[MessageQueue]) -> None:
        for broker in sorted({queue.broker for queue in queues}):
            count = sum(queue.broker == broker for queue in queues)
            if count < self.queues_needed:
                raise TooFewQueues(queues[0].topic, broker, queues=count, needed=self.queues_needed)


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnEnvironment:
    """Strategy that divides an environment's queues among its members; without a member its queues stay unassigned."""

    environments: Environments
    inner: Strategy

    @property
    def name(self) -> str:
        return f"ENVIRONMENT-{self.inner.name}"

    def __call__(
        self, group: str, client_id: str, queues: Sequence[MessageQueue], client_ids: Sequence[str], /
    ) -> Sequence[MessageQueue]:
        """Return the share of a member as a ``Strategy``; raises ``TooFewQueues``, ``UnknownEnvironment``."""
        if not queues or queues[0].topic.startswith(RETRY_PREFIX):
            return self.inner(group, client_id, queues, client_ids)
        own = self.environments.of_client(client_id)
        if own is None:
            raise UnknownEnvironment(client_id, self.environments.names)
        neighbours = [each for each in client_ids if self.environments.of_client(each) == own]
        return self.inner(group, client_id, self.environments.queues_of(own, queues), neighbours)
