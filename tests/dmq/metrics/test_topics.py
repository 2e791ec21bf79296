"""Metrics by topic: they add up to the totals, and their number is bounded."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from support.clients.embedded.failing import change, pushed, pushed_one
from support.forges.messages.letters import a_message
from support.rigs.broker.rig import GROUP, EmbeddedRig, every_durable_broker, receive

from broker_adapter.contracts.topics import retry_topic
from dmq.daemon.telemetry.gauges import follow, observer
from dmq.metrics.counting import OTHERS, TopicCounts
from dmq.metrics.registry import Metrics
from dmq.metrics.topics import TopicFigures

ALL = ("messages_accepted_total", "messages_delivered_total", "messages_dead_total", "lateness_seconds_sum")


def series(registry: CollectorRegistry, name: str) -> dict[str, float]:
    """The samples of a metric, by topic."""
    text = generate_latest(registry).decode()
    return {
        sample.labels["messaging_destination_name"]: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name
    }


def test_later_topics_share_a_count() -> None:
    """A known topic keeps its own, and no count ever falls."""
    counts = TopicCounts(2)
    for topic in ("a", "b", "c", "a", "d", "c"):
        counts.add(topic)
    counts.add("d", 10)
    assert counts.read() == {"a": 2, "b": 1, OTHERS: 13}
    assert counts.total == 16


def test_later_topics_share_a_histogram() -> None:
    """A batch may have messages of several topics, in any order."""
    figures = TopicFigures(lateness_topics_max=1)
    registry = CollectorRegistry()
    registry.register(figures)
    figures.became_visible([1], ["a"])
    figures.became_visible([5, 2_000, 7, 3_000], ["b", "a", "c", "b"])
    assert series(registry, "dmq_topic_lateness_seconds_count") == {"a": 2, OTHERS: 3}
    assert series(registry, "dmq_topic_lateness_seconds_sum") == {"a": 2.001, OTHERS: 3.012}


@every_durable_broker(queues=1)
async def test_figures_of_topics_add_up(rig: EmbeddedRig) -> None:
    """Of sends one by one, together, repeated and delayed; of deliveries, dead letters, lateness and retries."""
    metrics = Metrics(process=False)
    follow(metrics, rig.store, rig.broker, None)
    rig.scheduler._observe = observer(metrics, rig.broker.names)
    send = rig.broker.send
    await send([a_message("a-1", topic="a")])
    await send([a_message("a-1", topic="a")])
    await send([a_message("a-2", topic="a"), a_message("b-1", topic="b"), a_message("a-1", topic="a")])
    await send([a_message("b-2", topic="b", deliver_at_ms=rig.clock.now_ms() + 1_000)])
    await rig.pass_ms(1_500)
    await rig.set_group(GROUP, max_attempts=3, delays_ms=(1_000,))
    assert len(await receive(rig, topic="a")) == 2
    first, second = await pushed(rig, topic="b")
    await change(rig, first)
    await rig.pass_ms(1_250)
    again = await pushed_one(rig, topic="b")
    await rig.broker.send_back(GROUP, "b", again.receipt_handle, -1)
    await change(rig, second)
    (waiting,) = (await rig.broker.retries.page(GROUP, topic="", token="", limit=9)).retries
    await rig.broker.retries.end(GROUP, [waiting.entry])
    found = {name: series(metrics.registry, f"dmq_topic_{name}") for name in ALL}
    assert found == {
        "messages_accepted_total": {"a": 2, "b": 2},
        "messages_delivered_total": {"a": 2, "b": 3},
        "messages_dead_total": {"b": 2},
        "lateness_seconds_sum": {"b": 0.5, retry_topic(GROUP): 0.25},
    }
    assert (rig.broker.sends.accepted_total, rig.broker.deliveries.handed_out_total) == (4, 5)
    assert rig.broker.outcomes.dead_total == 2
