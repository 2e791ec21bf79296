"""Which proxy of a cluster the messages of a message group go to."""

from __future__ import annotations

from broker_adapter.rocketmq.routes import place_of_message_group

PROXIES = [f"10.0.0.{number}:8081" for number in range(1, 6)]
GROUPS = [f"order-{number}" for number in range(2_000)]


def test_a_message_group_stays_while_its_proxy_is_there() -> None:
    """Whatever the order of the route; if one leaves only its own groups move, and they come back with it."""
    before = {each: place_of_message_group(each, PROXIES) for each in GROUPS}
    assert before == {each: place_of_message_group(each, reversed(PROXIES)) for each in GROUPS}
    gone, *left = PROXIES
    after = {each: place_of_message_group(each, left) for each in GROUPS}
    assert all(after[each] == place for each, place in before.items() if place != gone)


def test_message_groups_are_spread() -> None:
    """Each proxy has about its share."""
    places = [place_of_message_group(each, PROXIES) for each in GROUPS]
    assert all(300 < places.count(each) < 500 for each in PROXIES)
