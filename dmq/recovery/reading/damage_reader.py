"""Damage reader: reads all readable rows, around damaged blocks, and within their ranges from other tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from dmq.errors import StoreCorrupt, StoreError
from dmq.producer_store.directories.findings import Pages
from dmq.producer_store.directories.inspect import Look
from dmq.producer_store.directories.salvage_log import Tell
from dmq.producer_store.entries.damage import Hole
from dmq.producer_store.salvage.rest import table_of, without
from dmq.store.schema.keys import Family

_END = b"\xff" * 48


class DamageReader:
    """A look at the store, and a second one at a copy without the damaged tables."""

    def __init__(self, look: Look, path: Path, work: Path, tell: Tell, stack: ExitStack) -> None:
        """Read everything once to find the damaged ranges; ``stack`` closes the opened copies."""
        self.look = look
        self._tell = tell
        self._other: Look | None = None
        looked = Pages(tell)
        for family in Family:
            for page in looked.of(look.rows(family), family.name.lower()):
                del page
        self.holes: tuple[Hole, ...] = tuple(sorted(look.holes))
        if tables := {table for hole in self.holes if (table := table_of(hole))}:
            with suppress(StoreError):
                self._other = without(look, path, work, tables, tell, stack)

    @property
    def is_whole(self) -> bool:
        """Whether no loss is known."""
        return not self.holes and not self.look.has_lost_writes

    def has_holes(self, family: Family) -> bool:
        """Whether rows of a family may be lost, or have an older state."""
        return self.look.has_lost_writes or any(hole.family is family for hole in self.holes)

    def rows(self, family: Family, start: bytes = b"", stop: bytes = _END) -> Iterator[tuple[bytes, bytes]]:
        """Yield the rows of a range, in order."""
        holes = [hole for hole in self.holes if hole.family is family and hole.first < stop and hole.end > start]
        for key, value in self.look.rows(family, start, stop):
            while holes and holes[0].first <= key:
                yield from self._in_hole(holes.pop(0), start, stop)
            yield key, value
        for hole in holes:
            yield from self._in_hole(hole, start, stop)

    def pages(self, family: Family) -> Iterator[list[tuple[bytes, bytes]]]:
        """Yield all rows of a family, in order, in pages."""
        return Pages(lambda text: self._tell(f"saving: {text}")).of(self.rows(family), family.name.lower())

    def get_many(self, family: Family, wanted: Sequence[bytes]) -> list[bytes | None]:
        """Return rows as far as they can be read, else ``None``."""
        try:
            return self.look.source.get_many(family, wanted)
        except StoreCorrupt:
            return [self._get(family, key) for key in wanted]

    def _get(self, family: Family, key: bytes) -> bytes | None:
        for look in (self.look, self._other):
            with suppress(StoreCorrupt):
                if look is not None and (value := look.source.get_many(family, [key])[0]) is not None:
                    return value
        return None

    def _in_hole(self, hole: Hole, start: bytes, stop: bytes) -> Iterator[tuple[bytes, bytes]]:
        if self._other is not None:
            yield from self._other.rows(hole.family, max(hole.first, start), min(hole.end, stop))
