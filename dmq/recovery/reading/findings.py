"""Progress and findings of a scan of a store or a spool, with a bounded number of texts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import NamedTuple, TypeVar

from dmq.errors import StoreCorrupt
from dmq.recovery.reading.log_repair import Tell
from dmq.store.schema.accounting.outbox import OutboxState, decode_block
from dmq.trail.events import EventKind, decode_event, gap_count

SHOWN_MAX = 10  # texts kept per kind of finding
_PAGE = 512
_Row = TypeVar("_Row")


@dataclass(slots=True)
class Findings:
    """Findings: the count of each kind, and the first texts."""

    shown_max: int = SHOWN_MAX
    count: Counter[str] = field(default_factory=Counter)
    first: dict[str, list[str]] = field(default_factory=dict)

    def add(self, kind: str, text: str) -> None:
        """Add one finding."""
        self.count[kind] += 1
        shown = self.first.setdefault(kind, [])
        if len(shown) < self.shown_max:
            shown.append(text)

    def lines(self) -> list[str]:
        """Return the texts, and the number of further findings of each kind."""
        more = [(count - len(self.first[kind]), kind) for kind, count in self.count.items()]
        texts = [text for shown in self.first.values() for text in shown]
        return texts + [f"{left:,} more of {kind}" for left, kind in more if left]


class RowTotal(NamedTuple):
    """Rows of one kind, and the bytes of their keys and values."""

    rows: int = 0
    size_bytes: int = 0


class CheckReport(NamedTuple):
    """Row counts and findings of a checked store."""

    path: Path
    totals: dict[str, RowTotal]
    findings: Findings

    def as_json(self) -> dict[str, object]:
        """Return the result as JSON values."""
        found = self.findings
        return {
            "path": str(self.path),
            "is_whole": not found.count,
            "rows": [{"kind": kind, **total._asdict()} for kind, total in self.totals.items()],
            "findings": [
                {"kind": kind, "count": found.count[kind], "first": found.first[kind]} for kind in found.count
            ],
        }


class Pages:
    """Splits rows into pages, and reports the number of rows read so far."""

    def __init__(self, tell: Tell) -> None:
        self._tell = tell
        self.rows = 0

    def of(self, rows: Iterator[_Row], where: str) -> Iterator[list[_Row]]:
        """Yield the rows of one place in pages."""
        while page := list(islice(rows, _PAGE)):
            self.rows += len(page)
            self._tell(f"{self.rows:,} rows read, in {where}")
            yield page


def check_outbox(
    pages: Iterable[list[tuple[bytes, bytes]]],
    state: OutboxState,
    find: Callable[[str, str], None],
    saw: Callable[[bytes, bytes, StoreCorrupt | None], None],
) -> None:
    """Compare the rows of the outbox with its state; call ``saw`` for each row, with its read error or None."""
    at, size = state.first_sequence, 0
    missing: list[tuple[int, int]] = []
    told: set[tuple[int, int]] = set()
    for page in pages:
        for key, block in page:
            sequence = int.from_bytes(key, "big")
            size += len(block)
            if sequence != at:
                missing.append((at, sequence - at))
            at = sequence + 1
            try:
                for record in decode_block(key, block):
                    event = decode_event(record.event)
                    at = record.sequence + 1
                    if event.kind is EventKind.GAP:
                        told.add((event.time_ms, gap_count(event)))
            except StoreCorrupt as error:
                saw(key, block, error)
            else:
                saw(key, block, None)
    if at != state.next_sequence:
        missing.append((at, state.next_sequence - at))
    for first, count in missing:
        if (first, count) not in told:
            find("audit", f"audit events {first:,} up to {first + count:,} are missing")
    if size != state.stored_bytes:
        find("figure", f"the outbox has {size:,} bytes, its figure says {state.stored_bytes:,}")
