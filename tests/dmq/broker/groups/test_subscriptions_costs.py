"""A message costs the same whatever the number of groups that read its topic."""

from __future__ import annotations

import sys
from collections.abc import Callable
from unittest.mock import patch

import pytest
from support.rigs.broker.rig import EmbeddedRig, an_envelope, every_durable_broker, receive

from dmq.broker.groups.subscriptions import Subscriptions
from dmq.store.schema.topics.names import decode_name
from dmq.store.writer import recount
from dmq.store.writer.operations import Appended
from dmq.trail import ledger as ledger_module
from dmq.trail.ledger import GroupBook, read_books

pytestmark = pytest.mark.contract


def counting(calls: list[int]) -> Callable[[Subscriptions, Appended], None]:
    """Return ``Subscriptions.on_appended`` that notes the number of calls it makes."""
    on_appended = Subscriptions.on_appended

    def counted(subscriptions: Subscriptions, appended: Appended) -> None:
        made = 0

        def count(_: object, event: str, __: object) -> None:
            nonlocal made
            made += event in {"call", "c_call"}

        before = sys.getprofile()
        sys.setprofile(count)
        try:
            on_appended(subscriptions, appended)
        finally:
            sys.setprofile(before)
        calls.append(made)

    return counted


@every_durable_broker(queues=1)
async def test_a_message_costs_no_more_with_ten_times_as_many_groups(rig: EmbeddedRig) -> None:
    """Danger: each message went through all groups of its topic, 17 ms for 2,000 of them."""
    costs: list[int] = []
    for groups in (5, 50):
        topic = f"read-by-{groups}"
        await rig.broker.send([an_envelope(f"{topic}-1", topic=topic)])
        for number in range(groups):
            assert len(await receive(rig, topic=topic, group=f"group-{number}")) == 1
        await rig.broker.send([an_envelope(f"{topic}-2", topic=topic)])
        calls: list[int] = []
        with patch.object(Subscriptions, "on_appended", counting(calls)):
            await rig.broker.send([an_envelope(f"{topic}-3", topic=topic)])
        costs.append(sum(calls))
        for number in range(groups):  # each is told of all messages all the same
            assert len(await receive(rig, topic=topic, group=f"group-{number}")) == 2
    assert costs[0] == costs[1]


@every_durable_broker(queues=1)
async def test_the_terms_of_a_group_are_computed_once_for_a_ledger(rig: EmbeddedRig) -> None:
    """Danger: the topics, and twice the differences, computed the terms of all groups again."""
    await rig.broker.send([an_envelope("m-1")])
    for number in range(5):
        assert len(await receive(rig, group=f"group-{number}")) == 1
    ledger = read_books(rig.store)
    with patch.object(ledger_module, "GroupBook", wraps=GroupBook) as made:
        (book,) = ledger.topics()
        assert not ledger.differences()
        assert [each for _, each in ledger.pairs()] == book.groups
    assert made.call_count == 5


@every_durable_broker(queues=1)
async def test_the_lag_of_one_topic_or_group_computes_no_other_terms(rig: EmbeddedRig) -> None:
    """Danger: the readers of one topic, or the topics of one group, computed the terms of all groups of all topics."""
    for topic in ("orders", "bills"):
        await rig.broker.send([an_envelope("m-1", topic=topic)])
        for number in range(5):
            assert len(await receive(rig, topic=topic, group=f"group-{number}")) == 1
    names = rig.broker.names
    with patch.object(ledger_module, "GroupBook", wraps=GroupBook) as made:
        assert len(rig.broker.lags.look(topic_id=names.topics["bills"].topic_id)) == 5
        assert made.call_count == 5
        assert len(rig.broker.lags.look(group_id=names.groups["group-3"].group_id)) == 2
        assert made.call_count == 7


@every_durable_broker(queues=1)
async def test_a_ledger_decodes_each_name_once(rig: EmbeddedRig) -> None:
    """Danger: all names were decoded twice for each ledger, to compare them."""
    await rig.broker.send([an_envelope("m-1")])
    for number in range(5):
        await rig.broker.ensure_group(f"group-{number}")
    with patch.object(recount, "decode_name", wraps=decode_name) as decoded:
        read_books(rig.store)
    assert decoded.call_count == 6
