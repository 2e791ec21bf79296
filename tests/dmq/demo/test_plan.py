"""The demo's plan: every kind of delay and every level, all of it due before the end."""

from __future__ import annotations

from random import Random

import pytest

from dmq.demo.plan import KINDS, LEVELS, make_plan


@pytest.mark.parametrize(("messages", "seconds"), [(1, 1.0), (30, 3.0), (1000, 20.0), (500, 0.2)])
def test_everything_is_due_before_the_end(messages: int, seconds: float) -> None:
    plan = make_plan(messages, seconds, Random(7))
    assert [send.number for send in plan.sends] == list(range(messages))
    assert all(send.delay_ms >= 1 and send.at_ms + send.delay_ms <= plan.end_ms for send in plan.sends)
    assert all(send.delay_ms == plan.levels_ms[send.level - 1] for send in plan.sends if send.level)
    assert list(plan.levels_ms) == sorted(set(plan.levels_ms))


def test_every_kind_and_every_level_is_sent_and_the_kill_falls_between_sends() -> None:
    plan = make_plan(1000, 20.0, Random(7))
    assert {send.kind for send in plan.sends} == set(KINDS)
    assert {send.level for send in plan.sends if send.kind == "delay level"} == set(range(1, LEVELS + 1))
    assert plan.levels_ms == tuple(1000 * level for level in range(1, LEVELS + 1))
    assert plan.sends[0].at_ms < plan.kill_at_ms < plan.sends[-1].at_ms
