"""Rates of a daemon from its totals, which it counts from the start of its process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from dmq.admin import admin_v1 as wire


class Sample(NamedTuple):
    """Totals of the daemon at a time."""

    at_ms: int
    accepted: int
    delivered: int
    acked: int


def sample_of(status: wire.GetStatusResponse) -> Sample:
    """Return the totals of a status."""
    return Sample(status.now_ms, status.totals.accepted, status.totals.delivered, status.totals.acked)


def rates_of(samples: Sequence[Sample]) -> dict[str, float] | None:
    """Return the messages per second between the first and the last sample; None without two of one run."""
    if len(samples) < 2:
        return None
    first, last = samples[0], samples[-1]
    seconds = (last.at_ms - first.at_ms) / 1000
    if seconds <= 0 or last.accepted < first.accepted:  # the clock was set, or the daemon was restarted
        return None
    return {name: (getattr(last, name) - getattr(first, name)) / seconds for name in ("accepted", "delivered", "acked")}
