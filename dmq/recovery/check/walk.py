"""Part of a check that is the same in every store: timeline, index, outbox, and the figures of pending entries."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from dmq.errors import StoreCorrupt
from dmq.recovery.reading.findings import Findings, Pages, RowTotal, check_outbox
from dmq.recovery.reading.log_repair import Tell
from dmq.recovery.reading.look import Look
from dmq.recovery.reading.names import NAME_LETTERS
from dmq.recovery.reading.rows import mark_of, read_figure
from dmq.store.schema import keys
from dmq.store.schema.accounting.counts import due_in, end_of_minute
from dmq.store.schema.accounting.outbox import OutboxState, decode_state
from dmq.store.schema.keys import Family

LookT = TypeVar("LookT", bound=Look)


class Pending(NamedTuple):
    """Pending entry of any kind, with its name for findings."""

    name: str
    mark: int
    scope: int
    index_id: bytes
    deliver_at_ms: int


class StoreWalk(ABC, Generic[LookT]):
    """Reads every row of an open store; a subclass checks the families that its kind of store uses."""

    def __init__(self, look: LookT, findings: Findings, tell: Tell) -> None:
        self._look = look
        self._find = findings.add
        self._findings = findings
        self._read = Pages(tell)
        self._totals: dict[str, RowTotal] = {}
        self._counts: dict[int, _Count] = {}  # pending entries by scope
        self._indexed = 0  # index rows of pending entries
        self._last_sequence = 0
        self._figures = {key: value for key, value in look.rows(Family.META, b"A", b"[") if len(key) == 1}
        self._done = int.from_bytes(self._figures.get(keys.META_DONE, b""), "big")

    @property
    def rows(self) -> int:
        """Number of rows read."""
        return self._read.rows

    def run(self) -> Findings:
        """Check all families; return the findings."""
        for part in self._parts():
            try:
                part()
            except StoreCorrupt as error:
                self._find("row", str(error))
        for hole in self._look.holes:
            self._find("damage", f"{hole} cannot be read: {hole.error}")
        return self._findings

    @abstractmethod
    def _parts(self) -> Sequence[Callable[[], None]]: ...

    @abstractmethod
    def _scope_name(self, scope: int) -> str: ...

    @abstractmethod
    def _name_of_index(self, key: bytes) -> str:
        """Return the name of the entry of an index row, for findings."""

    def _meta_row(self, key: bytes, value: bytes) -> None:
        """Record a valid row of the meta family."""

    def _pages(self, family: Family) -> Iterator[list[tuple[bytes, bytes]]]:
        return self._read.of(self._look.rows(family), family.name.lower())

    def _count(self, kind: str, key: bytes, value: bytes) -> None:
        total = self._totals.get(kind, RowTotal())
        self._totals[kind] = RowTotal(total.rows + 1, total.size_bytes + len(key) + len(value))

    def _bad_row(self, family: Family, key: bytes, value: bytes, error: StoreCorrupt) -> None:
        self._count(f"{family.name.lower()} that makes no sense", key, value)
        self._find("row", f"{family.name.lower()} {key.hex()}: {error}")

    # -- pending entries and the index --------------------------------------------------------------------------------

    def _check_pending(self, entries: Sequence[Pending]) -> None:
        """Compare entries of the timeline with the index, and count them."""
        wanted = [keys.pack_index_prefix(keys.WAITING_GENERATION, each.scope) + each.index_id for each in entries]
        for each, row in zip(entries, self._look.get_many(Family.INDEX, wanted), strict=True):
            self._last_sequence = max(self._last_sequence, keys.sequence_of(each.mark))
            self._counts.setdefault(each.scope, _Count()).add(end_of_minute(each.deliver_at_ms), 1)
            if row is None:
                self._find("index", f"{each.name} is not in the index")
            elif row and mark_of(row) != each.mark:
                self._find("index", f"{each.name} waits elsewhere by the index")
            if each.mark < self._done:
                self._find("mark", f"{each.name} lies below the mark {self._done:032x}: it would never be delivered")

    def _check_indexed(self, rows: Sequence[tuple[bytes, bytes]]) -> None:
        """Check that the entries of index rows are on the timeline; ``rows`` has the keys of both."""
        self._indexed += len(rows)
        entries = self._look.get_many(Family.TIMELINE, [row for _, row in rows])
        for (key, _), entry in zip(rows, entries, strict=True):
            if entry is None:
                self._find("index", f"{self._name_of_index(key)} waits by the index, but is not there")

    def _compare_index(self) -> None:
        """Find index rows that lead to the entry of another one."""
        pending = sum(each.total for each in self._counts.values())
        if self._indexed != pending and not self._findings.count:
            self._find("index", f"{pending:,} entries on the timeline, {self._indexed:,} in the index")

    # -- audit and figures --------------------------------------------------------------------------------------------

    def _audit(self) -> None:
        check_outbox(self._pages(Family.AUDIT), self._outbox_state(), self._find, self._saw_events)

    def _saw_events(self, key: bytes, block: bytes, error: StoreCorrupt | None) -> None:
        if error is not None:
            self._bad_row(Family.AUDIT, key, block, error)
        else:
            self._count("audit", key, block)

    def _outbox_state(self) -> OutboxState:
        with suppress(StoreCorrupt):  # reported by the scan of the family
            return decode_state(self._figures.get(keys.META_OUTBOX))
        return decode_state(None)

    def _meta(self) -> None:
        claimed: dict[int, _Count] = {}
        totals: Counter[int] = Counter()
        for page in self._pages(Family.META):
            for key, value in page:
                if key[:1] in NAME_LETTERS:
                    self._count("meta: name", key, value)
                    continue
                try:
                    kind = read_figure(key, value)
                    self._meta_row(key, value)
                except StoreCorrupt as error:
                    self._bad_row(Family.META, key, value, error)
                    continue
                self._count(f"meta: {kind}", key, value)
                if key[:1] == keys.META_TOTAL:
                    totals[keys.meta_id(key)] = keys.unpack_u64(value)
                elif key[:1] == keys.META_HOUR:
                    claimed.setdefault(keys.meta_id(key), _Count()).add_hour(key, value)
        is_format_1 = self._figures.get(keys.META_FORMAT) == keys.pack_u64(1)  # counts by the minute are in other rows
        for scope in sorted(self._counts.keys() | totals.keys() | claimed.keys()):
            found, said = self._counts.get(scope, _Count()), claimed.get(scope, _Count())
            if found.total != totals[scope]:
                text = f"{found.total:,} entries wait for {self._scope_name(scope)}, the figure says {totals[scope]:,}"
                self._find("figure", text)
            if found != said and not is_format_1:
                self._find("figure", f"the counts by the minute of {self._scope_name(scope)} are wrong")
        if keys.META_FORMAT not in self._figures:
            self._find("row", "the format version is missing")
        last = int.from_bytes(self._figures.get(keys.META_SEQUENCE, b""), "big")
        if last < self._last_sequence:
            self._find("mark", f"the last sequence is {last:,}, but {self._last_sequence:,} is there")


@dataclass(slots=True)
class _Count:
    """Entries of a scope by minute: their number, and a digest that differs if the count of any minute does."""

    total: int = 0
    mixed: int = 0

    def add(self, until_ms: int, count: int) -> None:
        self.total += count
        digest = hashlib.blake2b(until_ms.to_bytes(8, "big"), digest_size=16).digest()
        self.mixed = (self.mixed + count * int.from_bytes(digest, "big")) % 2**128

    def add_hour(self, key: bytes, value: bytes) -> None:
        for each in due_in(key, value):
            self.add(each.until_ms, each.count)
