"""Audit events and handles, byte by byte: no layout drifts. Those of rows are in ``tests/golden``."""

from __future__ import annotations

import pytest

from dmq.broker.handles import receipt_handle as receipt
from dmq.broker.handles.entry_handle import EntryHandle, EntryHandles, HandleKind
from dmq.store.schema.cell import identity
from dmq.store.schema.messages import record
from dmq.store.schema.messages.index import EntryState
from dmq.trail import events

pytestmark = pytest.mark.property
IDENTITY = identity.Identity(7, bytes(range(32)), identity.StorePlace(9, 10))
RECEIPTS, ENTRIES = receipt.ReceiptHandles(IDENTITY, 1), EntryHandles(IDENTITY)

GOLDEN: list[tuple[str, bytes, str]] = [
    ("transaction id", ENTRIES.encode(HandleKind.TRANSACTION, EntryHandle(1, "t", b"id")).encode(),
     b"EgAAAAAAAAABAXRpZNTJLEoK6HpIR_oSwmK7VI4".hex()),
    ("recall handle", ENTRIES.encode(HandleKind.RECALL, EntryHandle(1, "t", b"id")).encode(),
     b"AgAAAAAAAAABAXRpZJyhIDeM2C7Dd6ZvQvfR2Rs".hex()),
    ("event", events.encode_event(3, 1, 2, 3, 4, 5, b"id"), "03 00000001 00000002 0003 0004 0000000000000005 6964"),
    ("topic event", events.name_event(events.EventKind.TOPIC_CREATED, 7),
     "09 00000007 00000000 ffff 0000 0000000000000000"),
    ("group event", events.name_event(events.EventKind.GROUP_CREATED, 7),
     "0a 00000000 00000007 ffff 0000 0000000000000000"),
    ("gap event", events.gap_event(5, 6), "0d 00000000 00000000 ffff 0000 0000000000000005 0000000000000006"),
    ("receipt handle", bytes.fromhex(RECEIPTS.encode(receipt.ReceiptHandle(1, 2, 3, 4, 5, 6, False, b"id"))),
     "04000000010000000200030000000000000004000000000000000500060000000000000000076964b897533690d8d3114e805b0d11b5defc"),
    ("handle of a push consumer", bytes.fromhex(RECEIPTS.encode(receipt.ReceiptHandle(1, 2, 3, 4, 5, 6, True, b"id"))),
     "0400000001000000020003000000000000000400000000000000050006010000000000000007696478991a1871613be1600e363a420ea578"),
]  # fmt: skip


@pytest.mark.parametrize(("made", "expected"), [each[1:] for each in GOLDEN], ids=[each[0] for each in GOLDEN])
def test_layouts_do_not_drift(made: bytes, expected: str) -> None:
    """A change here is a new version: trails, stores and clients have these bytes from released ones."""
    assert made.hex() == expected.replace(" ", "")


def test_numbers_of_kinds_do_not_drift() -> None:
    """They stand in rows that were written; none is ever used for something else."""
    states = {"WAITING": 1, "QUEUED": 2, "DELIVERED": 3, "WITHDRAWN": 4, "COMMITTED": 5}
    states |= {"REPLACED": 6, "ABSORBED": 7}
    assert {kind.name: int(kind) for kind in EntryState} == states
    entries = {
        "DELAYED": 1,
        "RETRY": 2,
        "SPOOLED": 3,
        "WHOLE_HALF": 4,
        "TRANSACTION": 5,
        "DELAYED_FOR": 6,
        "RECURRING": 7,
    }
    assert {kind.name: int(kind) for kind in record.EntryKind} == entries
    assert [kind.name for kind in sorted(events.EventKind)] == [
        "SCHEDULED", "QUEUED", "DELIVERED", "ACKED", "LEASE_EXPIRED", "GIVEN_BACK", "INVISIBLE_CHANGED", "FILTERED",
        "TOPIC_CREATED", "GROUP_CREATED", "OPENED", "CLOSED", "GAP", "NACKED", "RETRIED", "RETRY_MOVED",
        "DEAD_EXHAUSTED", "DEAD_TOO_OLD", "DEAD_FORWARDED", "DEAD_SENT_BACK", "DEAD_BY_OPERATOR", "REDRIVEN", "PURGED",
        "GROUP_CHANGED", "SENT", "SEND_FAILED", "SEND_DEAD", "REQUEUED", "DROPPED",
        "HEARTBEAT", "SUBSCRIBED", "TAIL_LOST", "POSTPONED", "RECALLED", "EXPIRED",
        "HALF", "COMMITTED", "ROLLED_BACK", "TX_CHECKED", "TX_GIVEN_UP",
        "TOPIC_CHANGED", "TOPIC_REMOVED", "GROUP_REMOVED", "RESET", "OFFSET_SET",
        "FORWARDED", "FORWARD_REFUSED", "FORWARD_IN_DOUBT", "FETCHED",
        "QUEUED_FOR_GROUP", "TX_TOO_OLD", "CLOCK_CHANGED", "CLOCK_ACCEPTED", "TAKEN_OVER", "RESCHEDULED", "OCCURRED",
        "SCHEDULE_CHANGED", "REPLACED", "ABSORBED", "OPERATED", "DEAD_TOO_LATE", "PROMOTED",
    ]  # fmt: skip
    assert [int(kind) for kind in sorted(events.EventKind)] == [*range(1, 52), *range(56, 65), 69, 70]
