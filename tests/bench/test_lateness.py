"""The floor beside lateness: what a disk alone would make of it."""

from __future__ import annotations

import pytest

from bench.lateness import ideal_lateness_ms

pytestmark = pytest.mark.bench


def test_a_message_waits_for_the_first_sync_that_covers_it() -> None:
    """Syncs of 1, 4 and 2 ms: what is due while one runs is durable with the next; behind the last nothing is known."""
    assert ideal_lateness_ms([1.0, 4.0, 2.0], per_s=1_000) == [5.0 - 0, 7.0 - 1, 7.0 - 2, 7.0 - 3, 7.0 - 4]
