"""Plan of a change: its ops, and the changes in memory once the unit is accepted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from dmq.broker.topics import Topic
from dmq.producer_store.entries.key_queues import Change
from dmq.store.schema.keys import timeline_key
from dmq.store.schema.spool import KeyQueueId, TypeTotals, entry_id
from dmq.store.writer.operations import Append, Delete, Emit, Op, Put, Schedule, Withdraw
from dmq.store.writer.writer import Unit
from dmq.trail.events import NO_QUEUE, EventKind, encode_event
from retry.sink import Entry

ENTRY_BYTES = 300  # cost of an entry without its payload, measured: timeline row, index row, event

Settle = Callable[[Unit], None]


@dataclass(slots=True, eq=False)
class Ticket:
    """Place of a held entry. ``is_gone``: its row no longer exists. ``ending``: the last change by its holder."""

    mark: int  # its timeline key
    type_id: int
    turn: int
    due_at_ms: int
    size_bytes: int
    key_queue: KeyQueueId | None
    is_ready: bool = False  # ready, not yet held by a worker
    is_gone: bool = False
    is_lost: bool = False  # in a directory abandoned as damaged
    ending: Future[None] | None = None


@dataclass(slots=True, eq=False)
class ChangePlan:
    """Ops of a unit, and the changes in memory once it is accepted."""

    ops: list[Op] = field(default_factory=list)
    topic: Topic | None = None  # a new type
    key_queue: Change | None = None
    dead: tuple[bytes, bytes | None] | None = None  # a row of the dead set, and its new value
    totals: tuple[int, TypeTotals] | None = None
    scheduled: bytes | None = None  # id of the entry added to the timeline


def size_of(entry: Entry) -> int:
    """Return the size of an entry, as counted towards ``bytes_max``."""
    return len(entry.payload) + ENTRY_BYTES


def withdrawn(ticket: Ticket, entry: Entry, instead: Sequence[Op]) -> list[Op]:
    """Return one atomic op that removes an entry from the timeline and applies ``instead``."""
    key = timeline_key(ticket.mark)
    plain = [op for op in instead if isinstance(op, Append | Delete | Emit | Put | Schedule)]
    assert len(plain) == len(instead), "these are all that a spool does"
    return [Withdraw(key, ticket.type_id, entry_id(entry.uid, ticket.turn), ticket.due_at_ms, 0, plain)]


def event_of(kind: EventKind, type_id: int, entry: Entry, attempt: int, time_ms: int) -> bytes:
    """Return the encoded audit event of a change of an entry."""
    return encode_event(kind, type_id, 0, NO_QUEUE, min(attempt, 0xFFFF), time_ms, b"\x01" + entry.uid)
