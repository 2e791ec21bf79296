"""Check of a directory of the producer store: entries, key queues and totals by type, and the rules of every store."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from dmq.errors import StoreCorrupt
from dmq.producer_store import size_of
from dmq.recovery.check.walk import Pending, StoreWalk
from dmq.recovery.reading.findings import Findings
from dmq.recovery.reading.log_repair import Tell
from dmq.recovery.reading.spool import SpoolLook
from dmq.store.schema import keys
from dmq.store.schema import spool as schema
from dmq.store.schema.keys import Family
from dmq.store.schema.messages.index import decode_index
from dmq.store.schema.spool import KeyQueueId, TypeTotals
from retry.sink import UID_BYTES, Entry

_TOLD_MAX = 100


class SpoolCheck(StoreWalk[SpoolLook]):
    """Reads every row of an open copy and collects findings, the first hundred of each kind."""

    def __init__(self, look: SpoolLook, tell: Tell) -> None:
        super().__init__(look, Findings(_TOLD_MAX), tell)
        self._found: dict[int, TypeTotals] = {}  # by type
        self._claimed: dict[int, TypeTotals] = {}
        self._heads = 0  # keyed entries on the timeline

    @property
    def waiting(self) -> int:
        """Number of waiting entries."""
        return sum(each.waiting for each in self._found.values())

    @property
    def dead(self) -> int:
        """Number of entries in the dead set."""
        return sum(each.dead for each in self._found.values())

    def _parts(self) -> Sequence[Callable[[], None]]:
        families = (self._timeline, self._index, self._group, self._audit, self._queue, self._meta)
        return *families, self._compare_totals, self._unreadable

    def _unreadable(self) -> None:
        for row in self._look.unreadable:
            self._find("row", f"{row.family.name.lower()} {row.key.hex()} is no entry: {row.error}")

    def _scope_name(self, scope: int) -> str:
        return f"type {self._look.type_name(scope)}"

    def _add(self, type_id: int, waiting: int, size: int, dead: int) -> None:
        was = self._found.get(type_id, TypeTotals())
        self._found[type_id] = TypeTotals(was.waiting + waiting, was.waiting_bytes + size, was.dead + dead)

    # -- families -----------------------------------------------------------------------------------------------------

    def _timeline(self) -> None:
        for page in self._read.of(self._look.waiting(), "timeline"):
            pending = []
            for each in page:
                entry, mark = each.entry, int.from_bytes(each.key, "big")
                name = f"{_name(entry)}, which waits at {mark:032x},"
                index_id = schema.entry_id(entry.uid, each.turn)
                pending.append(Pending(name, mark, each.type_id, index_id, entry.due_at_ms))
                self._add(each.type_id, 1, size_of(entry), 0)
                if each.type_id not in self._look.types:
                    self._find("type", f"{name} is of type {each.type_id}, which has no record")
            self._check_pending(pending)
            keyed = [schema.key_queue_id(each.type_id, each.entry.key) for each in page if each.entry.key]
            self._heads += len(keyed)
            key_queues = self._look.get_many(Family.GROUP, [schema.key_queue_key(each) for each in keyed])
            for key_queue, row in zip(keyed, key_queues, strict=True):
                if row is None:
                    self._find("key queue", f"an entry needs {_queue_name(key_queue)}, which is not there")

    def _index(self) -> None:
        for page in self._pages(Family.INDEX):
            waiting = []
            for key, value in page:
                try:
                    receipt = decode_index(value)
                    if keys.index_place(key)[0] == keys.WAITING_GENERATION:
                        schema.turn_of(key[keys.INDEX_PREFIX_BYTES :])
                        waiting.append((key, receipt.key))
                except StoreCorrupt as error:
                    self._bad_row(Family.INDEX, key, value, error)
            self._check_indexed(waiting)
        self._compare_index()

    def _name_of_index(self, key: bytes) -> str:
        return f"entry {key[keys.INDEX_PREFIX_BYTES :][:UID_BYTES].hex()}"

    def _group(self) -> None:
        key_queues = 0
        for page in self._pages(Family.GROUP):
            for key, _ in page:
                if not schema.is_spool_key(key):
                    self._find("group", f"group {key.hex()} is a row that no spool writes")
        for found in self._look.dead():
            self._add(found.type_id, 0, 0, 1)
            if found.key != schema.dead_key(found.type_id, found.entry.uid):
                self._find("dead", f"{_name(found.entry)} lies under another's uid in the dead set")
        for key_queue, first, after in self._key_queues():
            key_queues += 1
            self._parked(key_queue, first, after)
        if key_queues != self._heads:
            self._find("key queue", f"{key_queues:,} key queues, {self._heads:,} entries with a key on the timeline")
        for found in self._look.parked():
            self._add(found.type_id, 1, size_of(found.entry), 0)
            key_queue = schema.key_queue_id(found.type_id, found.entry.key)
            number = schema.parked_number(found.key)
            (row,) = self._look.get_many(Family.GROUP, [schema.key_queue_key(key_queue)])
            if not row:
                if row is None:
                    self._find("key queue", f"{_name(found.entry)} is parked in a key queue that is not there")
                continue
            first, after = keys.unpack_pair(row)
            if not first <= number < after:
                self._find(
                    "key queue", f"{_name(found.entry)} is parked at {number}, its key queue has {first} up to {after}"
                )

    def _key_queues(self) -> Iterator[tuple[KeyQueueId, int, int]]:
        for key, value in self._look.rows(Family.GROUP, *schema.spool_rows(schema.SPOOL_KEY_QUEUE)):
            try:
                yield schema.key_queue_of(key), *keys.unpack_pair(value)
            except StoreCorrupt as error:
                self._find("key queue", f"key queue {key.hex()}: {error}")

    def _parked(self, key_queue: KeyQueueId, first: int, after: int) -> None:
        count = sum(1 for _ in self._look.rows(Family.GROUP, *schema.parked_range(key_queue)))
        if count != after - first:
            text = f"{_queue_name(key_queue)} should have {after - first:,} parked entries, it has {count:,}"
            self._find("key queue", text)

    def _queue(self) -> None:
        for page in self._pages(Family.QUEUE):
            self._find("queue", f"{len(page):,} rows in the queue family, where no spool writes")

    def _meta_row(self, key: bytes, value: bytes) -> None:
        if key[:1] == keys.META_SPOOL_TOTAL:
            self._claimed[keys.meta_id(key)] = schema.decode_totals(value)

    def _compare_totals(self) -> None:
        for type_id in sorted(self._claimed.keys() | self._found.keys()):
            claim, real = self._claimed.get(type_id, TypeTotals()), self._found.get(type_id, TypeTotals())
            if claim != real:
                text = f"{self._scope_name(type_id)}: totals say {_told(claim)}, there are {_told(real)}"
                self._find("totals", text)


def _name(entry: Entry) -> str:
    return f"{entry.type_name} {entry.uid.hex()}"


def _queue_name(key_queue: KeyQueueId) -> str:
    return f"key queue {key_queue.type_id} {key_queue.digest.hex()}"


def _told(totals: TypeTotals) -> str:
    return f"{totals.waiting:,} waiting with {totals.waiting_bytes:,} bytes and {totals.dead:,} dead"
