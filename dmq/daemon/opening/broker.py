"""Construction of the broker from the configuration: standalone, or for topics kept here in front of a cluster."""

from __future__ import annotations

from datetime import timedelta

from dmq.broker import EmbeddedBroker
from dmq.broker.topics import AutoCreate, ScheduleLimits
from dmq.broker.transactions import CheckOptions
from dmq.config.settings import DaemonConfig
from dmq.config.units import ALL_TOPICS
from dmq.store import Store
from dmq.store.schema.topics.names import Keep, TopicQuotas
from dmq.tracing import EmitSpan

FORWARDED_KEPT = timedelta(minutes=10)  # messages of the cluster are not needed here; kept long enough for inspection


def broker_of(config: DaemonConfig, store: Store, emit_span: EmitSpan | None = None) -> EmbeddedBroker:
    """Return the broker on ``store``. Call it on the event loop that will use the broker."""
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
