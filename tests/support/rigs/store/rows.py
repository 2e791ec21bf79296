"""Ops with readable arguments, a store's counts from its rows, an engine that stops or fails, and a copy at rest."""

from __future__ import annotations

import shutil
import threading
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal

from dmq.store.engines.engine import Batch, Engine, EngineStats, Rows
from dmq.store.schema.accounting.counts import BUCKET_MS
from dmq.store.schema.accounting.outbox import OutboxRecord, decode_block
from dmq.store.schema.keys import Family, is_half_body_key, unpack_u64
from dmq.store.schema.messages.record import decode_waiting, encode_body, encode_queued, encode_waiting, waiting_bytes
from dmq.store.store import Store
from dmq.store.writer.operations import Append, HandOver, Schedule

SCOPE, TOPIC = 7, 3
PATIENCE_S = 20.0  # for what happens at once, unless it is broken
END = b"\xff" * 40


def packed_id(number: int) -> bytes:
    """A message id as the store keeps it."""
    return b"\1" + number.to_bytes(16, "big")


def schedule(number: int, deliver_at_ms: int, *, scope: int = SCOPE, event: bytes = b"scheduled") -> Schedule:
    """Keep message ``number``."""
    body = encode_body(packed_id(number), b"", b"", b"message %d" % number)
    return Schedule(
        scope, packed_id(number), deliver_at_ms, encode_waiting(1, 0, TOPIC, scope, deliver_at_ms, 0, body), event
    )


def append(
    number: int, *, queue_id: int = 0, scope: int = SCOPE, event: bytes = b"queued", payload: bytes = b""
) -> Append:
    """Put message ``number`` into a queue."""
    body = encode_body(packed_id(number), b"", b"", payload or b"message %d" % number)
    return Append(scope, packed_id(number), TOPIC, queue_id, encode_queued(0, 0, 0, body), event)


def hand_over(key: bytes, value: bytes, *, queue_id: int = 0, event: bytes = b"delivered") -> HandOver:
    """Move a timeline row made by ``schedule`` to its queue."""
    entry = decode_waiting(value)
    body = value[28:]
    record = encode_queued(0, 0, entry.deliver_at_ms, body)
    return HandOver(key, entry.scope, body[3:20], entry.deliver_at_ms, TOPIC, queue_id, record, event, len(value))


def put_batch(*rows: tuple[Family, bytes, bytes]) -> Batch:
    """A batch that sets rows."""
    batch = Batch()
    batch.puts += rows
    return batch


def all_rows(source: Store | Engine, family: Family, start: bytes = b"") -> list[tuple[bytes, bytes]]:
    """Every row of a family."""
    found = source.scan(family, start, END, limit=10_000_000)
    assert found.is_complete
    return found.rows


def waiting_rows(store: Store) -> list[tuple[bytes, bytes]]:
    """What waits: all rows of the timeline but bodies of half messages."""
    return [row for row in all_rows(store, Family.TIMELINE) if not is_half_body_key(row[0])]


def half_bodies(store: Store) -> list[int]:
    """The sequences of half messages whose bodies are there."""
    rows = all_rows(store, Family.TIMELINE)
    return [int.from_bytes(key[-8:], "big") for key, _ in rows if is_half_body_key(key)]


def recount(store: Store) -> tuple[dict[int, int], dict[tuple[int, int], int]]:
    """Count from the timeline what the counters must say: by scope, and by scope and end of a time bucket."""
    entries = [decode_waiting(value) for _, value in waiting_rows(store)]
    buckets = Counter((entry.scope, (entry.deliver_at_ms // BUCKET_MS + 1) * BUCKET_MS) for entry in entries)
    return dict(Counter(entry.scope for entry in entries)), dict(buckets)


def recount_bytes(store: Store) -> dict[int, int]:
    """Count from the timeline how many bytes of each scope wait; of what came before they were counted, none."""
    found: Counter[int] = Counter()
    for key, value in waiting_rows(store):
        if int.from_bytes(key[8:], "big") > store.bytes_since:
            found[decode_waiting(value).scope] += waiting_bytes(value)
    return {scope: size for scope, size in found.items() if size}


def counted(store: Store, scopes: Sequence[int]) -> tuple[dict[int, int], dict[tuple[int, int], int]]:
    """What the counters say, in the shape of ``recount``; they are also right about bytes."""
    assert store.pending_bytes() == recount_bytes(store)
    buckets = {(scope, each.until_ms): each.count for scope in scopes for each in store.due_counts(scope, 0, 2**48)}
    return store.pending(), buckets


def events(store: Store) -> list[OutboxRecord]:
    """Everything in the outbox."""
    return [record for key, value in all_rows(store, Family.AUDIT) for record in decode_block(key, value)]


def meta_u64(store: Store, key: bytes) -> int | None:
    """A figure of the meta family."""
    value = store.get_many(Family.META, [key])[0]
    return None if value is None else unpack_u64(value)


class GatedEngine:
    """Hands everything to ``inner``, but stops in ``sync`` while ``gate`` is unset, and fails where ``fails`` says.

    A write that fails was not done, a sync that fails did not sync. ``calls`` lists writes and syncs in order.
    """

    def __init__(self, inner: Engine) -> None:
        self.inner = inner
        self.calls: list[str] = []
        self.batches: list[Batch] = []
        self.fails: Literal["write", "sync"] | None = None
        self.error: Exception = OSError(5, "Input/output error")
        self.gate = threading.Event()
        self.gate.set()
        self.is_syncing = threading.Event()

    def hold(self) -> None:
        """Stop the next sync until ``let_go``."""
        self.is_syncing.clear()
        self.gate.clear()

    def await_sync(self) -> None:
        """Wait until a sync has stopped at the gate."""
        assert self.is_syncing.wait(PATIENCE_S)

    def let_go(self) -> None:
        """Let syncs go on."""
        self.gate.set()

    def write(self, batch: Batch) -> None:
        self.calls.append("write")
        self.batches.append(batch)
        if self.fails == "write":
            raise self.error
        self.inner.write(batch)

    def flush(self) -> None:
        self.calls.append("flush")
        self.inner.flush()

    def sync(self) -> None:
        self.calls.append("sync")
        self.is_syncing.set()
        assert self.gate.wait(PATIENCE_S)
        if self.fails == "sync":
            raise self.error
        self.inner.sync()

    def get_many(self, family: Family, keys: Sequence[bytes]) -> list[bytes | None]:
        return self.inner.get_many(family, keys)

    def scan(self, family: Family, start: bytes, stop: bytes, *, limit: int, bytes_max: int = 2**62) -> Rows:
        return self.inner.scan(family, start, stop, limit=limit, bytes_max=bytes_max)

    def last(self, family: Family, start: bytes, stop: bytes) -> tuple[bytes, bytes] | None:
        return self.inner.last(family, start, stop)

    def clear(self, family: Family) -> None:
        self.inner.clear(family)

    def stats(self) -> EngineStats:
        return self.inner.stats()

    def close(self) -> None:
        self.calls.append("close")
        self.inner.close()


def copy_at_rest(source: Path, target: Path) -> Path:
    """Copy a directory with open databases as SIGKILL would leave it; try again if RocksDB deleted files meanwhile.

    Return ``target``.
    """

    def listing() -> set[tuple[str, int]]:
        return {(str(each), each.stat().st_size) for each in source.rglob("*") if each.is_file() and each.name != "LOG"}

    for _ in range(100):
        with suppress(OSError):  # shutil.Error too: a file went away
            before = listing()
            shutil.copytree(source, target)
            if listing() == before:
                return target
        shutil.rmtree(target, ignore_errors=True)
    raise AssertionError(f"{source} never rests")
