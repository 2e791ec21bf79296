"""What every official client must see, whatever stands behind the daemon.

Tests that a module with the fixtures ``process`` and ``topic`` takes by their names: ``test_clients`` has them in
front of the embedded broker, ``test_clients_on_rocketmq`` in front of Apache RocketMQ. ``KINDS`` are the clients that a
topic of theirs has. Redelivery takes 10 s by the protocol: the module calls ``begin_slow`` before the first of these.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from support.clients.official.client import ANSWER_S_MAX, RUST, ClientError, Language, OfficialClient, having
from support.clients.official.client_bench import BY_PROPERTY, Bench

from broker_adapter.contracts.limits import BODY_BYTES_MAX

KINDS: tuple[str, ...] = ("producer", "simple")
LEVELS_MS = tuple(range(100, 1900, 100))  # 18 of them, which the daemon is told


class Slow(NamedTuple):
    """What came of the scenarios that take 10 s."""

    expired: Future[tuple[int, list[dict[str, Any]]]]  # when it was sent, in ms, and what came
    failed: Future[list[dict[str, Any]]]
    orphaned: Future[Orphaned]


class Orphaned(NamedTuple):
    """What one of two consumers left behind when it was killed, and what the other one got."""

    sent: list[str]
    taken: list[dict[str, Any]]
    received: list[dict[str, Any]]


def begin_slow(bench: Bench, languages: Sequence[Language], pool: ThreadPoolExecutor) -> dict[str, Slow]:
    """Let a lease expire, a listener fail and a consumer die, by language, with topics and groups of their own."""
    started: dict[str, Slow] = {}
    for language in languages:
        process = bench.process(language)
        started[language.name] = Slow(
            pool.submit(let_expire, process),
            pool.submit(let_fail, process),  # comes to nothing without push consumers, and has no test then
            pool.submit(let_die, process),
        )
    return started


def slow_names(language: Language) -> tuple[dict[str, str], str]:
    """Return the topics of ``begin_slow`` with their groups, for a broker that makes none, and one more topic."""
    groups = {"expiring": "expiring", "failing": "failing", "orphaned": "orphaned", "shared": "shared"}
    return {f"{topic}-{language.name}": group for topic, group in groups.items()}, f"full-{language.name}"


def let_expire(process: OfficialClient) -> tuple[int, list[dict[str, Any]]]:
    """Return when a message was sent, in ms, and how it came to a consumer that never acknowledges."""
    topic = f"expiring-{process.language.name}"
    process.start("expiring-p", "producer", topic)
    process.start("expiring-c", "simple", topic, group="expiring")
    sent_ms = time.time_ns() // 1_000_000
    process.send("expiring-p", topic, body="left alone")
    return sent_ms, process.receive_until("expiring-c", 2, acks=False, invisible_s=10)


def let_fail(process: OfficialClient) -> list[dict[str, Any]]:
    """Return how a message came to a push consumer that fails once."""
    topic = f"failing-{process.language.name}"
    process.start("failing-p", "producer", topic)
    process.start("failing-c", "push", topic, group="failing")
    process.send("failing-p", topic, body="fail 1 time")
    return process.wait_for_deliveries("failing-c", 2)


def let_die(process: OfficialClient, *, within_s: float = 15.0) -> Orphaned:
    """Kill one of two consumers; ``within_s`` is how long the other one may wait for what is sent then."""
    with tempfile.TemporaryDirectory() as home:
        doomed = OfficialClient(process.language, Path(home), process.address)
        try:
            return _orphan(process, doomed, within_s)
        finally:
            doomed.close()


def _orphan(process: OfficialClient, doomed: OfficialClient, within_s: float) -> Orphaned:
    topic, shared = f"orphaned-{process.language.name}", f"shared-{process.language.name}"
    process.start("orphaned-p", "producer", topic)
    process.start("shared-c", process.language.listener, shared, group="shared")
    doomed.start("doomed-s", "simple", topic, group="orphaned")
    doomed.start("doomed-c", process.language.listener, shared, group="shared")
    sent = [process.send("orphaned-p", topic) for _ in range(3)]
    taken = doomed.receive_until("doomed-s", 3, acks=False, invisible_s=10)
    while not doomed.wait_for_deliveries("doomed-c", 1, within_s=0.2):
        process.send("orphaned-p", shared)
    doomed.close()
    wanted = {process.send("orphaned-p", shared) for _ in range(10)}
    found = process.deliveries("shared-c")
    while not wanted <= {each["message_id"] for each in found}:
        before = len(found)
        found = process.wait_for_deliveries("shared-c", before + 1, within_s=within_s)
        assert len(found) > before, "the consumer that lives was not given what was sent after the other one's end"
    process.start("orphaned-s", "simple", topic, group="orphaned")
    return Orphaned(sent, taken, process.receive_until("orphaned-s", 3))


# -- sending and receiving --------------------------------------------------------------------------------------------


def test_everything_a_message_carries_arrives(process: OfficialClient, topic: str) -> None:
    """Body, tag, key, properties and id come back as they were sent, whole, on the first attempt."""
    lacks = process.language.lacks
    properties = {} if "properties" in lacks else {"colour": "blau", "x": "1 2"}
    keys = [] if "keys" in lacks else ["order-7"]
    message_id = process.send(f"p-{topic}", topic, body="héllo ☂", tag="blue", key="order-7", properties=properties)
    (found,) = process.receive_until(f"c-{topic}", 1)
    assert found["message_id"] == message_id
    assert (found["topic"], found["body"], found["tag"], found["keys"]) == (topic, "héllo ☂", "blue", keys)
    assert found["properties"] == properties
    assert (found["attempt"], found["is_corrupted"]) == (1, "digest" in lacks)


def test_offsets_and_ids_are_those_of_each_message(process: OfficialClient, topic: str) -> None:
    """A hundred sends get a hundred ids, and every one of them arrives once."""
    sent = [process.begin("send", name=f"p-{topic}", topic=topic, body=f"{number}") for number in range(100)]
    ids = [answer.result(10)["message_id"] for answer in sent]
    found = process.receive_until(f"c-{topic}", 100, invisible_s=60, within_s=60)
    assert len(set(ids)) == 100
    assert sorted(each["message_id"] for each in found) == sorted(ids)


def test_tag_filter(process: OfficialClient, topic: str) -> None:
    """A consumer of two tags sees these only, and what it does not want does not block it."""
    process.start(f"tags-{topic}", "simple", topic, group=f"tags-{topic}", tags="red || green")
    for tag in ("red", "blue", "green", ""):
        process.send(f"p-{topic}", topic, tag=tag)
    found = process.receive_until(f"tags-{topic}", 2)
    assert sorted(each["tag"] for each in found) == ["green", "red"]


def test_every_group_gets_every_message(process: OfficialClient, topic: str) -> None:
    """Two groups see the same messages, each on its first attempt; the second one from the beginning."""
    ids = [process.send(f"p-{topic}", topic) for _ in range(3)]
    first = process.receive_until(f"c-{topic}", 3)
    process.start(f"other-{topic}", "simple", topic, group=f"other-{topic}")
    second = process.receive_until(f"other-{topic}", 3)
    assert sorted(each["message_id"] for each in first) == sorted(ids)
    assert sorted(each["message_id"] for each in second) == sorted(ids)
    assert {each["attempt"] for each in first + second} == {1}


def test_message_group_keeps_its_order(process: OfficialClient, topic: str) -> None:
    """Messages of one message group come in the order they were sent, and say their group."""
    for number in range(10):
        process.send(f"p-{topic}", topic, body=f"{number}", message_group="customer-1")
    found = process.receive_until(f"c-{topic}", 10)
    assert [each["body"] for each in found] == [f"{number}" for number in range(10)]
    assert {each["message_group"] for each in found} == {"customer-1"}


@having("push")
def test_push_consumer_is_given_every_message(process: OfficialClient, topic: str) -> None:
    """A push consumer gets what is there and what comes, once each."""
    before = [process.send(f"p-{topic}", topic) for _ in range(5)]
    process.start(f"push-{topic}", "push", topic, group=f"push-{topic}")
    after = [process.send(f"p-{topic}", topic) for _ in range(5)]
    delayed = process.send(f"p-{topic}", topic, properties={"DELAY": "3"})
    found = process.wait_for_deliveries(f"push-{topic}", 11)
    assert sorted(each["message_id"] for each in found) == sorted([*before, *after, delayed])
    assert {each["attempt"] for each in found} == {1}


def test_receive_waits_and_is_woken(process: OfficialClient, topic: str) -> None:
    """A receive with nothing there waits, and a message that comes ends the wait: by itself it would end empty."""
    waiting = process.begin("receive", name=f"c-{topic}")
    with pytest.raises(TimeoutError):
        waiting.result(0.7)
    message_id = process.send(f"p-{topic}", topic)
    (found,) = waiting.result(ANSWER_S_MAX)
    assert found["message_id"] == message_id


@pytest.mark.parametrize("process", BY_PROPERTY, indirect=True, ids=lambda language: language.name)
def test_receive_is_woken_by_a_message_that_becomes_due(process: OfficialClient, topic: str) -> None:
    """A long poll that began before the delivery time ends with it."""
    sent_ms = time.time_ns() // 1_000_000
    process.send(f"p-{topic}", topic, properties={"TIMER_DELAY_MS": "800"})
    (found,) = process.do("receive", name=f"c-{topic}")
    assert found["at_ms"] - sent_ms >= 800


def test_receive_with_nothing_there_ends_empty(process: OfficialClient, topic: str) -> None:
    """A long poll that finds nothing is an empty list to the application, not an error."""
    process.start(f"short-{topic}", "simple", topic, group=f"short-{topic}", wait_s=3)
    assert process.do("receive", name=f"short-{topic}") == []


@pytest.mark.parametrize("process", [RUST], indirect=True, ids=lambda language: language.name)
def test_every_message_of_a_batch_is_one_of_its_own(process: OfficialClient, topic: str) -> None:
    """Each has its own receipt, in the order of the request, and its own delivery; a batch is taken whole or not.

    Of the official clients only Rust's can send several messages in one request.
    """
    bodies = [f"body {number}" for number in range(10)]
    ids = process.do("batch", name=f"p-{topic}", topic=topic, bodies=bodies, tag="red", properties={"x": "1"})
    assert len(set(ids)) == 10
    process.start(f"short-{topic}", "simple", topic, group=f"short-{topic}", wait_s=3)
    found = process.receive_until(f"short-{topic}", 10)
    assert {each["message_id"]: each["body"] for each in found} == dict(zip(ids, bodies, strict=True))
    assert {(each["tag"], each["properties"]["x"], each["attempt"]) for each in found} == {("red", "1", 1)}
    with pytest.raises(ClientError) as refused:
        process.do("batch", name=f"p-{topic}", topic=topic, bodies=["a", "b"], properties={"TIMER_DELAY_SEC": "soon"})
    assert refused.value.code == 40012
    assert process.do("receive", name=f"short-{topic}") == []


# -- later ------------------------------------------------------------------------------------------------------------


def test_nothing_comes_before_its_delivery_timestamp(process: OfficialClient, topic: str) -> None:
    """A message with a delivery timestamp comes at that time: never before it, by the host's clock."""
    now_ms = time.time_ns() // 1_000_000
    unit_ms = process.language.deliver_at_unit_ms
    wanted = {}
    for delay_ms in (300, 900, 1500, 2100):
        deliver_at_ms = -(-(now_ms + delay_ms) // unit_ms) * unit_ms
        wanted[process.send(f"p-{topic}", topic, deliver_at_ms=deliver_at_ms)] = deliver_at_ms
    found = process.receive_until(f"c-{topic}", 4)
    assert {each["message_id"] for each in found} == wanted.keys()
    for each in found:
        assert wanted[each["message_id"]] <= each["at_ms"]


def test_a_delivery_timestamp_is_returned(process: OfficialClient, topic: str) -> None:
    """The consumer is told the time that the producer gave, in the client's own unit."""
    unit_ms = process.language.deliver_at_unit_ms
    deliver_at_ms = -(-(time.time_ns() // 1_000_000 + 300) // unit_ms) * unit_ms
    process.send(f"p-{topic}", topic, deliver_at_ms=deliver_at_ms)
    (found,) = process.receive_until(f"c-{topic}", 1)
    assert found["deliver_at_ms"] == deliver_at_ms


def test_a_time_that_has_passed_means_now(process: OfficialClient, topic: str) -> None:
    """A delivery timestamp in the past is delivered at once."""
    message_id = process.send(f"p-{topic}", topic, deliver_at_ms=1_700_000_000_000)
    (found,) = process.receive_until(f"c-{topic}", 1)
    assert (found["message_id"], found["deliver_at_ms"]) == (message_id, 1_700_000_000_000)


@pytest.mark.parametrize("process", BY_PROPERTY, indirect=True, ids=lambda language: language.name)
def test_each_delay_level(process: OfficialClient, topic: str) -> None:
    """Each of the 18 levels waits for its own time, counted from the send."""
    sent: dict[str, tuple[int, int]] = {}
    for level, level_ms in enumerate(LEVELS_MS, 1):
        sent_ms = time.time_ns() // 1_000_000
        sent[process.send(f"p-{topic}", topic, properties={"DELAY": f"{level}", "level": f"{level}"})] = (
            sent_ms,
            level_ms,
        )
    found = process.receive_until(f"c-{topic}", len(LEVELS_MS))
    assert sorted(each["message_id"] for each in found) == sorted(sent)
    for each in found:
        sent_ms, level_ms = sent[each["message_id"]]
        assert level_ms <= each["at_ms"] - sent_ms
        assert sent_ms + level_ms <= each["deliver_at_ms"] <= each["at_ms"]
    assert [each["properties"] for each in sorted(found, key=lambda each: int(each["properties"]["level"]))] == [
        {"level": f"{level}"} for level in range(1, 19)
    ]


@pytest.mark.parametrize("process", BY_PROPERTY, indirect=True, ids=lambda language: language.name)
@pytest.mark.parametrize(
    ("properties", "least_ms"),
    [
        ({"TIMER_DELAY_SEC": "1"}, 1000),
        ({"TIMER_DELAY_MS": "350"}, 350),
        ({"DELAY": "99"}, LEVELS_MS[-1]),
        ({"DELAY": "2", "TIMER_DELAY_SEC": "3600"}, LEVELS_MS[1]),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_relative_delay_by_property(
    process: OfficialClient, topic: str, properties: dict[str, str], least_ms: int
) -> None:
    """The properties RocketMQ reserves for relative delays work from this client, and are gone on delivery."""
    sent_ms = time.time_ns() // 1_000_000
    process.send(f"p-{topic}", topic, properties={**properties, "mine": "stays"})
    (found,) = process.receive_until(f"c-{topic}", 1)
    assert least_ms <= found["at_ms"] - sent_ms
    assert found["properties"] == {"mine": "stays"}


@pytest.mark.parametrize("process", BY_PROPERTY, indirect=True, ids=lambda language: language.name)
def test_absolute_time_by_property(process: OfficialClient, topic: str) -> None:
    """TIMER_DELIVER_MS gives a client with whole seconds its milliseconds back."""
    deliver_at_ms = time.time_ns() // 1_000_000 + 777
    process.send(f"p-{topic}", topic, properties={"TIMER_DELIVER_MS": f"{deliver_at_ms}"})
    (found,) = process.receive_until(f"c-{topic}", 1)
    assert found["deliver_at_ms"] == deliver_at_ms
    assert deliver_at_ms <= found["at_ms"]


# -- finishing --------------------------------------------------------------------------------------------------------


def test_ack_twice_is_fine(process: OfficialClient, topic: str) -> None:
    """A second acknowledgement of the same delivery is no error to the application."""
    process.send(f"p-{topic}", topic)
    (found,) = process.receive_until(f"c-{topic}", 1)
    process.do("ack", name=f"c-{topic}", token=found["token"])


@having("change")
def test_change_of_invisible_duration(process: OfficialClient, topic: str) -> None:
    """A shorter invisible duration brings the message back after it, on its second attempt; the old handle is stale."""
    process.send(f"p-{topic}", topic)
    (first,) = process.receive_until(f"c-{topic}", 1, acks=False, invisible_s=60)
    changed_ms = time.time_ns() // 1_000_000
    process.do("change", name=f"c-{topic}", token=first["token"], invisible_s=1)
    (second,) = process.receive_until(f"c-{topic}", 1, acks=False, invisible_s=60)
    assert (second["message_id"], second["attempt"]) == (first["message_id"], 2)
    assert second["at_ms"] - changed_ms >= 1000
    late = {} if process.language.tells_of_acks else {"invisible_s": 1}
    with pytest.raises(ClientError) as stale:
        process.do("change" if late else "ack", name=f"c-{topic}", token=first["token"], **late)
    assert stale.value.code == 40013
    process.do("ack", name=f"c-{topic}", token=second["token"])


# -- refusals ---------------------------------------------------------------------------------------------------------


def test_milliseconds_where_the_client_wants_its_own_unit(process: OfficialClient, topic: str) -> None:
    """A caller who gives a time a thousand times too large is told so, with the value and what it may have meant."""
    wrong = time.time_ns() // 1_000 // (process.language.deliver_at_unit_ms)
    with pytest.raises(ClientError) as refused:
        process.do("send", name=f"p-{topic}", topic=topic, deliver_at=wrong)
    if process.language.checks_times:
        assert "Timestamp is not valid" in str(refused.value)
    else:
        assert refused.value.code == 40012
        assert "9999-12-31" in str(refused.value)
        assert "milliseconds" in str(refused.value)
    assert process.send(f"p-{topic}", topic), "the daemon goes on"


def test_system_topic_is_refused(process: OfficialClient, topic: str) -> None:
    """A topic the protocol keeps for itself cannot be written, and the refusal says why."""
    with pytest.raises(ClientError) as refused:
        process.send(f"p-{topic}", "SCHEDULE_TOPIC_XXXX")
    said = f"{refused.value}\n{process.client_log()}"  # the Python client tells its log, not its caller
    assert "illegal topic" in said or "reasons" in process.language.lacks
    assert "SCHEDULE_TOPIC_XXXX" in said


@having("properties")
def test_unreadable_delay_is_refused(process: OfficialClient, topic: str) -> None:
    """A delay that is no number is refused, by name and value; the message is not sent at once instead."""
    with pytest.raises(ClientError) as refused:
        process.send(f"p-{topic}", topic, properties={"TIMER_DELAY_SEC": "soon"})
    assert refused.value.code == 40012
    assert "TIMER_DELAY_SEC" in str(refused.value)
    assert "soon" in str(refused.value)


def test_body_of_exactly_4_mib_and_not_one_byte_more(process: OfficialClient, topic: str) -> None:
    """4 MiB are accepted; what the client can take back comes whole; one byte more is refused, mostly by the client."""
    process.send(f"p-{topic}", f"full-{process.language.name}", body_bytes=BODY_BYTES_MAX)
    size = BODY_BYTES_MAX - process.language.receive_overhead_bytes
    process.send(f"p-{topic}", topic, body_bytes=size)
    (found,) = process.receive_until(f"c-{topic}", 1)
    assert (len(found["body"]), found["is_corrupted"]) == (size, "digest" in process.language.lacks)
    with pytest.raises(ClientError, match=rf"(?i)body (size exceeds|cannot exceed).*{BODY_BYTES_MAX}"):
        process.send(f"p-{topic}", topic, body_bytes=BODY_BYTES_MAX + 1)


# -- what began before the first test ---------------------------------------------------------------------------------


def test_message_comes_back_when_its_lease_expires(process: OfficialClient, slow: dict[str, Slow]) -> None:
    """A message nobody acknowledged comes back after its invisible duration of 10 s, as attempt 2."""
    sent_ms, (first, second) = slow[process.language.name].expired.result(30)
    assert second["message_id"] == first["message_id"]
    assert (first["attempt"], second["attempt"]) == (1, 2)
    assert second["at_ms"] - sent_ms >= 10_000


@having("push")
def test_message_comes_back_when_the_listener_fails(process: OfficialClient, slow: dict[str, Slow]) -> None:
    """A listener that fails gets the message again after the first retry step of 10 s, whatever its client thinks."""
    found = slow[process.language.name].failed.result(30)
    first, second = found
    assert second["message_id"] == first["message_id"]
    assert (first["attempt"], second["attempt"]) == (1, 2)
    assert second["at_ms"] - first["at_ms"] >= 10_000


def test_another_consumer_gets_the_messages_of_a_dead_one(process: OfficialClient, slow: dict[str, Slow]) -> None:
    """What a killed consumer had taken comes to the other one after its lease; what is sent then comes at once."""
    found = slow[process.language.name].orphaned.result(40)
    assert sorted(each["message_id"] for each in found.taken) == sorted(found.sent)
    assert sorted(each["message_id"] for each in found.received) == sorted(found.sent)
    assert {each["attempt"] for each in found.received} == {2}
