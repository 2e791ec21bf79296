"""How many are due when, as rows for people."""

from __future__ import annotations

from dmq.cli.output.histogram import HistogramRow, due_rows

MINUTE, HOUR, DAY = 60_000, 3_600_000, 86_400_000
NOW = 1_700_006_400_000  # a whole day


def test_nothing_waits() -> None:
    """No row, and an empty bucket is none."""
    assert due_rows([], 0, NOW) == []
    assert due_rows([(NOW + MINUTE, 0)], 0, NOW) == []


def test_minutes_of_several_groups_are_added_up() -> None:
    """In the order of time, with what is overdue first and what no bucket tells last."""
    buckets = [(NOW + 2 * MINUTE, 3), (NOW - MINUTE, 4), (NOW + MINUTE, 1), (NOW + 2 * MINUTE, 2), (NOW, 1)]
    assert due_rows(buckets, 13, NOW) == [
        HistogramRow("overdue", 5),
        HistogramRow("within 1m", 1),
        HistogramRow("within 2m", 5),
        HistogramRow("later", 2),
    ]


def test_rows_get_longer_so_that_they_stay_few() -> None:
    """Minutes up to an hour, hours up to sixty, then days; no message is lost on the way."""
    for ahead, rows, label in ((HOUR, 60, "1m"), (60 * HOUR, 60, "1h"), (60 * HOUR + MINUTE, 3, "1d")):
        found = due_rows([(NOW + at, 1) for at in range(MINUTE, ahead + 1, MINUTE)], 0, NOW)
        assert len(found) == rows
        assert sum(row.messages for row in found) == ahead // MINUTE
        assert found[0].label == f"within {label}"


def test_a_part_of_an_hour_belongs_to_its_hour() -> None:
    """A row's time is the end of its span, also where now is in the middle of one."""
    now = NOW + 30 * MINUTE
    found = due_rows([(NOW + 40 * MINUTE, 1), (NOW + HOUR, 2), (NOW + HOUR + MINUTE, 4), (NOW + 9 * HOUR, 8)], 15, now)
    assert [(row.label, row.messages) for row in found] == [
        ("within 30m", 3),
        ("within 1h 30m", 4),
        ("within 8h 30m", 8),
    ]
