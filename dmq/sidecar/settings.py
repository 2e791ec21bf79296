"""The sidecar's own settings, and what it tells clients theirs are."""

from __future__ import annotations

from dataclasses import dataclass

from broker_adapter.errors import Refused, Rule
from broker_adapter.limits import BODY_BYTES_MAX, POLLING_MS_MAX, RECEIVE_BATCH_MAX
from broker_adapter.wire import rocketmq_v2 as wire
from dmq.sidecar.delay import DELAY_LEVELS_MS_DEFAULT

# RocketMQ's levels 3 to 18: 10s 30s 1m..10m 20m 30m 1h 2h. Clients index this table from their first failure, so that
# starting it at level 1, as the real server does, makes their first retry come after 1 s instead of 10 s.
RETRY_STEPS_MS_DEFAULT = DELAY_LEVELS_MS_DEFAULT[2:]

CONSUMERS = frozenset({wire.PUSH_CONSUMER, wire.SIMPLE_CONSUMER})
CLIENT_TYPES = CONSUMERS | {wire.PRODUCER}


@dataclass(frozen=True, slots=True, kw_only=True)
class SidecarConfig:
    """What can be set. Durations in ms; ``delay_max_ms`` ``None`` means any delay up to the year 9999."""

    delay_levels_ms: tuple[int, ...] = DELAY_LEVELS_MS_DEFAULT
    delay_max_ms: int | None = None
    retry_steps_ms: tuple[int, ...] = RETRY_STEPS_MS_DEFAULT
    broker_name: str = "rock-dmq"
    sends_in_flight_max: int = 4096
    receives_waiting_max: int = 10_000
    streams_max: int = 10_000
    sessions_max: int = 20_000

    def __post_init__(self) -> None:
        assert self.delay_levels_ms and self.retry_steps_ms, "a table of durations is empty"
        assert all(step_ms >= 0 for step_ms in self.delay_levels_ms + self.retry_steps_ms), "a duration is negative"


def client_type_of(settings: wire.Settings) -> wire.ClientType:
    """Return the served client type that ``settings`` speak for; raise ``Refused(CLIENT_TYPE)`` for any other.

    A client that leaves its type out is taken for what it publishes or subscribes.
    """
    kind = settings.WhichOneof("pub_sub")
    if kind is None:
        raise Refused(Rule.REQUEST, "settings neither publish nor subscribe")
    if not settings.HasField("client_type"):
        return wire.PRODUCER if kind == "publishing" else wire.PUSH_CONSUMER
    return check_client_type(settings.client_type)


def check_client_type(client_type: wire.ClientType) -> wire.ClientType:
    """Return ``client_type`` if it is served."""
    if client_type not in CLIENT_TYPES:
        why = "producers, push consumers and simple consumers are served"
        raise Refused(Rule.CLIENT_TYPE, why, value=int(client_type))
    return client_type


def merged(wanted: wire.Settings, config: SidecarConfig) -> wire.Settings:
    """Return a client's settings with the server's rules in place of its wishes."""
    settings = wire.Settings()
    settings.CopyFrom(wanted)
    settings.metric.Clear()
    settings.metric.on = False
    policy = settings.backoff_policy
    policy.Clear()
    if settings.WhichOneof("pub_sub") == "publishing":
        settings.publishing.max_body_size = BODY_BYTES_MAX
        settings.publishing.validate_message_type = True
        policy.max_attempts = 3
        policy.exponential_backoff.initial.nanos = 10_000_000
        policy.exponential_backoff.max.seconds = 1
        policy.exponential_backoff.multiplier = 2
        return settings
    subscription = settings.subscription
    subscription.fifo = False
    subscription.receive_batch_size = RECEIVE_BATCH_MAX
    subscription.long_polling_timeout.Clear()
    subscription.long_polling_timeout.seconds = POLLING_MS_MAX // 1000
    policy.max_attempts = len(config.retry_steps_ms) + 1
    for step_ms in config.retry_steps_ms:
        seconds, ms = divmod(step_ms, 1000)
        policy.customized_backoff.next.add(seconds=seconds, nanos=ms * 1_000_000)
    return settings
