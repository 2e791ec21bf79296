"""All lanes: one for each topic with messages for the cluster."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

import structlog

from broker_adapter.contracts.adapter import PopBroker
from broker_adapter.contracts.errors import BrokerError, Refused
from broker_adapter.contracts.limits import TOPICS_MAX
from broker_adapter.runtime.clock import Clock
from dmq.broker import EmbeddedBroker
from dmq.broker.io import Place
from dmq.cluster.forward_bounds import Bounds
from dmq.cluster.in_doubt import InDoubtMessages
from dmq.cluster.outgoing import Doubt, Forwards, QueueState
from dmq.cluster.reach import ClusterReach
from dmq.cluster.topic_forwarder import TOGETHER_MAX, ForwardTotals, TopicForwarder
from dmq.errors import StoreError
from dmq.store.writer.operations import Appended

log = structlog.get_logger("dmq.cluster")

_AT_ONCE = 32  # topics read at the same time at the start
_FAILED_PAUSE_S = 1.0


class Forwarder:
    """The sender of due messages to the cluster. The event loop owns it; call ``start`` and ``close`` once each."""

    def __init__(
        self,
        broker: EmbeddedBroker,
        cluster: PopBroker,
        clock: Clock,
        *,
        in_flight_max: int,
        observe: Callable[[Sequence[int]], None] = lambda _: None,
    ) -> None:
        self.totals = ForwardTotals(observe=observe)
        self.lanes: dict[str, TopicForwarder] = {}
        self._broker = broker
        self._forwards = Forwards(broker)
        self._cluster = cluster
        self._clock = clock
        self._in_flight_max = in_flight_max
        self._reach = ClusterReach()
        self._doubt = Doubt.NOTHING
        self._states: Mapping[Place, QueueState] = {}  # at the start of this run
        self._opened_at_ms = clock.now_ms()
        self._to_look_at: set[str] = set()
        self._looking: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start; messages of earlier runs are found in the background.

        Call it before the scheduler hands over messages: all messages in the queues at that time are from earlier runs.
        """
        self._doubt = await self._forwards.open()
        if self._doubt is not Doubt.NOTHING:
            log.warning("forwarding_in_doubt", of=self._doubt.name.lower())
        topics = self._forwards.topics()
        self._states = await self._forwards.states(topics)
        self._to_look_at = set(topics)
        self._broker.on_appended = self._grown
        self._looking = asyncio.get_running_loop().create_task(self._look(), name="dmq-forwarder")

    async def close(self, grace_s: float) -> None:
        """Stop sending, and wait up to ``grace_s`` for answers."""
        self._broker.on_appended = lambda _: None
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.gather(self._looking, return_exceptions=True)
        await asyncio.gather(*(lane.close(grace_s) for lane in self.lanes.values()))
        if not self._to_look_at and all(lane.is_settled for lane in self.lanes.values()):
            with suppress(BrokerError):  # the store is closing: the next run treats this one as crashed
                await self._forwards.settle()

    def lane(self, topic: str) -> TopicForwarder:
        """Return the lane of a topic, created if it is new."""
        lane = self.lanes.get(topic)
        if lane is None:
            lane = self.lanes[topic] = TopicForwarder(
                topic,
                self._forwards,
                self._cluster,
                self._clock,
                self.totals,
                reach=self._reach,
                in_flight_max=self._in_flight_max,
                suspects=self._suspects(topic),
                bounds=Bounds({place: each.bound for place, each in self._of(topic) if each.bound is not None}),
            )
        return lane

    def _of(self, topic: str) -> list[tuple[Place, QueueState]]:
        places = self._forwards.places(topic)
        return [(place, self._states[place]) for place in places if place in self._states]

    def _suspects(self, topic: str) -> InDoubtMessages:
        has_bounds = self._doubt is Doubt.IN_FLIGHT  # the bounds of a copy do not cover later sends of the original
        return InDoubtMessages(
            self._doubt,
            {
                place: min(each.end, each.bound) if has_bounds and each.bound is not None else each.end
                for place, each in self._of(topic)
            },
            opened_at_ms=self._opened_at_ms,
            in_flight_max=self._in_flight_max,
            together_max=TOGETHER_MAX,
        )

    def failed(self, topic: str, message_ids: Sequence[str], why: str) -> None:
        """Record that the cluster did not accept messages that were passed on.

        The number of lanes is bounded by the maximum number of topics: clients choose the names, and their messages may
        not be stored.
        """
        if topic in self.lanes or len(self.lanes) < TOPICS_MAX:
            self.lane(topic).gate.failed(message_ids, why)

    def is_busy(self, topic: str) -> bool:
        """Return True if messages of a topic are here that the cluster does not have, or may not have."""
        lane = self.lanes.get(topic)
        return topic in self._to_look_at or (lane is not None and lane.is_busy)

    def away(self) -> None:
        """Stop all attempts until ``back``: no proxy of the cluster answers."""
        self._reach.away()

    def back(self) -> None:
        """Resume: a proxy answers."""
        self._reach.back()

    def try_now(self) -> None:
        """Retry without waiting: a part of the cluster is reachable again."""
        for lane in self.lanes.values():
            lane.gate.try_now()

    async def _look(self) -> None:
        """Find messages of earlier runs. A topic sends no new messages before it has been read."""
        topics = sorted(self._to_look_at)
        for first in range(0, len(topics), _AT_ONCE):
            await asyncio.gather(*(self._look_at(topic) for topic in topics[first : first + _AT_ONCE]))

    async def _look_at(self, topic: str) -> None:
        while True:
            try:
                await self._forwards.look_at(topic)
            except Refused:  # the topic was removed
                break
            except (BrokerError, StoreError) as error:
                log.warning("lane_read_failed", topic=topic, error=str(error))
                await asyncio.sleep(_FAILED_PAUSE_S)
            else:
                break
        self._to_look_at.discard(topic)  # no await may follow
        if self._forwards.has_more(topic):
            self.lane(topic).grown()

    def _grown(self, appended: Appended) -> None:
        for topic_id, _ in appended:
            topic = self._forwards.topic_of(topic_id)
            if topic and topic not in self._to_look_at:
                self.lane(topic).grown()
