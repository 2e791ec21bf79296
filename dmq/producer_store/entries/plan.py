"""A change of a spool while it is planned: its ops, and what is to be known in memory once they are accepted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from dmq.broker.topics.registry import Topic
from dmq.producer_store.entries.key_queues import Change
from dmq.store.schema.keys import timeline_key
from dmq.store.schema.spool import KeyQueueId, Totals, entry_id
from dmq.store.writer.operations import Append, Delete, Emit, Op, Put, Schedule, Withdraw
from dmq.store.writer.writer import Unit
from dmq.trail.events import NO_QUEUE, EventKind, encode_event
from retry.sink import Entry

ENTRY_BYTES = 300  # what an entry costs beside its payload, measured: timeline row, index row, event

Settle = Callable[[Unit], None]


@dataclass(slots=True, eq=False)
class Ticket:
    """Where a held entry lies. ``is_gone``: its row is there no more. ``ending``: what its holder asked for last."""

    mark: int  # its timeline key
    type_id: int
    turn: int
    due_at_ms: int
    size_bytes: int
    key_queue: KeyQueueId | None
    is_ready: bool = False  # no worker holds it yet
    is_gone: bool = False
    is_lost: bool = False  # in a directory that was left as damaged
    ending: Future[None] | None = None


@dataclass(slots=True, eq=False)
class Plan:
    """A unit, and what is to be known in memory once it is accepted."""

    ops: list[Op] = field(default_factory=list)
    topic: Topic | None = None  # a type that is new
    key_queue: Change | None = None
    dead: tuple[bytes, bytes | None] | None = None  # a row of the dead set, and its value from here on
    totals: tuple[int, Totals] | None = None
    scheduled: bytes | None = None  # the id of an entry that comes onto the timeline


def size_of(entry: Entry) -> int:
    """Return what an entry counts towards the bound in bytes."""
    return len(entry.payload) + ENTRY_BYTES


def withdrawn(ticket: Ticket, entry: Entry, instead: Sequence[Op]) -> list[Op]:
    """Return the unit that takes an entry off the timeline and does ``instead``: both, or none of it."""
    key = timeline_key(ticket.mark)
    plain = [op for op in instead if isinstance(op, Append | Delete | Emit | Put | Schedule)]
    assert len(plain) == len(instead), "these are all that a spool does"
    return [Withdraw(key, ticket.type_id, entry_id(entry.uid, ticket.turn), ticket.due_at_ms, 0, plain)]


def event_of(kind: EventKind, type_id: int, entry: Entry, attempt: int, time_ms: int) -> bytes:
    """Return the audit event of what becomes of an entry."""
    return encode_event(kind, type_id, 0, NO_QUEUE, min(attempt, 0xFFFF), time_ms, b"\x01" + entry.uid)
