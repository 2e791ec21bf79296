"""The demo's plan: every kind of delay and every level, all of it due before the end."""

from __future__ import annotations

from random import Random

import pytest

from dmq.demo.facts import Received, Sent, from_line, to_line
from dmq.demo.plan import LEVELS, Kind, make_plan


@pytest.mark.parametrize(("messages", "seconds"), [(1, 1.0), (30, 3.0), (1000, 20.0), (500, 0.2)])
def test_everything_is_due_before_the_end(messages: int, seconds: float) -> None:
    plan = make_plan(messages, seconds, Random(7))
    assert [send.number for send in plan.sends] == list(range(messages))
    assert all(send.delay_ms >= 1 and send.at_ms + send.delay_ms <= plan.end_ms for send in plan.sends)
    assert all(send.delay_ms == plan.levels_ms[send.level - 1] for send in plan.sends if send.kind is Kind.LEVEL)
    assert len(plan.levels_ms) == LEVELS
    assert list(plan.levels_ms) == sorted(set(plan.levels_ms))


def test_every_kind_and_every_level_is_sent_and_the_kill_falls_between_sends() -> None:
    plan = make_plan(1000, 20.0, Random(7))
    assert {send.kind for send in plan.sends} == set(Kind)
    assert {send.level for send in plan.sends if send.kind is Kind.LEVEL} == set(range(1, LEVELS + 1))
    assert plan.levels_ms == tuple(1000 * level for level in range(1, LEVELS + 1))
    assert plan.sends[0].at_ms < plan.kill_at_ms < plan.sends[-1].at_ms


def test_a_fact_survives_its_line() -> None:
    for fact in (Sent(1, "id", 0, 2, 3, 1), Received(1, 1, "id", 5, 4, 1)):
        assert from_line(to_line(fact)) == fact
    for line in ("", "[]", "[1]", '["Sent",1]', '["Other"]', "{}"):
        with pytest.raises(ValueError, match="no fact"):
            from_line(line)
