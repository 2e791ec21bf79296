"""Groups and retries in the admin service: what the source says reaches the wire, what cannot be never the source."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from support.admin_source import DAMAGED, GROUPS, MESSAGE_ID, MINUTE, RETRIES, SET_POLICY, FixedSource, service_over
from support.admin_status import NOW

from broker_adapter.contracts.errors import Refused, Rule
from dmq.admin import admin_v1 as wire
from dmq.admin.requests.mapping import policy_of, wire_policy
from retry.policy import Exponential, Fixed, RetryPolicy, Table

POLICIES = [
    RetryPolicy(),
    SET_POLICY,
    RetryPolicy(backoff=Fixed(0), max_attempts=1),
    RetryPolicy(backoff=Table((0, 5)), max_age_ms=1),
    RetryPolicy(backoff=Exponential(1, 9, 1.5), jitter=1.0, max_attempts=1000),
]


def retries(**fields: object) -> wire.ListRetriesResponse:
    request = wire.ListRetriesRequest(**{"group": "billing", "limit": 10} | fields)  # type: ignore[arg-type]
    return asyncio.run(service_over(FixedSource()).list_retries(request))


@pytest.mark.parametrize("policy", POLICIES)
def test_a_policy_is_the_same_behind_the_wire(policy: RetryPolicy) -> None:
    """Every backoff and every bound, a delay of zero and an absent age included."""
    assert policy_of(wire.Policy.FromString(wire_policy(policy).SerializeToString())) == policy


@pytest.mark.parametrize(
    ("policy", "why"),
    [
        (wire.Policy(max_attempts=3), "no backoff"),
        (wire.Policy(table=wire.TableBackoff(), max_attempts=3), "1 to 256 steps"),
        (wire.Policy(fixed=wire.FixedBackoff(delay_ms=-1), max_attempts=3), "delay"),
        (wire.Policy(fixed=wire.FixedBackoff(delay_ms=1)), "max_attempts"),
        (wire.Policy(fixed=wire.FixedBackoff(), max_attempts=3, max_age_ms=0), "max_age"),
        (wire.Policy(exponential=wire.ExponentialBackoff(initial_ms=5, max_ms=1), max_attempts=3), "max"),
    ],
)
def test_a_policy_that_cannot_be_is_refused(policy: wire.Policy, why: str) -> None:
    """With the field that is wrong, and before the source hears of it."""
    source = FixedSource()
    with pytest.raises(Refused, match=why) as caught:
        asyncio.run(service_over(source).set_group(wire.SetGroupRequest(group="billing", policy=policy)))
    assert caught.value.rule is Rule.REQUEST
    assert source.known["billing"] == GROUPS[0]


def test_every_field_of_a_group_reaches_the_wire() -> None:
    """Counts, policy, order and histogram."""
    source = FixedSource()
    source.known["billing"] = replace(GROUPS[0], is_fifo=True, is_fifo_set=True)
    found = asyncio.run(service_over(source).get_group(wire.GetGroupRequest(group="billing"))).group
    assert (found.name, found.created_at_ms, found.leased) == ("billing", NOW - 90 * MINUTE, 7)
    assert (found.waiting, found.dead) == (3, 3)
    assert (found.is_default_policy, found.is_fifo, found.is_fifo_set) == (True, True, True)
    assert policy_of(found.policy) == RetryPolicy()
    assert [(bucket.until_ms, bucket.count) for bucket in found.due] == [(NOW + MINUTE, 2), (NOW + 30 * MINUTE, 1)]


def test_groups_are_listed_by_name() -> None:
    """As the source gave them."""
    found = asyncio.run(service_over(FixedSource()).list_groups(wire.ListGroupsRequest())).groups
    assert [(group.name, group.is_default_policy, group.is_fifo) for group in found] == [
        ("billing", True, False),
        ("shipping", False, True),
    ]
    assert policy_of(found[1].policy) == SET_POLICY


def test_an_unknown_group_is_not_found() -> None:
    """The source's refusal passes through."""
    with pytest.raises(Refused) as caught:
        asyncio.run(service_over(FixedSource()).get_group(wire.GetGroupRequest(group="nobody")))
    assert caught.value.rule is Rule.GROUP_UNKNOWN


def test_what_is_not_given_stays_as_it_is() -> None:
    """An absent policy and an absent order change nothing; false is not absent."""
    source = FixedSource()

    def change(**fields: object) -> wire.Group:
        request = wire.SetGroupRequest(group="shipping", **fields)  # type: ignore[arg-type]
        return asyncio.run(service_over(source).set_group(request)).group

    found = change(is_fifo=False)
    assert (policy_of(found.policy), found.is_fifo, found.is_fifo_set) == (SET_POLICY, False, True)
    found = change(policy=wire_policy(POLICIES[2]))
    assert (policy_of(found.policy), found.is_default_policy, found.is_fifo) == (POLICIES[2], False, False)
    assert change(retries="cluster").retries == change().retries == "cluster"
    assert change(is_paused=True).paused_since_ms == change().paused_since_ms > 0
    assert change(is_paused=False).paused_since_ms == 0
    assert change(deliver_rate=7).deliver_rate == change().deliver_rate == 7
    with pytest.raises(Refused, match="here, cluster"):
        change(retries="nowhere")
    found = change(reset_policy=True)
    assert (policy_of(found.policy), found.is_default_policy, found.is_fifo_set) == (RetryPolicy(), True, True)


def test_a_policy_and_the_default_at_once_are_refused() -> None:
    """Nobody could say which was meant."""
    request = wire.SetGroupRequest(group="billing", policy=wire_policy(SET_POLICY), reset_policy=True)
    with pytest.raises(Refused, match="not both"):
        asyncio.run(service_over(FixedSource()).set_group(request))


def test_every_field_of_a_waiting_retry_reaches_the_wire() -> None:
    """With its message, but never the body."""
    page = retries(limit=2)
    first, second = page.retries
    assert (first.entry, first.group, first.topic, first.message_id) == ("7-11", "billing", "orders", "M11")
    assert (first.attempt, first.due_at_ms) == (3, NOW - 5)
    assert (first.first_failed_at_ms, first.last_failed_at_ms) == (NOW - 40_000, NOW - 10_000)
    assert (first.content.tag, list(first.content.keys)) == ("new", ["k1", "k2"])
    assert not first.content.HasField("body")
    assert (second.entry, page.next_token) == ("7-12", "2")


def test_pages_of_retries_go_on_and_end() -> None:
    """The token is the source's own; a topic chooses among them."""
    assert [retry.entry for retry in retries(token="2").retries] == ["7-13"]
    assert retries(token="2").next_token == ""
    assert [retry.entry for retry in retries(topic="refunds").retries] == ["7-12"]


def test_a_damaged_message_does_not_hide_the_others() -> None:
    """It is listed, without a content."""
    source = FixedSource(waiting=[replace(RETRIES[0], payload=DAMAGED), RETRIES[1]])
    page = asyncio.run(service_over(source).list_retries(wire.ListRetriesRequest(group="billing", limit=9)))
    assert [retry.HasField("content") for retry in page.retries] == [False, True]


@pytest.mark.parametrize(
    ("fields", "rule"),
    [
        ({"group": ""}, Rule.GROUP),
        ({"group": "a b"}, Rule.GROUP),
        ({"topic": "a b"}, Rule.TOPIC),
        ({"limit": 0}, Rule.REQUEST),
        ({"limit": 1001}, Rule.REQUEST),
        ({"limit": -1}, Rule.REQUEST),
        ({"token": "x" * 1001}, Rule.REQUEST),
    ],
)
def test_pages_that_cannot_be_are_refused(fields: dict[str, object], rule: Rule) -> None:
    """By name or by size."""
    with pytest.raises(Refused) as caught:
        retries(**fields)
    assert caught.value.rule is rule


def test_retries_are_named_once_each() -> None:
    """In their order, and both commands say what became of them."""
    source = FixedSource()
    service = service_over(source)
    ran = asyncio.run(
        service.run_retries_now(wire.RunRetriesNowRequest(group="billing", entries=["7-13", "7-99", "7-13"])),
    )
    ended = asyncio.run(service.end_retries(wire.EndRetriesRequest(group="billing", entries=["7-11", "7-12", "7-13"])))
    assert (source.ran, source.ended) == ([["7-13", "7-99"]], [["7-11", "7-12", "7-13"]])
    assert ((ran.moved, ran.gone), (ended.moved, ended.gone)) == ((1, 1), (2, 1))


@pytest.mark.parametrize("entries", [[], [""], ["7-1", " "], ["x" * 101], ["7-1"] * 1001])
def test_entries_that_cannot_be_are_refused(entries: list[str]) -> None:
    """1 to 1000 of them, by both commands, before the source hears of it."""
    source = FixedSource()
    service = service_over(source)
    with pytest.raises(Refused):
        asyncio.run(service.run_retries_now(wire.RunRetriesNowRequest(group="billing", entries=entries)))
    with pytest.raises(Refused):
        asyncio.run(service.end_retries(wire.EndRetriesRequest(group="billing", entries=entries)))
    assert (source.ran, source.ended) == ([], [])


def test_a_thousand_entries_are_not_too_many() -> None:
    """The bound itself is allowed, for rows as for entries."""
    request = wire.RunRetriesNowRequest(group="billing", entries=[f"7-{number}" for number in range(1000)])
    assert asyncio.run(service_over(FixedSource()).run_retries_now(request)).moved == 3
    request = wire.RunRetriesNowRequest(group="billing", entries=["x" * 100])
    assert asyncio.run(service_over(FixedSource()).run_retries_now(request)).gone == 1
    assert len(retries(limit=1000).retries) == 3
    assert retries(token="0" * 1000).retries[0].entry == "7-11"
    assert retries(limit=1).retries[0].message_id != MESSAGE_ID
