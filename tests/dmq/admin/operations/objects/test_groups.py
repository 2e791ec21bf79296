"""Groups and retries in the admin service: what is answered, and what is refused."""

from __future__ import annotations

import pytest
from support.rigs.commands.live_cell import LiveCell

from broker_adapter.contracts.errors import Refused, Rule
from dmq.admin import admin_v1 as wire
from dmq.admin.requests.mapping import policy_of, wire_policy
from retry.policy import Exponential, Fixed, RetryPolicy, Table

SET_POLICY = RetryPolicy(backoff=Exponential(5000, 7_200_000), max_attempts=4, jitter=0.25, max_age_ms=259_200_000)
POLICIES = [
    RetryPolicy(),
    SET_POLICY,
    RetryPolicy(backoff=Fixed(0), max_attempts=1),
    RetryPolicy(backoff=Table((0, 5)), max_age_ms=1),
    RetryPolicy(backoff=Exponential(1, 9, 1.5), jitter=1.0, max_attempts=1000),
]


def retries(live: LiveCell, **fields: object) -> wire.ListRetriesResponse:
    request = wire.ListRetriesRequest(**{"group": "billing", "limit": 10} | fields)  # type: ignore[arg-type]
    found: wire.ListRetriesResponse = live.ask(request)
    return found


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
def test_a_policy_that_cannot_be_is_refused(live: LiveCell, policy: wire.Policy, why: str) -> None:
    """With the field that is wrong, and nothing is changed."""
    before = live.ask(wire.GetGroupRequest(group="billing"))
    with pytest.raises(Refused, match=why) as caught:
        live.ask(wire.SetGroupRequest(group="billing", policy=policy))
    assert caught.value.rule is Rule.REQUEST
    assert live.ask(wire.GetGroupRequest(group="billing")) == before


def test_an_omitted_option_stays_as_it_is(live: LiveCell) -> None:
    """An absent policy and an absent order change nothing; false is not absent."""

    def change(**fields: object) -> wire.Group:
        found: wire.Group = live.ask(wire.SetGroupRequest(group="shipping", **fields)).group  # type: ignore[arg-type]
        return found

    change(policy=wire_policy(SET_POLICY))
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
    with pytest.raises(Refused, match="not both"):
        change(policy=wire_policy(SET_POLICY), reset_policy=True)


def test_pages_of_retries_go_on_and_end(live: LiveCell) -> None:
    """With their messages and without bodies; a topic selects among them."""
    first = retries(live, limit=2)
    rest = retries(live, token=first.next_token)
    assert sorted(each.message_id for each in (*first.retries, *rest.retries)) == ["M0", "M1", "R0"]
    assert (rest.next_token, first.retries[0].content.HasField("body")) == ("", False)
    assert [retry.message_id for retry in retries(live, topic="refunds").retries] == ["R0"]


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
def test_pages_that_cannot_be_are_refused(live: LiveCell, fields: dict[str, object], rule: Rule) -> None:
    """By name or by size."""
    with pytest.raises(Refused) as caught:
        retries(live, **fields)
    assert caught.value.rule is rule


@pytest.mark.parametrize("entries", [[], [""], ["7-1", " "], ["x" * 101], ["7-1"] * 1001])
def test_entries_that_cannot_be_are_refused(live: LiveCell, entries: list[str]) -> None:
    """1 to 1000 of them, by both commands."""
    for request_class in (wire.RunRetriesNowRequest, wire.EndRetriesRequest):
        with pytest.raises(Refused):
            live.ask(request_class(group="billing", entries=entries))


def test_retries_are_named_once_each(live: LiveCell) -> None:
    """Also a thousand of them; both commands count what became of them."""
    by_id = {each.message_id: each.entry for each in retries(live).retries}
    many = [by_id["M1"], *(f"7-{number}" for number in range(998)), by_id["M1"]]
    ran = live.ask(wire.RunRetriesNowRequest(group="billing", entries=many))
    ended = live.ask(wire.EndRetriesRequest(group="billing", entries=[by_id["M0"], by_id["M1"]]))
    assert ((ran.moved, ran.gone), (ended.moved, ended.gone)) == ((1, 998), (1, 1))
