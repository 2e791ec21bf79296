"""Check of the store of a stopped daemon: every row is read, and related rows are compared.

    damage     an unreadable block; the checksums of all blocks are verified by the reads
    row        a row that cannot be decoded
    name       a row of a topic or a group without a record
    index      an entry that is missing in the index, or has another place there; an index row without its entry
    property   a message that its indexed property does not lead to, or a property that leads to no such message
    key        an entry that its own key does not refer to, or an own key without its entry
    queue      a gap in a queue, or a queue that its topic does not have
    group      progress of a group beyond the end of a queue
    audit      missing audit events without a gap event
    figure     a wrong count
    ledger     a term of the ledger that the rows contradict
    mark       a mark that would prevent an entry from being read

Nothing is changed. Memory grows with names and queues, not with messages.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from dmq.errors import StoreCorrupt, StoreError
from dmq.producer_store import hold
from dmq.recovery.check.properties import PropertyCheck
from dmq.recovery.check.walk import Pending, StoreWalk
from dmq.recovery.reading.findings import CheckReport, Findings
from dmq.recovery.reading.log_repair import Tell
from dmq.recovery.reading.look import How, Look
from dmq.recovery.reading.names import KnownNames, shown_id
from dmq.recovery.reading.places import place_of, shown_id_of
from dmq.recovery.reading.rows import Indexed, TimelineRow, mark_of, read_begin, read_index, read_progress, read_waiting
from dmq.recovery.reading.schedules import SCHEDULE_LETTERS, ScheduleRows
from dmq.store.engines.rocks import RocksEngine, RocksOptions
from dmq.store.files.cell import Cell
from dmq.store.schema import keys
from dmq.store.schema.accounting.ledger import decode_head
from dmq.store.schema.accounting.outbox import decode_state
from dmq.store.schema.cell.files import CELL_FILE
from dmq.store.schema.keys import Family
from dmq.store.schema.messages.own_keys import KeyHolder, decode_key_holder, encode_key_holder, own_key_of_row, row_of
from dmq.store.schema.messages.record import DELAYED_KINDS, EntryKind, decode_half_body, decode_queued, waiting_bytes
from dmq.store.writer.recount import KnownIds, copies_of, recount_queues
from dmq.trail.ledger import read_books
from dmq.trail.manifest import Layout, scan_manifest
from dmq.trail.snapshots import cell_of


def check_store(path: Path, tell: Tell) -> CheckReport:
    """Check the store in ``path``; raise ``StoreLocked`` if its process is running.

    Raise ``StoreCorrupt`` if its database cannot be opened in any way, ``StoreError`` if it belongs to a spool. No data
    is changed, only the pid in ``LOCK`` and RocksDB's own ``LOG``.
    """
    findings = Findings()
    with ExitStack() as stack:
        try:
            stack.callback(Cell(path).close)
        except StoreCorrupt as error:
            findings.add("damage", str(error))
            stack.enter_context(hold(path))
        database = path / "rocksdb"
        if not database.is_dir():
            raise StoreCorrupt(f"there is no database in {path}")
        if not (path / CELL_FILE).exists():
            findings.add("damage", f"{path / 'CELL'} is missing")
        how = How.STRICT
        try:
            engine = RocksEngine(database, RocksOptions(is_read_only=True))
        except StoreCorrupt as error:
            findings.add("damage", str(error))
            how = How.WITHOUT_DAMAGED_RECORDS
            engine = RocksEngine(database, RocksOptions(is_read_only=True, recovery_mode="skip_any"))
        stack.callback(engine.close)
        look = Look(path, path, engine, how)
        if any(True for _ in look.rows(Family.META, *keys.meta_range(keys.META_SPOOL_TOTAL))):
            raise StoreError(f"{path} belongs to a spool: check it with 'dmq spool check --root {path.parent}'")
        _compare_trail(path, engine, findings)
        return check_rows(look, findings, tell)


def _compare_trail(path: Path, engine: RocksEngine, findings: Findings) -> None:
    """Compare the last sequence of the store with that of the exported trail.

    A log that was truncated between two records, or is missing, looks intact. The exported trail may have its events.
    """
    try:
        cell, (state,) = cell_of(path), engine.get_many(Family.META, [keys.META_OUTBOX])
        stored = decode_state(state).next_sequence - 1
        manifests = Layout(path / "trail", cell).manifests.glob("*.jsonl")
        exported = max((line.last_sequence for each in manifests for line in scan_manifest(each).lines), default=0)
    except (StoreCorrupt, OSError, ValueError):  # damage is reported by the scan; the trail itself is not checked
        return
    if exported > stored:
        text = f"the trail tells of events up to {exported:,}, the store of {stored:,}: its end is lost"
        findings.add("audit", text)


def check_rows(look: Look, findings: Findings, tell: Tell) -> CheckReport:
    """Do the same as ``check_store`` for an open store; ``findings`` has the findings so far."""
    return _Check(look, findings, tell).checked()


class _Check(StoreWalk[Look]):
    def __init__(self, look: Look, findings: Findings, tell: Tell) -> None:
        super().__init__(look, findings, tell)
        self._names = KnownNames(look, lambda key, why: self._find("row", f"meta {key.hex()}: {why}"))
        self._ranges: dict[tuple[int, int], tuple[int, int]] = {}  # begin and end of each queue that ever had messages
        self._copies: Counter[int] = Counter()  # pending retries, by lane
        self._held: Counter[int] = Counter()  # by topic
        self._bytes: Counter[int] = Counter()  # pending bytes by scope, as far as they are counted
        self._bytes_since = self._find_bytes_since()
        self._schedules = ScheduleRows()
        self._properties = PropertyCheck(look, self._names, self._find)

    def checked(self) -> CheckReport:
        return CheckReport(self._look.path, self._totals, self.run())

    def _parts(self) -> Sequence[Callable[[], None]]:
        families = (self._timeline, self._key_holders, self._queue, self._index, self._group, self._audit, self._meta)
        return *families, self._property_rows, self._compare_held_and_bytes, self._recurring, self._ledger

    def _find_bytes_since(self) -> int | None:
        """Return the sequence above which pending bytes are counted; ``None`` if the last run counted none."""
        with suppress(StoreCorrupt):  # reported by the scan of the family
            run, since = keys.unpack_pair(self._figures.get(keys.META_BYTES_HEAD, b""))
            if keys.pack_u64(run) == self._figures.get(keys.META_BOOT):
                return since
        return None

    # -- the timeline and the index -----------------------------------------------------------------------------------

    def _timeline(self) -> None:
        bodies: set[int] = set()  # sequences of half messages; their bodies come later in the scan
        for page in self._pages(Family.TIMELINE):
            entries: list[TimelineRow] = []
            for key, value in page:
                if keys.is_half_body_key(key):
                    self._half_body(key, value, bodies)
                    continue
                try:
                    entries.append(read_waiting(key, value))
                except StoreCorrupt as error:
                    self._bad_row(Family.TIMELINE, key, value, error)
                else:
                    self._count(f"timeline: {entries[-1].kind}", key, value)
                    if self._bytes_since is not None and keys.sequence_of(entries[-1].mark) > self._bytes_since:
                        self._bytes[entries[-1].entry.scope] += waiting_bytes(value)
                    if entries[-1].entry.kind == EntryKind.TRANSACTION:
                        bodies.add(keys.sequence_of(entries[-1].mark))
                    elif entries[-1].entry.kind == EntryKind.RECURRING:
                        self._schedules.saw_entry(entries[-1])
            self._own_keys(entries, dict(page))
            self._properties.waiting(entries, dict(page))
            self._check_pending([self._waiting(each) for each in entries])
        for sequence in sorted(bodies):
            self._find("row", f"the half message with sequence {sequence} has no body")

    def _own_keys(self, entries: list[TimelineRow], values: dict[bytes, bytes]) -> None:
        """Compare entries that have an own key with the rows of their own keys."""
        rows = [(row, each) for each in entries if (row := row_of(values[keys.timeline_key(each.mark)]))]
        found = self._look.get_many(Family.META, [row for row, _ in rows])
        for (row, each), value in zip(rows, found, strict=True):
            size = len(values[keys.timeline_key(each.mark)])
            holder = KeyHolder(keys.sequence_of(each.mark), each.entry.deliver_at_ms, size, each.message_id)
            if value != encode_key_holder(holder):
                shown = shown_id(each.message_id)
                self._find("key", f"message {shown} has the own key {_shown_key(row)}, which does not lead to it")

    def _key_holders(self) -> None:
        """Check that the message of every own key is pending."""
        rows = self._look.rows(Family.META, *keys.meta_range(keys.META_OWN_KEY))
        for page in self._read.of(rows, "own keys"):
            holders: dict[bytes, KeyHolder] = {}
            for key, value in page:
                with suppress(StoreCorrupt):  # reported by the scan of the family
                    holders[key] = decode_key_holder(value)
            wanted = [keys.pack_index_prefix(0, keys.meta_id(row)) + each.message_id for row, each in holders.items()]
            for (row, each), found in zip(holders.items(), self._look.get_many(Family.INDEX, wanted), strict=True):
                if not found or keys.sequence_of(mark_of(found)) != each.sequence:
                    shown = shown_id(each.message_id)
                    self._find("key", f"the own key {_shown_key(row)} leads to message {shown}, which does not wait")

    def _half_body(self, key: bytes, value: bytes, expected: set[int]) -> None:
        sequence = keys.unpack_u64(key[-8:])
        try:
            decode_half_body(value)
        except StoreCorrupt as error:
            self._bad_row(Family.TIMELINE, key, value, error)
            return
        self._count("timeline: body of a half message", key, value)
        if sequence not in expected:
            self._find("row", f"there is the body of a half message with sequence {sequence}, which does not wait")
        expected.discard(sequence)

    def _waiting(self, each: TimelineRow) -> Pending:
        entry = each.entry
        name = f"message {shown_id(each.message_id)}, which waits at {each.mark:032x},"
        self._copies[entry.topic_id] += entry.kind == EntryKind.RETRY
        if entry.topic_id not in self._names.topics_by_id:
            self._find("name", f"{name} is of topic {entry.topic_id}, which has no record")
        if keys.is_held_key(key := keys.timeline_key(each.mark)):
            self._held[keys.held_topic_id(key)] += 1
            if entry.kind not in DELAYED_KINDS or keys.held_topic_id(key) != entry.topic_id:
                self._find("mark", f"{name} is held among those of another topic: it would never be delivered")
        return Pending(name, each.mark, entry.scope, each.index_id, entry.deliver_at_ms)

    def _index(self) -> None:
        current = int.from_bytes(self._figures.get(keys.META_GENERATION, b"")[:8], "big")
        for page in self._pages(Family.INDEX):
            waiting: list[tuple[bytes, bytes]] = []
            finished: list[tuple[Indexed, bytes]] = []
            for key, value in page:
                try:
                    row = read_index(key, value)
                except StoreCorrupt as error:
                    self._bad_row(Family.INDEX, key, value, error)
                    continue
                self._last_sequence = max(self._last_sequence, row.receipt.sequence)
                self._count(f"index: {'waiting' if row.is_waiting else 'finished'}", key, value)
                if row.is_waiting:
                    waiting.append((key, row.receipt.key))
                elif not current - 1 <= row.generation <= current:
                    text = f"index {key.hex()} is of generation {row.generation}, the current one is {current}"
                    self._find("index", text)
                elif (place := place_of(row, self._names)) is not None:
                    finished.append((row, keys.pack_queue_key(*place, row.receipt.queue_offset)))
            self._check_indexed(waiting)
            messages = self._look.get_many(Family.QUEUE, [key for _, key in finished])
            for (row, key), message in zip(finished, messages, strict=True):
                self._finished(row, key, message)
        self._compare_index()

    def _name_of_index(self, key: bytes) -> str:
        scope, index_id = keys.index_place(key)[1], key[keys.INDEX_PREFIX_BYTES :]
        return f"message {shown_id_of(scope, index_id, self._names)}"

    def _finished(self, row: Indexed, key: bytes, found: bytes | None) -> None:
        topic_id, queue_id, offset = keys.unpack_queue_key(key)
        place = topic_id, queue_id
        shown = shown_id_of(row.scope, row.index_id, self._names)
        name = f"message {shown}, at offset {offset} of {self._queue_name(*place)} by the index,"
        if found is None:
            if offset >= self._ranges.get(place, (0, 0))[0]:  # below it retention may have removed messages
                self._find("index", f"{name} is not there")
            return
        try:
            is_same = not found or row.index_id.startswith(decode_queued(found).message_id)
        except StoreCorrupt:  # reported by the scan of the queues
            return
        if not is_same:
            self._find("index", f"{name} is another message")

    # -- queues and groups --------------------------------------------------------------------------------------------

    def _queue(self) -> None:
        for key, value in self._look.rows(Family.META, *keys.meta_range(keys.META_BEGIN)):
            with suppress(StoreCorrupt):  # reported by the scan of the family
                place, begin = read_begin(key, value)
                self._ranges[place] = (begin, begin)
        for page in self._pages(Family.QUEUE):
            readable: list[tuple[bytes, bytes]] = []
            for key, value in page:
                try:
                    if len(key) != keys.QUEUE_KEY_BYTES:
                        raise StoreCorrupt(f"a queue key of {len(key)} bytes")
                    decode_queued(value)
                except StoreCorrupt as error:
                    self._bad_row(Family.QUEUE, key, value, error)
                    if len(key) != keys.QUEUE_KEY_BYTES:
                        continue
                else:
                    self._count("queue", key, value)
                    readable.append((key, value))
                self._lies_at(*keys.unpack_queue_key(key))
            self._properties.queued(readable)

    def _property_rows(self) -> None:
        for page in self._pages(Family.PROPERTY):
            bad = {key: (value, error) for key, value, error in self._properties.rows(page)}
            for key, value in page:
                if key not in bad:
                    self._count("property", key, value)
            for key, (value, error) in bad.items():
                self._bad_row(Family.PROPERTY, key, value, error)

    def _lies_at(self, topic_id: int, queue_id: int, offset: int) -> None:
        begin, end = self._ranges.get((topic_id, queue_id), (0, 0))
        if offset < begin:  # retention is about to remove the message
            return
        if begin == end:
            topic = self._names.topics_by_id.get(topic_id)
            if topic is None:
                self._find("name", f"there are messages of topic {topic_id}, which has no record")
            elif queue_id >= topic.queues:
                self._find("queue", f"there are messages in {self._queue_name(topic_id, queue_id)}, beyond its queues")
        if offset != end:
            self._find("queue", f"{self._queue_name(topic_id, queue_id)} has no messages {end:,} to {offset - 1:,}")
        self._ranges[topic_id, queue_id] = (begin, offset + 1)

    def _group(self) -> None:
        for page in self._pages(Family.GROUP):
            for key, value in page:
                try:
                    row = read_progress(key, value)
                except StoreCorrupt as error:
                    self._bad_row(Family.GROUP, key, value, error)
                    continue
                self._count(f"group: {row.kind.name.lower()}", key, value)
                group = f"group {row.group_id}"
                if row.group_id:
                    if row.group_id in self._names.groups_by_id:
                        group = f"group {self._names.groups_by_id[row.group_id].name}"
                    else:
                        self._find("name", f"{group} has progress, but no record")
                if row.topic_id not in self._names.topics_by_id:
                    self._find("name", f"{group} has progress in topic {row.topic_id}, which has no record")
                end = self._ranges.get(row.place, (0, 0))[1]
                if row.end > end:
                    where = self._queue_name(*row.place)
                    self._find("group", f"{group} is at {row.end:,} of {where}, which ends at {end:,}")

    def _queue_name(self, topic_id: int, queue_id: int) -> str:
        topic = self._names.topics_by_id.get(topic_id)
        return f"queue {queue_id} of {topic.name if topic is not None else f'topic {topic_id}'}"

    # -- figures ------------------------------------------------------------------------------------------------------

    def _recurring(self) -> None:
        for letter in SCHEDULE_LETTERS:
            for key, value in self._look.rows(Family.META, *keys.meta_range(letter)):
                with suppress(StoreCorrupt):  # reported by the scan of the family
                    self._schedules.saw_row(key, value)
        for what, text in self._schedules.problems(self._names):
            self._find(what, text)

    def _ledger(self) -> None:
        if self._look.holes or self._findings.count:  # bad rows explain the differences
            return
        source = self._look.source
        with suppress(StoreCorrupt):  # reported by the scan of the family
            row = self._figures.get(keys.META_LEDGER_HEAD)
            if row is None or keys.pack_u64(decode_head(row).run) != self._figures.get(keys.META_BOOT):
                return  # no ledger, or a later run kept none: the next run starts a new one
            known = KnownIds.of(source)
            found = recount_queues(source, known, lambda *place: self._ranges.get(place, (0, 0))[1])
            found.waiting = {scope: count.total for scope, count in self._counts.items()}
            found.copies = copies_of(known, self._copies)
            for each in read_books(source).against_rows(found):
                self._find("ledger", str(each))

    def _compare_held_and_bytes(self) -> None:
        self._compare(self._held, keys.META_HELD, "entries are held for")
        if self._bytes_since is not None:
            self._compare(self._bytes, keys.META_BYTES, "bytes wait for")

    def _compare(self, found: Counter[int], letter: bytes, what: str) -> None:
        said: Counter[int] = Counter()
        for key, value in self._look.rows(Family.META, *keys.meta_range(letter)):
            with suppress(StoreCorrupt):  # reported by the scan of the family
                said[keys.meta_id(key)] = keys.unpack_u64(value)
        for scope in sorted(found.keys() | said.keys()):
            if found[scope] != said[scope]:
                text = f"{found[scope]:,} {what} {self._scope_name(scope)}, the figure says {said[scope]:,}"
                self._find("figure", text)

    def _scope_name(self, scope: int) -> str:
        names = self._names
        if scope in names.groups_by_id:
            return f"group {names.groups_by_id[scope].name}"
        topic_id = keys.topic_of_scope(scope)
        name = names.topics_by_id[topic_id].name if topic_id in names.topics_by_id else str(topic_id)
        of = {topic_id: "", keys.half_scope(topic_id): "half messages of "}.get(scope, "schedules of ")
        return f"{of}topic {name}"


def _shown_key(row: bytes) -> str:
    return repr(own_key_of_row(row).decode(errors="replace"))
