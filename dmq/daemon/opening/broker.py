"""Opening of the broker by the configuration: standalone, or for topics kept here in front of a cluster."""

from __future__ import annotations

from contextlib import AsyncExitStack
from datetime import timedelta

from dmq.broker import EmbeddedBroker
from dmq.broker.topics import AutoCreate, ScheduleLimits
from dmq.broker.transactions import CheckOptions
from dmq.cluster import MovedTopics
from dmq.config.settings import DaemonConfig
from dmq.config.units import ALL_TOPICS
from dmq.daemon.opening.store import OpenStore
from dmq.store import Store
from dmq.store.schema.topics.names import Keep, TopicQuotas
from dmq.store.writer.operations import Emit
from dmq.tracing import EmitSpan
from dmq.trail.events import cell_event

FORWARDED_KEPT = timedelta(minutes=10)  # messages of the cluster are not needed here; kept long enough for inspection


async def open_broker(
    config: DaemonConfig, opened: OpenStore, stack: AsyncExitStack, emit_span: EmitSpan | None = None
) -> EmbeddedBroker:
    """Open the broker on the event loop that will use it: the first events of this run are durable on return."""
    store = opened.store
    broker = _broker(config, store, emit_span)
    stack.push_async_callback(broker.close)
    await store.commit_async([Emit(cell_event(each)) for each in opened.events()])
    await MovedTopics(broker).settle()
    return broker


def _broker(config: DaemonConfig, store: Store, emit_span: EmitSpan | None) -> EmbeddedBroker:
    return EmbeddedBroker(
        store,
        queues_per_topic=config.queues_per_topic,
        group_start=config.group_start,
        delay_levels_ms=config.delay_levels_ms,
        checks=CheckOptions(
            first_after_ms=config.transaction_timeout_ms,
            every_ms=config.transaction_check_interval_ms,
            checks_max=config.transaction_checks_max,
            max_age_ms=config.transaction_max_age_ms,
        ),
        # In front of a cluster the first stored message creates a topic here; the cluster decides which topics exist.
        auto_create=AutoCreate(True, True)
        if config.broker != "embedded"
        else AutoCreate(config.topic_auto_create, config.group_auto_create),
        keep=_keep(config, config.keep_time),
        keep_forwarded=_keep(config, config.keep_time if "keep_time" in config.model_fields_set else FORWARDED_KEPT),
        stay=config.embedded_topics if config.broker != "embedded" else ALL_TOPICS,
        schedules=ScheduleLimits(total=config.schedules_max, per_topic=config.schedules_per_topic_max),
        delay_max_ms=config.delay_max_ms,
        failure_reasons=config.failure_reasons == "on",
        quotas=TopicQuotas(config.topic_max_pending, config.topic_max_pending_bytes, config.topic_send_rate),
        emit_span=emit_span,
    )


def _keep(config: DaemonConfig, keep_time: timedelta | None) -> Keep:
    time_ms = keep_time // timedelta(milliseconds=1) if keep_time is not None else 0
    return Keep(time_ms, config.keep_bytes or 0, config.keep_unread)
