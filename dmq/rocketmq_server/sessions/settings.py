"""Configuration of the RocketMQ server, and the settings that it sends to clients."""

from __future__ import annotations

from dataclasses import dataclass

from broker_adapter.contracts.adapter import GroupSettings
from broker_adapter.contracts.errors import Refused, Rule
from broker_adapter.contracts.limits import BODY_BYTES_MAX, POLLING_MS_MAX, RECEIVE_BATCH_MAX
from broker_adapter.wire import rocketmq_v2 as wire
from broker_adapter.wire.mapping import set_duration
from dmq.rocketmq_server.codec.delay import DELAY_LEVELS_MS_DEFAULT
from dmq.rocketmq_server.sessions.sessions import ClientSession

CONSUMERS = frozenset({wire.PUSH_CONSUMER, wire.SIMPLE_CONSUMER, wire.PULL_CONSUMER})
CLIENT_TYPES = CONSUMERS | {wire.PRODUCER}


@dataclass(frozen=True, slots=True, kw_only=True)
class SidecarConfig:
    """Configuration of the server. Durations in ms; ``delay_max_ms`` ``None`` allows any delay up to the year 9999."""

    delay_levels_ms: tuple[int, ...] = DELAY_LEVELS_MS_DEFAULT
    delay_max_ms: int | None = None
    broker_name: str = "rock-dmq"
    sends_in_flight_max: int = 4096  # less than half a second of work: messages wait here past their delivery time
    sends_busy: int = 512  # heavy senders wait above this: a larger batch is no faster and only delays its deliveries
    receives_waiting_max: int = 10_000
    receives_per_client_max: int = 1024
    streams_max: int = 10_000
    streams_per_client_max: int = 16
    streams_per_connection_max: int = 1024  # a proxy has many clients on one connection
    sessions_max: int = 20_000

    def __post_init__(self) -> None:
        assert self.delay_levels_ms, "a table of durations is empty"
        assert all(level_ms >= 0 for level_ms in self.delay_levels_ms), "a duration is negative"


def client_type_of(settings: wire.Settings) -> wire.ClientType:
    """Return the client type in ``settings``; raise ``Refused(CLIENT_TYPE)`` for one that is not served.

    If the type is missing, a publishing client is a producer and a subscribing client is a push consumer.
    """
    kind = settings.WhichOneof("pub_sub")
    if kind is None:
        raise Refused(Rule.REQUEST, "settings neither publish nor subscribe")
    if not settings.HasField("client_type"):
        return wire.PRODUCER if kind == "publishing" else wire.PUSH_CONSUMER
    return check_client_type(settings.client_type)


def check_client_type(client_type: wire.ClientType) -> wire.ClientType:
    """Return ``client_type`` if it is served, else raise ``Refused(CLIENT_TYPE)``."""
    if client_type not in CLIENT_TYPES:
        why = "producers, pull, push and simple consumers are served"
        raise Refused(Rule.CLIENT_TYPE, why, value=int(client_type))
    return client_type


def client_type_of_heartbeat(told: wire.ClientType, session: ClientSession | None) -> wire.ClientType | None:
    """Return the client type of a heartbeat's sender; ``None`` if it is unknown.

    As in RocketMQ, the settings of the telemetry stream determine the type, not the heartbeat. Without a stream, as
    after a restart, RocketMQ refuses the heartbeat. This server then uses the type in the heartbeat, and else the last
    known type of the client.
    """
    if session is not None and session.outbox is not None:
        return session.client_type
    if told != wire.CLIENT_TYPE_UNSPECIFIED:
        return check_client_type(told)
    return session.client_type if session is not None else None


def merged(wanted: wire.Settings, group: GroupSettings, language: str) -> wire.Settings:
    """Return a client's settings with the server's values in place of the requested ones.

    ``group`` has the settings of a consumer's group and is ignored for a producer. ``language`` is the language that
    the client reports.
    """
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
    subscription.fifo = group.is_fifo
    subscription.receive_batch_size = RECEIVE_BATCH_MAX
    subscription.long_polling_timeout.Clear()
    subscription.long_polling_timeout.seconds = POLLING_MS_MAX // 1000
    if group.is_fifo:
        _tell_fifo_backoff(policy, group, language)
    else:
        # Clients index the table from their first failure. Node cannot read it and requests 0 s: the broker ignores it.
        policy.max_attempts = group.max_attempts
        _tell_table(policy, group)
    return settings


def _tell_fifo_backoff(policy: wire.RetryPolicy, group: GroupSettings, language: str) -> None:
    """Set one attempt for push consumers of a FIFO group, so that the broker retries and not the client.

    With the real maximum, clients would retry in their own memory. Such retries do not survive a crash and are not
    visible. Python and Node wait wrong times, and Python counts every local attempt as the first.

    With 1, all of them forward the message to the dead-letter queue after one attempt, at each delivery. Java, Go, Node
    and C# do so when its attempt is not below 1, and Rust when it is above. Python does so when its own count from 1
    reaches it. Below the group's maximum the broker ignores the request. It redelivers the message durably by the retry
    policy, with the next attempt. Only C++ retries in memory for ever, regardless of the setting.

    A broker that ``believes_clients`` would create a dead letter after that one attempt. Its consumers get the real
    maximum and retry in memory, as they do without this daemon.

    The delays are then never used, but the client must be able to read the strategy. Node supports exponential ones
    only. Python does not support them and would substitute its own policy: 17 attempts, 1 s apart.
    """
    policy.max_attempts = group.max_attempts if group.believes_clients else 1
    if language == "PYTHON":
        _tell_table(policy, group)
        return
    backoff = policy.exponential_backoff
    set_duration(backoff.initial, group.delays_ms[0])
    set_duration(backoff.max, max(group.delays_ms[0], group.delays_ms[-1]))
    backoff.multiplier = 2


def _tell_table(policy: wire.RetryPolicy, group: GroupSettings) -> None:
    for delay_ms in group.delays_ms:
        set_duration(policy.customized_backoff.next.add(), delay_ms)
