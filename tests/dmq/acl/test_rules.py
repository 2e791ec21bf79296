"""What rules allow: patterns, and that nothing is allowed that nobody allowed."""

from __future__ import annotations

import pytest

from dmq.acl.rules import ADMIN, ADMIN_KEY, GROUP, NAME_CHARS_MAX, PUB, SUB, TOPIC, AccessKey, AccessRule, Need, matches


@pytest.mark.parametrize(
    ("pattern", "matching", "other"),
    [
        ("orders", ["orders"], ["", "order", "orders2", "my-orders", "Orders"]),
        ("orders*", ["orders", "orders-eu"], ["order", "my-orders"]),
        ("*-dead", ["-dead", "a-dead"], ["a-dead2", "dead"]),
        ("a*b*c", ["abc", "a1b2c", "abbcc", "abcbc"], ["acb", "ab", "abcd", "ac"]),
        ("aa*aa", ["aaaa", "aaxaa"], ["aa", "aaa"]),
        ("*", ["", "orders", "shop%orders"], ["%DLQ%billing", "%RETRY%billing", "%"]),
        ("%*", ["%DLQ%billing", "%"], ["orders"]),
        ("%DLQ%bill*", ["%DLQ%billing"], ["%RETRY%billing", "DLQ%billing"]),
        ("shop%*", ["shop%orders"], ["shop2%orders", "orders"]),
    ],
)
def test_patterns(pattern: str, matching: list[str], other: list[str]) -> None:
    """A star stands for any characters; a name that begins with % wants a pattern that does."""
    assert [name for name in matching if not matches(pattern, name)] == []
    assert [name for name in other if matches(pattern, name)] == []


def test_a_name_that_is_too_long_to_be_one_matches_nothing() -> None:
    """Nobody checked its length yet: no time is spent on it."""
    assert matches("*", "x" * NAME_CHARS_MAX)
    assert not matches("*", "x" * (NAME_CHARS_MAX + 1))


def test_a_key_may_do_only_what_a_rule_allows() -> None:
    """Topics and groups are two worlds; rules add up; one of several actions is enough."""
    key = AccessKey(
        name="shop",
        secret=b"s",
        rules=(
            AccessRule(TOPIC, "orders*", frozenset({SUB})),
            AccessRule(TOPIC, "orders-eu", frozenset({PUB})),
            AccessRule(GROUP, "billing", frozenset({SUB})),
        ),
    )
    assert key.may(Need(SUB, TOPIC, "orders-eu"))
    assert key.may(Need(PUB, TOPIC, "orders-eu"))
    assert not key.may(Need(PUB, TOPIC, "orders-us"))
    assert key.may(Need(f"{PUB}|{SUB}", TOPIC, "orders-us"))
    assert not key.may(Need(SUB, TOPIC, "billing"))
    assert key.may(Need(SUB, GROUP, "billing"))
    assert not key.may(Need(ADMIN, GROUP, "billing"))
    assert not key.may(ADMIN_KEY)
    assert str(key.rule_for(Need(PUB, TOPIC, "orders-eu"))) == "topic orders-eu = PUB"


def test_an_admin_key_may_everything() -> None:
    """Without a rule, and names beginning with % too."""
    key = AccessKey(name="operator", secret=b"s", is_admin=True)
    assert all(map(key.may, (ADMIN_KEY, Need(PUB, TOPIC, "%DLQ%billing"), Need(ADMIN, GROUP, "billing"))))


def test_a_key_does_not_show_its_secret() -> None:
    """Not where it is printed by accident."""
    assert "hush" not in repr(AccessKey(name="shop", secret=b"hush"))
