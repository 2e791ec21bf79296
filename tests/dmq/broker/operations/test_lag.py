"""How far groups are behind: counts of the ledger, and since when the oldest unread message waits.

``EmbeddedRig`` compares both with the rows of the store wherever it is used.
"""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import patch

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from support.forges.messages.letters import PURGE, die_many, finish, only
from support.models.store.lag_check import counts
from support.rigs.broker.rig import (
    GROUP,
    TOPIC,
    EmbeddedRig,
    End,
    ack,
    an_envelope,
    every_durable_broker,
    receive,
    send,
)

from dmq.broker.operations import lag as lag_module
from dmq.broker.operations.admin import BEGIN
from dmq.broker.operations.lag import Lag, Lags
from dmq.broker.topics.settings import KeepChange
from dmq.config.units import parse_topic_patterns
from dmq.metrics.registry import Metrics

pytestmark = pytest.mark.contract

SOON_MS, LATER_MS = 1_000, 500_000
OTHER = "other"


def lag(rig: EmbeddedRig, topic: str = TOPIC, group: str = GROUP) -> Lag:
    """What is told of a group."""
    (found,) = [each for each in rig.broker.lags.look() if (each.topic, each.group) == (topic, group)]
    return found


def age_ms(rig: EmbeddedRig, group: str = GROUP) -> int | None:
    return lag(rig, group=group).oldest_unread_age_ms


def scraped(rig: EmbeddedRig) -> dict[tuple[str, str], dict[str, float]]:
    """The figures of each topic and group, as Prometheus reads them."""
    metrics = Metrics(process=False)
    metrics.lag.follow(rig.broker.lags.recent)
    found: dict[tuple[str, str], dict[str, float]] = {}
    for family in text_string_to_metric_families(generate_latest(metrics.registry).decode()):
        for sample in family.samples:
            if sample.name.startswith("dmq_group_"):
                labels = sample.labels
                pair = labels["messaging_destination_name"], labels["messaging_consumer_group_name"]
                found.setdefault(pair, {})[sample.name.removeprefix("dmq_group_")] = sample.value
    return found


async def fill(rig: EmbeddedRig) -> None:
    """A run with all that happens to messages; then 6 s pass."""
    await rig.set_group(GROUP, max_attempts=5, delays_ms=(SOON_MS, LATER_MS))
    await die_many(rig, 3)
    await finish(rig, replace(PURGE, filter=only("m-1")))
    await send(rig, *(f"n-{number}" for number in range(6)))
    first, second, third, fourth, *_ = await receive(rig, renew_for="push")
    await ack(rig, first)
    for failed in (second, third):
        await rig.broker.change_invisible(GROUP, TOPIC, failed.receipt_handle, 0)
    await rig.broker.send_back(GROUP, TOPIC, fourth.receipt_handle, -1)
    await rig.pass_ms(SOON_MS)
    (again,) = await receive(rig, renew_for="push", batch_max=1)
    await rig.broker.change_invisible(GROUP, TOPIC, again.receipt_handle, 0)
    await receive(rig, group=OTHER, batch_max=2)
    await rig.broker.operator.reset_group(OTHER, TOPIC, BEGIN)
    await receive(rig, group=OTHER, batch_max=4)
    rig.clock.advance(6_000)


@every_durable_broker(queues=1)
async def test_metrics_are_those_of_the_ledger(rig: EmbeddedRig) -> None:
    """After sends, acknowledgements, retries, dead letters, a purge and a reset; of two groups, and after a kill."""
    await fill(rig)
    mine = {"unread": 3, "in_flight": 2, "in_retry": 1, "dead": 4}
    theirs = {"unread": 9, "in_flight": 4, "in_retry": 0, "dead": 0}
    for _ in range(2):
        found = scraped(rig)
        assert counts(rig.broker.lags.look()) == {
            (TOPIC, GROUP): (3, 1, 4),
            (TOPIC, OTHER): (9, 0, 0),
        }
        for group, expected in ((GROUP, mine), (OTHER, theirs)):
            assert found[TOPIC, group] == {
                "oldest_unread_age_seconds": 7.0,
                **{f"{name}_messages": count for name, count in expected.items()},
            }
        rig.check_ledger()
        await rig.restart(End.KILL)  # what was in hand is not any more
        mine["in_flight"] = theirs["in_flight"] = 0


@every_durable_broker(queues=2)
async def test_the_age_is_that_of_the_oldest_unfinished(rig: EmbeddedRig) -> None:
    """Of all queues, handed out or not; it stays over a restart, and nobody unread is of age 0."""
    await rig.broker.route(TOPIC)
    for number in range(4):
        await send(rig, f"m-{number}")
        rig.clock.advance(1_000)
    taken = sorted(await receive(rig), key=lambda each: each.message_id)
    assert age_ms(rig) == 4_000
    for delivery, left_ms in zip(taken, (3_000, 2_000, 1_000, 0), strict=True):
        await ack(rig, delivery)
        assert age_ms(rig) == left_ms
        rig.check_ledger()
    await send(rig, "last")
    rig.clock.advance(1_000)
    await rig.restart(End.KILL, down_ms=2_000)
    assert age_ms(rig) == 3_000
    rig.check_ledger()


@every_durable_broker(queues=1)
async def test_a_retry_that_came_back_is_as_old_as_it_is_back(rig: EmbeddedRig) -> None:
    """While it waits for its time it is in retry, and not unread; the group is not loaded after a kill."""
    await rig.set_group(GROUP, max_attempts=3, delays_ms=(SOON_MS,))
    await send(rig, "m-1")
    (failed,) = await receive(rig, renew_for="push")
    await rig.broker.change_invisible(GROUP, TOPIC, failed.receipt_handle, 0)
    assert lag(rig) == Lag(TOPIC, GROUP, unread=0, oldest_unread_age_ms=0, in_flight=0, in_retry=1, dead=0)
    await rig.pass_ms(SOON_MS)
    rig.clock.advance(3_000)
    for _ in range(2):
        assert lag(rig) == Lag(TOPIC, GROUP, unread=1, oldest_unread_age_ms=3_000, in_flight=0, in_retry=0, dead=0)
        await rig.restart(End.KILL)


@every_durable_broker(queues=1)
async def test_a_step_of_the_clock_makes_no_absurd_age(rig: EmbeddedRig) -> None:
    """What is known goes on by the boot clock, both ways; what is read after a step back is of age 0, never less."""
    await receive(rig)
    await send(rig, "m-1", "m-2")
    first, _ = await receive(rig)
    rig.clock.advance(5_000)
    assert age_ms(rig) == 5_000
    for step_ms in (-3_600_000, 600_000, -86_400_000):
        rig.clock.step_to(rig.clock.now_ms() + step_ms)
        rig.clock.advance(1_000)
    assert age_ms(rig) == 8_000
    await ack(rig, first)
    assert age_ms(rig) == 0
    rig.clock.advance(2_000)
    assert age_ms(rig) == 2_000


@every_durable_broker(queues=1)
async def test_a_removed_group_is_not_shown_any_more(rig: EmbeddedRig) -> None:
    """A group, then its topic; nothing of them stays in memory."""
    await send(rig, "m-1")
    for group in (GROUP, OTHER):
        await receive(rig, group=group)
    assert scraped(rig).keys() == {(TOPIC, GROUP), (TOPIC, OTHER)}
    await rig.broker.operator.remove_group(OTHER, is_forced=True)
    assert scraped(rig).keys() == {(TOPIC, GROUP)}
    assert len(rig.broker.lags._heads) == 1
    await rig.broker.operator.remove_topic(TOPIC, is_forced=True)
    assert not scraped(rig)
    assert not rig.broker.lags._heads


@every_durable_broker(queues=1)
async def test_the_position_of_a_cluster_is_unknown(rig: EmbeddedRig) -> None:
    """Of a topic that leaves for a cluster: absent, not 0; of one that stays here all is told."""
    await fill(rig)
    rig.stay = parse_topic_patterns(OTHER)
    await rig.restart(End.CLOSE)
    found = scraped(rig)[TOPIC, GROUP]
    assert found == {"in_flight_messages": 0, "in_retry_messages": 1, "dead_messages": 4}
    await rig.broker.send([an_envelope("o-1", topic=OTHER)])
    await receive(rig, topic=OTHER)
    assert lag(rig, OTHER).unread == 1


@every_durable_broker(queues=1)
async def test_reads_are_bounded_and_everybody_has_a_turn(rig: EmbeddedRig) -> None:
    """Where a group moves in all topics between two looks, some are read: those that were not read for longest."""
    topics = [f"topic-{number}" for number in range(5)]
    await rig.broker.send([an_envelope(f"m-{number}", topic=topic) for topic in topics for number in range(6)])
    rig.is_whole = False  # ages that are not read yet are no ages
    lags, known = Lags(rig.store, rig.broker.names, rig.broker.subscriptions), []
    for _ in range(4):
        for topic in topics:
            await ack(rig, *await receive(rig, topic=topic, batch_max=1), topic=topic)
        with patch.object(lag_module, "READS_MAX", 2):
            known.append(sum(each.oldest_unread_age_ms is not None for each in lags.look()))
    assert known == [2, 4, 5, 5]


@every_durable_broker(queues=1)
async def test_groups_at_one_message_share_its_read(rig: EmbeddedRig) -> None:
    """However many they are."""
    await send(rig, "m-1")
    groups = [f"group-{number}" for number in range(5)]
    for group in groups:
        await receive(rig, group=group)
    with patch.object(lag_module, "READS_MAX", 2):
        assert [each.oldest_unread_age_ms for each in rig.broker.lags.look()] == [0] * 5


@every_durable_broker(queues=1)
async def test_an_unreadable_figure_is_not_shown(rig: EmbeddedRig) -> None:
    """A ledger of too many rows, and none: the other metrics are scraped all the same."""
    await send(rig, "m-1")
    await receive(rig)
    with patch.object(lag_module, "LEDGER_ROWS_MAX", 1):
        assert not scraped(rig)
    assert rig.broker.lags.look()  # operators are told
    assert scraped(rig)
    rig.broker.lags.close()
    assert not scraped(rig)
    rig._options = replace(rig._options, ledger_kinds=())
    await rig.restart(End.CLOSE)
    assert not rig.broker.lags.look()


@every_durable_broker(queues=1)
async def test_messages_removed_by_retention_have_no_age(rig: EmbeddedRig) -> None:
    """Of a group that sleeps it is unread until it reads again, as in the ledger; the age is of what is still there."""
    await rig.broker.operator.create_topic(
        TOPIC, queues=1, message_type=None, keep=KeepChange(time_ms=60_000, unread="no")
    )
    await rig.broker.operator.create_group(GROUP)
    await rig.broker.subscriptions.subscribe(GROUP, TOPIC)
    await send(rig, "m-1")
    rig.clock.advance(50_000)
    await send(rig, "m-2")
    await rig.restart(End.KILL)
    assert age_ms(rig) == 50_000
    rig.clock.advance(11_000)
    await rig.broker.retention.turn()
    assert (lag(rig).unread, age_ms(rig)) == (2, 11_000)
    rig.clock.advance(50_000)
    await rig.broker.retention.turn()
    assert (lag(rig).unread, age_ms(rig)) == (2, None)


@every_durable_broker(queues=1)
async def test_a_look_that_stood_still_is_made_again_soon(rig: EmbeddedRig) -> None:
    """Danger: a process that was stopped for an hour in the middle of a look told metrics the same for 19 hours."""
    lags, look = rig.broker.lags, Lags.look
    looks = 0

    def stopped(lags: Lags, *, rows_max: int) -> list[Lag]:
        nonlocal looks
        looks += 1
        rig.clock.advance(3_600_000 if looks == 1 else 0)
        return look(lags, rows_max=rows_max)

    with patch.object(Lags, "look", stopped):
        lags.recent()
        lags.recent()
        assert looks == 1
        rig.clock.advance(60_000)
        lags.recent()
        assert looks == 2
