"""What clients are told: every value they need to start and to retry sensibly."""

from __future__ import annotations

import pytest

from broker_adapter.contracts.adapter import GroupSettings
from broker_adapter.contracts.errors import Refused, Rule
from broker_adapter.contracts.limits import BODY_BYTES_MAX, RETRY_STEPS_MS
from broker_adapter.wire import rocketmq_v2 as wire
from dmq.rocketmq_server.sessions.settings import SidecarConfig, client_type_of, merged

HOUR_S = 3600
DEFAULT = GroupSettings(is_fifo=False, max_attempts=17, delays_ms=RETRY_STEPS_MS)
LANGUAGES = ["JAVA", "GO", "PYTHON", "HTTP", "RUST", "CPP", "DOTNET", ""]


def consumer(client_type: wire.ClientType = wire.PUSH_CONSUMER) -> wire.Settings:
    settings = wire.Settings(client_type=client_type, subscription=wire.Subscription(group=wire.Resource(name="g")))
    settings.subscription.subscriptions.add(topic=wire.Resource(name="t"))
    return settings


def test_a_producer_gets_the_results_that_clients_assert() -> None:
    """Exponential backoff (Node asserts it), a body size above 0 (Java, Python, Go), and no metrics."""
    wanted = wire.Settings(client_type=wire.PRODUCER, metric=wire.Metric(on=True))
    wanted.publishing.topics.add(name="t")
    settings = merged(wanted, DEFAULT, "JAVA")
    assert settings.publishing.max_body_size == BODY_BYTES_MAX
    assert settings.publishing.validate_message_type
    assert [topic.name for topic in settings.publishing.topics] == ["t"]
    backoff = settings.backoff_policy.exponential_backoff
    assert settings.backoff_policy.max_attempts == 3
    assert (backoff.initial.nanos, backoff.max.seconds, backoff.multiplier) == (10_000_000, 1, 2)
    assert settings.HasField("metric")
    assert not settings.metric.on


@pytest.mark.parametrize("language", LANGUAGES)
def test_a_consumers_first_retry_comes_after_10_seconds(language: str) -> None:
    """Clients index the table with attempt - 1, so it starts at level 3; 16 retries make 17 attempts."""
    settings = merged(consumer(), DEFAULT, language)
    steps = [step.seconds for step in settings.backoff_policy.customized_backoff.next]
    assert steps == [10, 30, *range(60, 601, 60), 1200, 1800, HOUR_S, 2 * HOUR_S]
    assert settings.backoff_policy.max_attempts == 17 == len(steps) + 1
    assert settings.subscription.receive_batch_size == 32
    assert settings.subscription.long_polling_timeout.seconds == 20
    assert settings.subscription.HasField("fifo")
    assert not settings.subscription.fifo
    assert settings.subscription.group.name == "g"


def test_a_consumer_learns_the_policy_of_its_group() -> None:
    """Its maximum and its delays, to the millisecond; not a default, and not what the table's length suggests."""
    settings = merged(consumer(), GroupSettings(False, 5, (1500, 0)), "GO")
    policy = settings.backoff_policy
    assert [(step.seconds, step.nanos) for step in policy.customized_backoff.next] == [(1, 500_000_000), (0, 0)]
    assert policy.max_attempts == 5


@pytest.mark.parametrize("language", [each for each in LANGUAGES if each != "PYTHON"])
def test_a_consumer_of_a_fifo_group_gives_up_at_once(language: str) -> None:
    """One attempt, so that it never retries in its memory, with a strategy that Node can read too."""
    settings = merged(consumer(), GroupSettings(True, 5, (1500, 9000, 60_000)), language)
    policy = settings.backoff_policy
    assert settings.subscription.fifo
    assert policy.max_attempts == 1
    assert policy.WhichOneof("strategy") == "exponential_backoff"
    backoff = policy.exponential_backoff
    assert (backoff.initial.seconds, backoff.initial.nanos) == (1, 500_000_000)
    assert (backoff.max.seconds, backoff.multiplier) == (60, 2)


@pytest.mark.parametrize("language", LANGUAGES)
def test_a_consumer_gives_up_late_where_it_is_believed(language: str) -> None:
    """In a FIFO group of a cluster, which makes a dead letter of whatever a client gives up."""
    settings = merged(consumer(), GroupSettings(True, 5, (1500, 9000), believes_clients=True), language)
    assert (settings.subscription.fifo, settings.backoff_policy.max_attempts) == (True, 5)


def test_a_maximum_is_never_below_the_first_delay() -> None:
    """A policy may begin with a long delay; an exponential backoff cannot say so."""
    backoff = merged(consumer(), GroupSettings(True, 3, (9000, 1000)), "JAVA").backoff_policy.exponential_backoff
    assert (backoff.initial.seconds, backoff.max.seconds) == (9, 9)


def test_python_in_a_fifo_group_gets_a_table() -> None:
    """It ignores an exponential backoff, the maximum with it, and would try 17 times in its memory."""
    settings = merged(consumer(), GroupSettings(True, 5, (1500, 9000)), "PYTHON")
    policy = settings.backoff_policy
    assert (settings.subscription.fifo, policy.max_attempts) == (True, 1)
    assert [step.seconds for step in policy.customized_backoff.next] == [1, 9]


def test_the_clients_frame_is_not_changed() -> None:
    """Merging makes a copy."""
    wanted = consumer()
    before = wanted.SerializeToString(deterministic=True)
    merged(wanted, DEFAULT, "JAVA")
    assert wanted.SerializeToString(deterministic=True) == before


def test_wishes_of_the_client_give_way() -> None:
    """A policy of its own does not survive, nor does a longer poll."""
    wanted = consumer()
    wanted.backoff_policy.exponential_backoff.initial.seconds = 5
    wanted.subscription.long_polling_timeout.seconds = 40
    settings = merged(wanted, GroupSettings(False, 2, (1500,)), "JAVA")
    assert settings.backoff_policy.WhichOneof("strategy") == "customized_backoff"
    only = settings.backoff_policy.customized_backoff.next[0]
    assert (only.seconds, only.nanos) == (1, 500_000_000)
    assert settings.subscription.long_polling_timeout.seconds == 20


@pytest.mark.parametrize("client_type", [wire.LITE_PUSH_CONSUMER, wire.LITE_SIMPLE_CONSUMER, 99, 0])
def test_other_client_types_are_refused(client_type: wire.ClientType) -> None:
    """Lite consumers are not served, and the text says who is."""
    with pytest.raises(Refused, match="simple consumers are served") as caught:
        client_type_of(consumer(client_type))
    assert caught.value.rule is Rule.CLIENT_TYPE


def test_settings_without_a_side_are_refused_and_without_a_type_understood() -> None:
    """The side is what counts."""
    with pytest.raises(Refused, match="neither publish nor subscribe"):
        client_type_of(wire.Settings(client_type=wire.PRODUCER))
    assert client_type_of(wire.Settings(publishing=wire.Publishing())) == wire.PRODUCER
    assert client_type_of(wire.Settings(subscription=wire.Subscription())) == wire.PUSH_CONSUMER


def test_tables_hold_something() -> None:
    """An empty one is a bug of whoever wires the daemon."""
    with pytest.raises(AssertionError):
        SidecarConfig(delay_levels_ms=())
    with pytest.raises(AssertionError):
        SidecarConfig(delay_levels_ms=(-1,))
