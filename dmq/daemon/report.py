"""What the daemon tells operators: fits ``AdminSource``, and fills the gauges when Prometheus asks."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

from broker_adapter.adapter import Pulled, Subscription
from broker_adapter.errors import topic_unknown
from broker_adapter.message import pack_id
from broker_adapter.topics import retry_topic
from dmq.admin import source
from dmq.admin.source import CellState, CellStatus, MessageState, MessageStatus, TopicStatus
from dmq.audit.export import Exporter
from dmq.config import DaemonConfig
from dmq.daemon.clocks import clock_of
from dmq.daemon.listing import Listings
from dmq.daemon.objects import Objects
from dmq.embedded.broker import EmbeddedBroker
from dmq.embedded.names import Topic
from dmq.embedded.removable import edges
from dmq.metrics import Metrics
from dmq.store.keys import pack_queue_key, pack_timeline_key
from dmq.store.ops import EntryState, Family
from dmq.store.record import WAITING_HEADER_BYTES, body_payload, decode_queued, decode_waiting, redriven_id
from dmq.store.store import Store

_DUE_BUCKETS_MAX = 60
_UNKNOWN = MessageStatus(state=MessageState.UNKNOWN)


@dataclass
class Report(Objects, Listings):
    """Answers from what the parts count anyway; nothing here scans."""

    config: DaemonConfig
    store: Store
    broker: EmbeddedBroker
    metrics: Metrics
    version: str
    started_at_ms: int
    state: CellState = CellState.STARTING
    listen: str = ""
    metrics_listen: str = ""
    exporter: Exporter | None = None

    async def status(self) -> CellStatus:
        """Return how the daemon is now."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(None, self._status)

    def _status(self) -> CellStatus:
        store, metrics = self.store, self.metrics
        failure = store.failure
        next_due_ms = store.next_due_ms() or 0
        now_ms = store.clock.now_ms()
        pending = store.pending()
        disk = store.disk()
        stats = store.commit_stats
        return CellStatus(
            version=self.version,
            cell_id=store.cell_id,
            broker_name=self.config.broker_name,
            pid=os.getpid(),
            state=CellState.NOT_SERVING if failure is not None else self.state,
            state_reason=str(failure) if failure is not None else "",
            started_at_ms=self.started_at_ms,
            now_ms=now_ms,
            listen=self.listen,
            metrics_listen=self.metrics_listen,
            data=str(self.config.data.absolute()),
            durability=self.config.durability,
            timeline=source.Timeline(
                pending=sum(pending.values()), overdue=self._overdue(pending, now_ms), next_due_at_ms=next_due_ms
            ),
            lateness=source.Lateness(
                count=metrics.lateness.count,
                p50_ms=metrics.lateness.quantile(0.5) * 1000,
                p99_ms=metrics.lateness.quantile(0.99) * 1000,
                max_ms=metrics.lateness.max * 1000,
            ),
            totals=source.Totals(
                accepted=self.broker.sends.accepted_total,
                delivered=self.broker.handed_out_total,
                acked=self.broker.acked_total,
                expired=self.broker.leases.expired_total,
            ),
            commits=source.Commits(
                batches=stats.batches,
                ops=stats.ops,
                written_bytes=stats.bytes,
                commit_p99_ms=metrics.commit_seconds.quantile(0.99) * 1000,
                sync_p50_ms=metrics.sync_seconds.quantile(0.5) * 1000,
                sync_p99_ms=metrics.sync_seconds.quantile(0.99) * 1000,
            ),
            disk=source.Disk(
                free_bytes=disk.free_bytes, low_water_bytes=disk.low_water_bytes, refuses_sends=disk.is_low
            )
            if disk is not None
            else source.Disk(),
            outbox=self._outbox(),
            recovery=source.Recovery(
                was_clean=store.recovery.was_closed,
                cut_bytes=store.recovery.cut_bytes,
                open_ms=store.recovery.took_s * 1000,
                is_new=store.recovery.is_new,
            ),
            clock=clock_of(store),
        )

    def _outbox(self) -> source.Outbox:
        state = self.store.outbox_state
        known = source.Outbox(
            rows=state.next_sequence - state.first_sequence,
            held_bytes=state.stored_bytes,
            held_bytes_max=self.config.audit_outbox_bytes_max,
            lost_rows=state.lost,
        )
        if self.exporter is None:
            return known
        figures = self.exporter.figures
        return replace(
            known,
            trail=str(self.exporter.trail),
            exported_sequence=figures.exported_sequence,
            lag_ms=figures.oldest_waiting_ms,
            export_error=figures.error,
        )

    async def topics(self) -> Sequence[TopicStatus]:
        """Return every topic, by name."""
        return await asyncio.get_running_loop().run_in_executor(None, self._topics)

    def _topics(self) -> list[TopicStatus]:
        pending = self.store.pending()
        found = self._retry_topics(pending)
        for name, topic in sorted(self.broker.names.topics.copy().items()):
            waiting = pending.get(topic.topic_id, 0)
            ends = edges(self.store, topic.topic_id, topic.queues)
            own = zip(("time", "bytes", "unread"), topic.keep, strict=True)
            found.append(
                TopicStatus(
                    name=name,
                    queues=topic.queues,
                    stored=sum(each.end - each.begin for each in ends),
                    oldest_at_ms=min((each.oldest_ms for each in ends if each.oldest_ms), default=0),
                    keep=self.broker.retention.keep_of(topic),
                    keep_own=[what for what, said in own if said is not None],
                    pending=waiting,
                    due=self._due(topic.topic_id) if waiting else (),
                    type=topic.message_type.name if topic.message_type is not None else "MIXED",
                    created_at_ms=topic.created_at_ms,
                )
            )
        return sorted(found, key=lambda topic: topic.name)

    def _retry_topics(self, pending: dict[int, int]) -> list[TopicStatus]:
        """Return the retry topic of each group that failed something, its lanes as its queues."""
        lanes: dict[int, list[int]] = {}
        for (group_id, _), lane in self.broker.names.lanes.copy().items():
            lanes.setdefault(group_id, []).append(lane.topic_id)
        return [
            TopicStatus(
                name=retry_topic(self.broker.names.groups_by_id[group_id].name),
                queues=len(lane_ids),
                stored=sum(self.store.queue_end(each, 0) - self.store.queue_begin(each, 0) for each in lane_ids),
                pending=pending.get(group_id, 0),
                due=self._due(group_id) if pending.get(group_id) else (),
            )
            for group_id, lane_ids in lanes.items()
        ]

    def _due(self, scope: int) -> list[source.DueBucket]:
        found = self.store.due_counts(scope, 0, 2**53, limit=_DUE_BUCKETS_MAX)
        return [source.DueBucket(until_ms=bucket.until_ms, count=bucket.count) for bucket in found]

    def _overdue(self, pending: dict[int, int], now_ms: int) -> int:
        """Count what is due for a minute or more; buckets are whole minutes."""
        return sum(
            bucket.count
            for scope in pending
            for bucket in self.store.due_counts(scope, 0, now_ms)
            if bucket.until_ms <= now_ms
        )

    async def message(self, topic: str, message_id: str) -> MessageStatus:
        """Return where a message is."""
        return await asyncio.get_running_loop().run_in_executor(None, self._message, topic, message_id)

    def _message(self, topic_name: str, message_id: str) -> MessageStatus:
        topic = self.broker.names.topics.get(topic_name)
        found = self.store.find(topic.topic_id, pack_id(message_id)) if topic is not None else None
        if topic is None or found is None:
            return self._redriven(topic, message_id) if topic is not None else _UNKNOWN
        if found.state is EntryState.WAITING:
            (value,) = self.store.get_many(Family.TIMELINE, [pack_timeline_key(found.at_ms, found.sequence)])
            if value is None:  # handed over since
                return self._message(topic_name, message_id)
            entry = decode_waiting(value)
            return MessageStatus(
                state=MessageState.WAITING,
                deliver_at_ms=entry.deliver_at_ms,
                stored_at_ms=entry.accepted_at_ms,
                payload=body_payload(value[WAITING_HEADER_BYTES:]),
            )
        key = pack_queue_key(topic.topic_id, found.queue_id, found.queue_offset)
        (value,) = self.store.get_many(Family.QUEUE, [key])
        record = decode_queued(value) if value is not None else None
        return MessageStatus(
            state=MessageState.QUEUED,
            deliver_at_ms=record.deliver_at_ms if record is not None else 0,
            stored_at_ms=found.at_ms,
            queue_id=found.queue_id,
            queue_offset=found.queue_offset,
            payload=record.payload if record is not None else None,
        )

    def _redriven(self, topic: Topic, message_id: str) -> MessageStatus:
        """Return where a message is that was redriven to one group."""
        entry_id = redriven_id(pack_id(message_id), topic.topic_id)
        lanes = [(of[0], lane) for of, lane in list(self.broker.names.lanes.items()) if of[1] == topic.topic_id]
        for group_id, lane in lanes:
            found = self.store.find(group_id, entry_id)
            if found is None:
                continue
            (value,) = self.store.get_many(Family.QUEUE, [pack_queue_key(lane.topic_id, 0, found.queue_offset)])
            return MessageStatus(
                state=MessageState.QUEUED,
                stored_at_ms=found.at_ms,
                queue_offset=found.queue_offset,
                payload=decode_queued(value).payload if value is not None else None,
            )
        return _UNKNOWN

    async def count(self, topic: str) -> source.TopicCount:
        """Return where the queues of a topic begin and end."""
        known = self.broker.names.topics.get(topic)
        if known is None:
            raise topic_unknown(topic)
        queues = await asyncio.gather(*(self.broker.pulls.queue_range(topic, each) for each in range(known.queues)))
        pending = await asyncio.get_running_loop().run_in_executor(None, self.store.pending)
        return source.TopicCount(queues=queues, pending=pending.get(known.topic_id, 0))

    async def peek(self, topic: str, queue_id: int, offset: int, *, limit: int) -> Pulled:
        """Return messages of a queue as they lie there."""
        return await self.broker.pulls.pull(Subscription(topic, queue_id), offset, batch_max=limit, wait_ms=0)

    def remark(self) -> str:
        """Return what somebody who asks for the health should know beside it; empty: nothing."""
        clock = self.store.clock.status()
        if clock.is_held:
            return "clock: stepped forward by too much, not followed yet; see dmq clock"
        return "" if clock.is_steady else "clock: stepped, nothing is removed by age for now; see dmq clock"

    def watch(self) -> None:
        """Let the figures be read when somebody asks for the metrics."""
        store, metrics, broker = self.store, self.metrics, self.broker
        metrics.accepted.follow(lambda: broker.sends.accepted_total)
        metrics.repeated.follow(lambda: broker.sends.repeated_total)
        metrics.refused.follow(lambda: broker.sends.refused_total)
        metrics.delivered.follow(lambda: broker.handed_out_total)
        metrics.pulled.follow(lambda: broker.pulls.pulled_total)
        metrics.acked.follow(lambda: broker.acked_total)
        metrics.expired.follow(lambda: broker.leases.expired_total)
        metrics.removed.follow(lambda: broker.retention.total.messages)
        metrics.removed_unread.follow(lambda: broker.retention.total.unread)
        metrics.removed_bytes.follow(lambda: broker.retention.total.size_bytes)
        metrics.oldest.follow(lambda: broker.retention.oldest_ms)
        metrics.held_queues.set_function(lambda: broker.retention.held_queues)
        metrics.retried.follow(lambda: broker.failures.retried_total)
        metrics.dead.follow(lambda: broker.failures.dead_total)
        metrics.redriven.follow(lambda: broker.dead_letters.redriven_total)
        metrics.purged.follow(lambda: broker.dead_letters.purged_total)
        metrics.pending.set_function(lambda: sum(store.pending().values()))
        metrics.next_due.set_function(lambda: (store.next_due_ms() or 0) / 1000)
        metrics.overdue.set_function(lambda: self._overdue(store.pending(), store.clock.now_ms()))
        metrics.clock_steps.follow(lambda: store.clock.status().steps)
        metrics.clock_steady.set_function(store.clock.is_steady)
        metrics.clock_offset.set_function(lambda: _held_ms(store) / 1000)
        metrics.commit_queue.set_function(lambda: store.writer.pending_ops)
        metrics.leases.set_function(lambda: broker.lease_count)
        metrics.outbox_bytes.set_function(lambda: store.outbox_state.stored_bytes)
        exporter = self.exporter
        if exporter is not None:
            metrics.exported.follow(lambda: exporter.exported_total)
            metrics.export_failures.follow(lambda: exporter.failures_total)
            metrics.export_lag.set_function(lambda: exporter.lag_ms() / 1000)
            metrics.export_stopped.set_function(lambda: bool(exporter.figures.error))
        metrics.recovery_cut_bytes.set(store.recovery.cut_bytes)
        metrics.open_seconds.set(store.recovery.took_s)

        def free_bytes() -> float:
            disk = store.disk()
            return disk.free_bytes if disk is not None else 0

        metrics.disk_free_bytes.set_function(free_bytes)
        metrics.disk_low_water_bytes.set_function(lambda: disk.low_water_bytes if (disk := store.disk()) else 0)


def _held_ms(store: Store) -> int:
    """Return by how much the believed time is behind the host's clock."""
    clock = store.clock.status()
    return clock.wall_ms - clock.believed_ms
