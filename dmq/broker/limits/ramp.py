"""How fast a topic or a group goes on: at a rate that was set, and slowly at first after a pause. Pure.

A *flow* is a bucket: what may go on gathers in it, a fraction of a second's worth at most, so that a rate holds in
every second and not on average. After a pause what may go on in a second begins at ``RAMP_FIRST_PER_S`` and doubles
every ``RAMP_STEP_S``, so that whoever is behind it is not met by all that was held at once. Time is monotonic.
"""

from __future__ import annotations

from typing import NamedTuple

RAMP_FIRST_PER_S = 100
RAMP_STEP_S = 1.0
RAMP_STEPS = 14  # then it ends: 1.6 million a second bound nothing
BURST_S = 0.25  # how much of a second gathers while nothing goes on
STEP_S = 0.02  # what may go on within it goes together


class Flow(NamedTuple):
    """How many messages may go on at ``at_s``; and since when the ramp runs, ``None``: it does not."""

    allowed: float
    at_s: float
    ramp_since_s: float | None = None


def full(rate: int, now_s: float) -> Flow:
    """Return the flow of one that was not slowed before, with ``rate`` messages a second."""
    return Flow(_most(rate), now_s)


def ramp(now_s: float) -> Flow:
    """Return the flow of one that goes on after a pause."""
    return Flow(RAMP_FIRST_PER_S * STEP_S, now_s, now_s)


def rate_of(flow: Flow, rate: int | None, now_s: float) -> float:
    """Return how many messages a second may go on now; ``rate`` is what was set, ``None``: nothing was."""
    steps = RAMP_STEPS if flow.ramp_since_s is None else int((now_s - flow.ramp_since_s) / RAMP_STEP_S)
    most = RAMP_FIRST_PER_S * 2.0 ** max(0, min(steps, RAMP_STEPS))
    return most if rate is None else min(most, rate)


def refilled(flow: Flow, rate: int | None, now_s: float) -> Flow:
    """Return the flow with what has gathered since."""
    most = _most(rate_of(flow, rate, now_s))
    since = rate_of(flow, rate, flow.at_s) * (now_s - flow.at_s) if now_s > flow.at_s else 0.0
    return flow._replace(allowed=min(most, flow.allowed + since), at_s=max(now_s, flow.at_s))


def taken(flow: Flow, count: int) -> Flow:
    """Return the flow after ``count`` messages went on."""
    return flow._replace(allowed=flow.allowed - count)


def wait_s(flow: Flow, rate: int | None, now_s: float) -> float:
    """Return how long until what may go on is worth a turn, 0: it is now."""
    per_s = rate_of(flow, rate, now_s)
    wanted = min(_most(per_s), max(1.0, per_s * STEP_S))
    return max(0.0, (wanted - flow.allowed) / per_s) if flow.allowed < wanted else 0.0


def _most(per_s: float) -> float:
    return max(1.0, per_s * BURST_S)
