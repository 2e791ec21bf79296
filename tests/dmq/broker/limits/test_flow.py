"""How fast a topic or a group goes on: never more in a second than it may, and as much as that in the long run."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dmq.broker.limits.flow import (
    BURST_S,
    RAMP_FIRST_PER_S,
    RAMP_STEP_S,
    RAMP_STEPS,
    Flow,
    full,
    ramp,
    rate_of,
    refilled,
    taken,
    wait_s,
)


def passed(flow: Flow, rate: int | None, steps_s: list[float]) -> list[tuple[float, int]]:
    """Take all that may go on after each step; return when, and how many."""
    found: list[tuple[float, int]] = []
    now_s = flow.at_s
    for step_s in steps_s:
        now_s += step_s
        flow = refilled(flow, rate, now_s)
        found.append((now_s, int(flow.allowed)))
        flow = taken(flow, int(flow.allowed))
    return found


@given(st.integers(1, 5_000), st.lists(st.floats(0, 3), min_size=1, max_size=60))
def test_no_second_has_more_than_the_rate_and_the_saved_tokens(rate: int, steps_s: list[float]) -> None:
    """Whatever the pauses between the looks: in no second go more than the rate and one burst."""
    found = passed(full(rate, 100.0), rate, steps_s)
    for begin_s, _ in found:
        within = sum(count for at_s, count in found if begin_s <= at_s < begin_s + 1)
        assert within <= rate + max(1.0, rate * BURST_S) + 1


@given(st.integers(1, 5_000))
def test_the_rate_is_reached(rate: int) -> None:
    """Who always has more than may go on gets the whole rate."""
    found = passed(full(rate, 0.0), rate, [0.01] * 300)
    assert sum(count for _, count in found) >= rate * 2.9


def test_a_ramp_begins_slowly_and_doubles() -> None:
    """What goes on in each second is about twice that of the second before, from the first rate on."""
    found = passed(ramp(50.0), None, [0.01] * 500)
    counts = [sum(count for at_s, count in found if second < at_s - 50.0 <= second + 1) for second in range(5)]
    for number, count in enumerate(counts):
        assert abs(count - RAMP_FIRST_PER_S * 2**number) <= 2**number * 3, counts


def test_a_rate_bounds_the_ramp() -> None:
    """A resumed topic with a rate goes no faster than that, and no faster than the ramp."""
    flow = ramp(0.0)
    assert rate_of(flow, 30, 0.0) == 30
    assert rate_of(flow, 300, 0.0) == RAMP_FIRST_PER_S
    assert rate_of(flow, 300, 2 * RAMP_STEP_S) == 300
    assert rate_of(flow, None, 1_000 * RAMP_STEP_S) == RAMP_FIRST_PER_S * 2**RAMP_STEPS


@given(st.integers(1, 100_000), st.floats(0, 1))
def test_after_the_wait_it_is_worth_a_turn(rate: int, gone_s: float) -> None:
    """Who waits as long as he is told is not told to wait again, and something may go on."""
    flow = refilled(taken(full(rate, 0.0), int(full(rate, 0.0).allowed)), rate, gone_s)
    left_s = wait_s(flow, rate, gone_s)
    later = refilled(flow, rate, gone_s + left_s + 1e-6)
    assert wait_s(later, rate, gone_s + left_s + 1e-6) == 0
    assert int(later.allowed) >= 1
