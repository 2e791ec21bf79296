"""Histograms of due times, as text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

import typer

from dmq.cli.output.output import about, show_table

_MINUTE_MS, _HOUR_MS, _DAY_MS = 60_000, 3_600_000, 86_400_000
_ROWS_MAX = 60
_BAR_CHARS = 40


class HistogramRow(NamedTuple):
    """Number of messages in the time span that ``label`` names."""

    label: str
    messages: int


def due_rows(buckets: Iterable[tuple[int, int]], waiting: int, now_ms: int) -> list[HistogramRow]:
    """Return rows for buckets of ``(until_ms, count)``, merged by minute, hour or day to keep them few; none is empty.

    ``waiting`` is the total; messages in no bucket are due after all buckets.
    """
    found = [(until_ms, count) for until_ms, count in buckets if count]
    ahead_ms = max((until_ms for until_ms, _ in found), default=now_ms) - now_ms
    step_ms = next((step for step in (_MINUTE_MS, _HOUR_MS) if ahead_ms <= step * _ROWS_MAX), _DAY_MS)
    overdue = 0
    due: Counter[int] = Counter()
    for until_ms, count in found:
        if until_ms <= now_ms:
            overdue += count
        else:
            due[-(-until_ms // step_ms) * step_ms] += count
    rows = [HistogramRow("overdue", overdue)] if overdue else []
    rows += [HistogramRow(f"within {about(until_ms - now_ms)}", count) for until_ms, count in sorted(due.items())]
    later = waiting - sum(count for _, count in found)
    return [*rows, HistogramRow("later", later)] if later > 0 else rows


def show_due(heading: str, buckets: Iterable[tuple[int, int]], waiting: int, now_ms: int) -> None:
    """Print ``due_rows`` with bars after an empty line; print nothing if there are no rows."""
    show_spans(heading, due_rows(buckets, waiting, now_ms))


def show_spans(heading: str, spans: Iterable[tuple[str, int]]) -> None:
    """Print the count of each time span with bars after an empty line; print nothing if all counts are 0."""
    rows = [(label, count) for label, count in spans if count]
    if rows:
        most = max(count for _, count in rows)
        typer.echo()
        show_table(
            ("DUE", heading, ""),
            [(label, f"{count:,}", "#" * -(-count * _BAR_CHARS // most)) for label, count in rows],
            numbers=(heading,),
        )
