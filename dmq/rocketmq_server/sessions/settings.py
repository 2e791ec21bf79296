"""The sidecar's own settings, and what it tells clients theirs are."""

from __future__ import annotations

from dataclasses import dataclass

from broker_adapter.contracts.adapter import GroupSettings
from broker_adapter.contracts.errors import Refused, Rule
from broker_adapter.contracts.limits import BODY_BYTES_MAX, POLLING_MS_MAX, RECEIVE_BATCH_MAX
from broker_adapter.wire import rocketmq_v2 as wire
from broker_adapter.wire.mapping import set_duration
from dmq.rocketmq_server.codec.delay import DELAY_LEVELS_MS_DEFAULT
from dmq.rocketmq_server.sessions.sessions import Session

CONSUMERS = frozenset({wire.PUSH_CONSUMER, wire.SIMPLE_CONSUMER, wire.PULL_CONSUMER})
CLIENT_TYPES = CONSUMERS | {wire.PRODUCER}


@dataclass(frozen=True, slots=True, kw_only=True)
class SidecarConfig:
    """What can be set. Durations in ms; ``delay_max_ms`` ``None`` means any delay up to the year 9999."""

    delay_levels_ms: tuple[int, ...] = DELAY_LEVELS_MS_DEFAULT
    delay_max_ms: int | None = None
    broker_name: str = "rock-dmq"
    sends_in_flight_max: int = 4096  # less than half a second of work: messages wait here past their delivery time
    sends_busy: int = 512  # from here on who sends much waits: a larger batch is no faster, only its deliveries later
    receives_waiting_max: int = 10_000
    receives_per_client_max: int = 1024
    streams_max: int = 10_000
    streams_per_client_max: int = 16
    streams_per_connection_max: int = 1024  # a proxy in between has many clients on one
    sessions_max: int = 20_000

    def __post_init__(self) -> None:
        assert self.delay_levels_ms, "a table of durations is empty"
        assert all(level_ms >= 0 for level_ms in self.delay_levels_ms), "a duration is negative"


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
        why = "producers, pull, push and simple consumers are served"
        raise Refused(Rule.CLIENT_TYPE, why, value=int(client_type))
    return client_type


def client_type_of_heartbeat(told: wire.ClientType, session: Session | None) -> wire.ClientType | None:
    """Return what the client of a heartbeat is; ``None`` if neither it nor anything before it tells.

    As in RocketMQ the settings of its telemetry stream count, not the heartbeat. Without a stream, as after a restart,
    RocketMQ refuses the heartbeat; here it is asked then, and after that what the client was when it was seen last.
    """
    if session is not None and session.outbox is not None:
        return session.client_type
    if told != wire.CLIENT_TYPE_UNSPECIFIED:
        return check_client_type(told)
    return session.client_type if session is not None else None


def merged(wanted: wire.Settings, group: GroupSettings, language: str) -> wire.Settings:
    """Return a client's settings with the server's rules in place of its wishes.

    ``group`` is how a consumer's group is served, of no account for a producer; ``language`` is what the client says.
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
        # Clients index the table from their first failure. Node cannot read it and asks for 0 s; the broker does not
        # believe that.
        policy.max_attempts = group.max_attempts
        _tell_table(policy, group)
    return settings


def _tell_fifo_backoff(policy: wire.RetryPolicy, group: GroupSettings, language: str) -> None:
    """Tell push consumers of a FIFO group to give up at their first failure, so that the broker retries and not they.

    Told the true maximum they would retry in their own memory: nothing of it survives their end, none of it is seen,
    Python and Node wait wrong times, and Python counts every local try as the first. Told 1, all of them forward the
    message to the dead-letter queue after one try, each time it is delivered (Java, Go, Node and C# when its attempt is
    not below 1, Rust when it is above, Python when its own count from 1 reaches it). The broker does not believe that
    below the group's maximum: the message comes back by the policy, durably, with the next attempt. Only C++ retries in
    its memory for ever, whatever it is told.

    A broker that ``believes_clients`` would have a dead letter after that one try: with it they are told the true
    maximum, and retry in their memory, as they do without us.

    The delays are then never used, but the strategy must be one that the client can read: Node knows exponential ones
    only. Python, which does not, would put a policy of its own in their place: 17 tries, 1 s apart.
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
