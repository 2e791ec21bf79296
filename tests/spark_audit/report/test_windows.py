"""Numbers in words, and the windows merged for drawing."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spark_audit.report import text
from spark_audit.report.windows import COLUMNS_MAX, Axis, Grid, WindowState, WindowTally

START_MS = 1_795_219_200_000
WINDOW_MS = 600_000


@pytest.mark.parametrize(
    ("value_ms", "words"),
    [
        (0, "0 ms"), (999, "999 ms"), (1000, "1 s"), (1250, "1.25 s"), (59_999, "60 s"), (60_000, "1 min"),
        (125_000, "2 min 5 s"), (3_600_000, "1 h"), (5_400_000, "1 h 30 min"), (90_000_000, "1 d 1 h"),
        (400 * 86_400_000, "400 d"), (-125_000, "-2 min 5 s"), (None, "none"),
    ],
)  # fmt: skip
def test_durations(value_ms: int | None, words: str) -> None:
    """At most two units."""
    assert text.duration(value_ms) == words


def test_times_are_utc_and_marked_so() -> None:
    """Thousandths only where there are some; no time is too far away."""
    assert text.utc(START_MS) == "2026-11-21 00:00:00 UTC"
    assert text.utc(START_MS + 7) == "2026-11-21 00:00:00.007 UTC"
    assert text.utc(None) == "unknown"
    assert text.utc(10**17).endswith("ms since 1970")
    assert text.span(START_MS, START_MS + 600_000) == "2026-11-21 00:00 to 00:10 UTC"
    assert text.span(START_MS, START_MS + 86_400_000) == "2026-11-21 00:00 to 2026-11-22 00:00 UTC"


def test_a_share_is_never_rounded_to_none_or_all() -> None:
    """One lost message of ten million is not 0 %, and the rest is not 100 %."""
    shares = [text.share(part, 10_000_000) for part in (0, 1, 5_000_000, 9_999_999, 10_000_000)]
    assert shares == ["0 %", "< 0.01 %", "50.0 %", "> 99.99 %", "100 %"]


def report_of(from_ms: int, to_ms: int, watermark_ms: int, starts: list[int]) -> dict[str, Any]:
    rows = [{"window_start_ms": start, "topic": "orders", "scheduled": 1, "fired": 1} for start in starts]
    times = {"from_ms": from_ms, "to_ms": to_ms, "watermark_ms": watermark_ms}
    return {"range": times, "window_ms": WINDOW_MS, "scheduled": rows}


times = st.integers(min_value=0, max_value=2**53)


@given(times, times, times, st.lists(times, max_size=5))
def test_an_axis_always_has_a_sensible_number_of_columns(
    from_ms: int, to_ms: int, watermark_ms: int, starts: list[int]
) -> None:
    """Whatever the range is: whole windows per column, no more columns than can be drawn, nothing counted twice."""
    report = report_of(from_ms, to_ms, watermark_ms, starts)
    axis = Axis.of(report)
    grid = Grid.of(axis, report["scheduled"])
    assert 1 <= axis.columns <= COLUMNS_MAX
    assert axis.column_ms % WINDOW_MS == 0
    inside = sum(tally["scheduled"] for tally in grid.columns.values())
    assert inside + grid.outside["scheduled"] == grid.total["scheduled"] == len(starts)


@pytest.mark.parametrize(("windows", "each"), [(1, 1), (96, 1), (144, 2), (1008, 12), (10_000, 144)])
def test_windows_are_merged_into_round_columns(windows: int, each: int) -> None:
    """And the range is covered from its beginning to its end."""
    end_ms = START_MS + windows * WINDOW_MS
    axis = Axis.of(report_of(START_MS, end_ms, end_ms, []))
    assert axis.windows_each == each
    assert axis.from_ms <= START_MS
    assert axis.to_ms >= end_ms


def test_one_message_due_in_forty_years_does_not_squash_the_rest() -> None:
    """It is counted outside the picture."""
    far_ms = START_MS + 40 * 365 * 86_400_000
    starts = [START_MS + window * WINDOW_MS for window in range(24)]
    report = report_of(0, far_ms + 1, START_MS + 24 * WINDOW_MS, [*starts, far_ms])
    axis = Axis.of(report)
    grid = Grid.of(axis, report["scheduled"])
    assert len(grid.columns) == 24
    assert grid.outside["scheduled"] == 1


@pytest.mark.parametrize(
    ("counts", "state"),
    [
        ({}, WindowState.EMPTY), ({"scheduled": 5, "fired": 5}, WindowState.CLEAN),
        ({"accepted_at_once": 5}, WindowState.CLEAN),
        ({"scheduled": 5, "pending": 4, "cancelled": 1}, WindowState.WAITING),
        ({"scheduled": 5, "late": 1}, WindowState.LATE),
        ({"scheduled": 500, "duplicated": 1}, WindowState.FEW_LATE), ({"scheduled": 5, "overdue": 1}, WindowState.LATE),
        ({"scheduled": 5, "late": 5, "inconclusive": 1}, WindowState.INCONCLUSIVE),
        ({"scheduled": 5, "inconclusive": 4, "lost": 1}, WindowState.LOST),
    ],
)  # fmt: skip
def test_a_field_shows_the_worst_in_it(counts: dict[str, int], state: WindowState) -> None:
    """One lost message outweighs all else."""
    tally = WindowTally()
    tally.add(counts)
    assert tally.state is state


def test_of_merged_windows_the_worst_percentile_is_kept() -> None:
    """Percentiles cannot be added up, and none is no 0."""
    tally = WindowTally()
    for value in (7, None, 900, 3):
        tally.add({"lateness_p99_ms": value, "lateness_p50_ms": None})
    assert tally.worst_ms == {"lateness_p99_ms": 900}


def test_a_range_mostly_ahead_is_cut_at_the_watermark() -> None:
    """Nothing can have happened there yet, and it would squash what has."""
    day_ms = 86_400_000
    axis = Axis.of(report_of(START_MS, START_MS + 30 * day_ms, START_MS + day_ms, []))
    assert START_MS + day_ms < axis.to_ms < START_MS + 2 * day_ms
