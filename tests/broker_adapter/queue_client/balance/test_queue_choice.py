"""Which queue the next message goes to; a test on RocketMQ compares the choice by a key with the Java client's."""

from __future__ import annotations

from collections import Counter
from random import Random

from broker_adapter.contracts.message_queue import MessageQueue
from broker_adapter.contracts.topics import java_hash_code, queue_of_message_group
from broker_adapter.queue_client.balance.faults import RULES_4, RULES_5, FaultTable, RoundRobin
from broker_adapter.queue_client.balance.queue_choice import (
    at_random,
    avoiding_faults,
    avoiding_faults_4,
    by_hash,
    in_turn,
)

QUEUES = [MessageQueue("orders", broker, number) for broker in "abc" for number in range(2)]
NOW = 1_000_000


def brokers(faults: FaultTable, last_broker: str = "") -> set[str]:
    """Where many messages go."""
    choose = avoiding_faults if faults.rules is RULES_5 else avoiding_faults_4
    turn = RoundRobin(Random(1))
    return {choose(QUEUES, faults, turn, NOW, last_broker=last_broker).broker for _ in range(60)}


def test_queues_take_turns() -> None:
    """Each gets as many."""
    turn = RoundRobin(Random(1))
    assert set(Counter(in_turn(QUEUES, turn) for _ in range(60)).values()) == {10}


def test_a_repeated_send_avoids_the_broker_that_failed() -> None:
    """Unless there is no other."""
    turn = RoundRobin(Random(1))
    assert {in_turn(QUEUES, turn, last_broker="b").broker for _ in range(60)} == {"a", "c"}
    assert in_turn(QUEUES[:2], turn, last_broker="a").broker == "a"


def test_5_skips_unavailable_brokers_then_unreachable_ones() -> None:
    """The three steps of MQFaultStrategy 5.5.0; the broker that failed before is in none of the first two."""
    faults = FaultTable(RULES_5, Random(1))
    assert brokers(faults) == {"a", "b", "c"}
    assert brokers(faults, "a") == {"b", "c"}
    faults.note("a", 15_000, NOW)
    assert brokers(faults) == {"b", "c"}
    assert brokers(faults, "b") == {"c"}
    faults.note("b", 15_000, NOW, is_reachable=False)
    faults.note("c", 15_000, NOW)
    assert brokers(faults) == {"a", "c"}
    assert brokers(faults, "a") == {"c"}
    faults.note("a", 15_000, NOW, is_reachable=False)
    faults.note("c", 15_000, NOW, is_reachable=False)
    assert brokers(faults) == {"a", "b", "c"}
    assert brokers(faults, "a") == {"a", "b", "c"}


def test_4_stays_at_the_same_broker_then_takes_one_that_is_not_too_bad() -> None:
    """The three steps of MQFaultStrategy 4.x: a repeated send goes to the same broker if it is available."""
    faults = FaultTable(RULES_4, Random(1))
    assert brokers(faults) == {"a", "b", "c"}
    assert brokers(faults, "a") == {"a"}
    faults.note("a", 5, NOW, failed=True)
    assert brokers(faults) == {"b", "c"}
    assert brokers(faults, "a") == {"a"}  # of one that is known, the better half is itself
    faults.note("b", 600, NOW)
    faults.note("c", 700, NOW)
    assert brokers(faults) == {"a"}  # none is available, and it failed the quickest
    faults.note("a", 800, NOW, failed=True)
    assert brokers(faults) == brokers(faults, "a") == {"b"}


def test_4_forgets_a_broker_that_cannot_be_written() -> None:
    """And takes the next queue in turn."""
    faults = FaultTable(RULES_4, Random(1))
    faults.note("gone", 1, NOW)
    for broker in "abc":
        faults.note(broker, 600, NOW)
    turn = RoundRobin(Random(1))
    chosen = {avoiding_faults_4(QUEUES, faults, turn, NOW).broker for _ in range(60)}
    assert "gone" not in faults.brokers
    assert chosen <= {"a", "b", "c"}


def test_a_key_has_one_queue() -> None:
    """Java's hash codes, also those below zero; not the rule of message groups, which only drops the sign."""
    assert java_hash_code("") == 0
    assert java_hash_code("hello") == 99162322
    assert java_hash_code("polygenelubricants") == -(2**31)  # known for it
    assert java_hash_code("😀") == 1772899  # a surrogate pair is two characters
    assert by_hash(QUEUES, "polygenelubricants") == QUEUES[2**31 % 6]
    assert queue_of_message_group("polygenelubricants", 6) == 0
    assert len({by_hash(QUEUES, str(number)) for number in range(100)}) == len(QUEUES)


def test_any_queue_is_chosen_at_random() -> None:
    """Each of them some day."""
    random = Random(1)
    assert {at_random(QUEUES, random) for _ in range(100)} == set(QUEUES)
