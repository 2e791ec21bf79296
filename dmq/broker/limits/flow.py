"""Flow of messages to a topic or a group: at a fixed rate, and with a ramp after a pause. Pure.

A *flow* is a bucket that fills with a fraction of a second's worth at most. So a rate holds in every second and not
only on average. After a pause the rate starts at ``RAMP_FIRST_PER_S`` and doubles every ``RAMP_STEP_S`` seconds. So the
consumers are not flooded with all held messages at once. Time is monotonic.
"""

from __future__ import annotations

from typing import NamedTuple

RAMP_FIRST_PER_S = 100
RAMP_STEP_S = 1.0
RAMP_STEPS = 14  # then the ramp ends: 1.6 million a second is no limit in practice
BURST_S = 0.25  # capacity of the bucket in seconds of the rate
STEP_S = 0.02  # messages of this interval are delivered together


class Flow(NamedTuple):
    """Messages allowed at ``at_s``, and the start of the ramp; ``None``: no ramp."""

    allowed: float
    at_s: float
    ramp_since_s: float | None = None


def full(rate: int, now_s: float) -> Flow:
    """Return a full bucket for ``rate`` messages a second."""
    return Flow(_most(rate), now_s)


def ramp(now_s: float) -> Flow:
    """Return the flow at the start of a ramp."""
    return Flow(RAMP_FIRST_PER_S * STEP_S, now_s, now_s)


def rate_of(flow: Flow, rate: int | None, now_s: float) -> float:
    """Return the current rate in messages a second; ``rate`` is the configured one, ``None``: unlimited."""
    steps = RAMP_STEPS if flow.ramp_since_s is None else int((now_s - flow.ramp_since_s) / RAMP_STEP_S)
    most = RAMP_FIRST_PER_S * 2.0 ** max(0, min(steps, RAMP_STEPS))
    return most if rate is None else min(most, rate)


def refilled(flow: Flow, rate: int | None, now_s: float) -> Flow:
    """Return the flow refilled up to ``now_s``."""
    most = _most(rate_of(flow, rate, now_s))
    since = rate_of(flow, rate, flow.at_s) * (now_s - flow.at_s) if now_s > flow.at_s else 0.0
    return flow._replace(allowed=min(most, flow.allowed + since), at_s=max(now_s, flow.at_s))


def taken(flow: Flow, count: int) -> Flow:
    """Return the flow after ``count`` messages."""
    return flow._replace(allowed=flow.allowed - count)


def wait_s(flow: Flow, rate: int | None, now_s: float) -> float:
    """Return the seconds until enough is allowed for one turn; 0: now."""
    per_s = rate_of(flow, rate, now_s)
    wanted = min(_most(per_s), max(1.0, per_s * STEP_S))
    return max(0.0, (wanted - flow.allowed) / per_s) if flow.allowed < wanted else 0.0


def _most(per_s: float) -> float:
    return max(1.0, per_s * BURST_S)
