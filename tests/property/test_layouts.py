"""Every format on disk, byte by byte: no layout drifts."""

from __future__ import annotations

import pytest

from dmq.audit import events
from dmq.embedded import receipt
from dmq.embedded.entry_handle import EntryHandle, EntryHandles, HandleKind
from dmq.store import counts, identity, keys, outbox, record
from dmq.store.ops import EntryState

IDENTITY = identity.Identity(7, bytes(range(32)), identity.Place(9, 10))
RECEIPTS, ENTRIES = receipt.ReceiptHandles(IDENTITY), EntryHandles(IDENTITY)
HISTORY = record.History(1, 2, 3, 4, 5, 6, 7)
BLOCK = outbox.encode_block(1, 2, 1, [outbox.pack_record_head(1, 3, 4), b"e"])

GOLDEN: list[tuple[str, bytes, str]] = [
    ("timeline key", keys.pack_timeline_key(0x0102030405060708, 9), "0102030405060708 0000000000000009"),
    ("index key", keys.pack_index_prefix(2, 3) + b"id", "00000002 00000003 6964"),
    ("queue key", keys.pack_queue_key(1, 2, 3), "00000001 0002 0000000000000003"),
    ("group key", keys.pack_group_key(1, 2, 3, 4, 5), "00000001 00000002 0003 04 0000000000000005"),
    ("total key", keys.total_key(7), "74 00000007"),
    ("hour key", keys.hour_key(7, 8), "6d 00000007 0000000000000008"),
    ("hour", counts.pack_hour([1, 2, *[0] * 57, 255]), "01 02" + "00" * 57 + "ff"),
    ("fuller hour", counts.pack_hour([1, 2, *[0] * 57, 256]), "0001 0002" + "0000" * 57 + "0100"),
    ("name key", keys.name_key(9), "6e 00000009"),
    ("settings key", keys.settings_key(9), "70 00000009"),
    ("holds key", keys.holds_key(9), "68 00000009"),
    ("job key", keys.job_key(9), "6a 0000000000000009"),
    ("meta letters", keys.META_FORMAT + keys.META_BOOT + keys.META_SEQUENCE + keys.META_DONE, "46 42 53 44"),
    ("more letters", keys.META_OUTBOX + keys.META_GENERATION + keys.META_CLOSED, "4f 47 58"),
    ("body", record.encode_body(b"id", b"t", b"gg", b"wire"), "02 01 02 6964 74 6767 77697265"),
    ("body with a long tag", record.encode_body(b"id", b"t" * 256, b"gg", b"wire"),
     "00 02 02 0100 6964" + "74" * 256 + "6767 77697265"),
    ("waiting", record.encode_waiting(1, 2, 3, 4, 5, 6, b"b"),
     "01 01 0002 00000003 00000004 0000000000000005 0000000000000006 62"),
    ("queued", record.encode_queued(1, 2, 3, b"b"), "01 00 0001 0000000000000002 0000000000000003 62"),
    ("copy", record.encode_queued(1, 2, 3, b"hb", has_history=True),
     "01 01 0001 0000000000000002 0000000000000003 6862"),
    ("history", record.encode_history(HISTORY),
     "00000001 0002 0000000000000003 0000000000000004 0000000000000005 0000000000000006 07"),
    ("history with an epoch", record.encode_history(HISTORY._replace(epoch=8)),
     "00000001 0002 0000000000000003 0000000000000004 0000000000000005 0000000000000006 87 0000000000000008"),
    ("failed id with an epoch", record.failed_id(b"id", HISTORY._replace(epoch=9), 8),
     "6964 0000000000000009 80000001 0002 0000000000000003 0008"),
    ("reset key", keys.reset_key(7, 8), "65 00000007 00000008"),
    ("failed id", record.failed_id(b"id", HISTORY, 8), "6964 00000001 0002 0000000000000003 0008"),
    ("index waiting", record.encode_index_waiting(1, 2), "01 0000000000000001 0000000000000002"),
    ("index committed", record.encode_index_withdrawn(1, 2, EntryState.COMMITTED),
     "05 0000000000000001 0000000000000002"),
    ("terms", record.encode_terms(record.Terms(1, 2)), "0000000000000001 0000000000000002"),
    ("transaction id", ENTRIES.encode(HandleKind.TRANSACTION, EntryHandle(1, "t", b"id")).encode(),
     b"EgAAAAAAAAABAXRpZNTJLEoK6HpIR_oSwmK7VI4".hex()),
    ("recall handle", ENTRIES.encode(HandleKind.RECALL, EntryHandle(1, "t", b"id")).encode(),
     b"AgAAAAAAAAABAXRpZJyhIDeM2C7Dd6ZvQvfR2Rs".hex()),
    ("index finished", record.encode_index_finished(EntryState.DELIVERED, 1, 2, 3, 4),
     "03 0000000000000001 0000000000000002 0003 0000000000000004"),
    ("outbox row", BLOCK,
     "01 00000001 0000000000000002 00000001 0001 0000000000000003 0000000000000004 65"),
    ("outbox figures", outbox.encode_state(outbox.OutboxState(1, 2, 3)),
     "0000000000000001 0000000000000002 0000000000000003"),
    ("event", events.encode_event(3, 1, 2, 3, 4, 5, b"id"), "03 00000001 00000002 0003 0004 0000000000000005 6964"),
    ("topic event", events.name_event(events.EventKind.TOPIC_CREATED, 7),
     "09 00000007 00000000 ffff 0000 0000000000000000"),
    ("group event", events.name_event(events.EventKind.GROUP_CREATED, 7),
     "0a 00000000 00000007 ffff 0000 0000000000000000"),
    ("gap event", events.gap_event(5, 6), "0d 00000000 00000000 ffff 0000 0000000000000005 0000000000000006"),
    ("identity", identity.encode_identity(IDENTITY),
     "01 0000000000000007" + bytes(range(32)).hex() + "0000000000000009 000000000000000a"),
    ("receipt handle", bytes.fromhex(RECEIPTS.encode(receipt.Receipt(1, 2, 3, 4, 5, 6, False, b"id"))),
     "04000000010000000200030000000000000004000000000000000500060000000000000000076964b897533690d8d3114e805b0d11b5defc"),
    ("handle of a push consumer", bytes.fromhex(RECEIPTS.encode(receipt.Receipt(1, 2, 3, 4, 5, 6, True, b"id"))),
     "0400000001000000020003000000000000000400000000000000050006010000000000000007696478991a1871613be1600e363a420ea578"),
]  # fmt: skip


@pytest.mark.parametrize(("made", "expected"), [each[1:] for each in GOLDEN], ids=[each[0] for each in GOLDEN])
def test_layouts_do_not_drift(made: bytes, expected: str) -> None:
    """A change here is a new format version: stores written by released versions have these bytes."""
    assert made.hex() == expected.replace(" ", "")


def test_numbers_of_kinds_do_not_drift() -> None:
    """They stand in rows that were written; none is ever used for something else."""
    states = {"WAITING": 1, "QUEUED": 2, "DELIVERED": 3, "WITHDRAWN": 4, "COMMITTED": 5}
    assert {kind.name: int(kind) for kind in EntryState} == states
    entries = {"DELAYED": 1, "RETRY": 2, "SPOOLED": 3, "WHOLE_HALF": 4, "TRANSACTION": 5, "DELAYED_FOR": 6}
    assert {kind.name: int(kind) for kind in record.EntryKind} == entries
    assert [kind.name for kind in sorted(events.EventKind)] == [
        "SCHEDULED", "QUEUED", "DELIVERED", "ACKED", "LEASE_EXPIRED", "GIVEN_BACK", "INVISIBLE_CHANGED", "FILTERED",
        "TOPIC_CREATED", "GROUP_CREATED", "OPENED", "CLOSED", "GAP", "NACKED", "RETRIED", "RETRY_MOVED",
        "DEAD_EXHAUSTED", "DEAD_TOO_OLD", "DEAD_FORWARDED", "DEAD_SENT_BACK", "DEAD_BY_OPERATOR", "REDRIVEN", "PURGED",
        "GROUP_CHANGED", "SENT", "SEND_FAILED", "SEND_DEAD", "REQUEUED", "DROPPED",
        "HEARTBEAT", "SUBSCRIBED", "TAIL_LOST", "POSTPONED", "RECALLED", "EXPIRED",
        "HALF", "COMMITTED", "ROLLED_BACK", "TX_CHECKED", "TX_GIVEN_UP",
        "TOPIC_CHANGED", "TOPIC_REMOVED", "GROUP_REMOVED", "RESET", "OFFSET_SET",
        "QUEUED_FOR_GROUP", "TX_TOO_OLD", "CLOCK_CHANGED", "CLOCK_ACCEPTED",
    ]  # fmt: skip
    assert [int(kind) for kind in sorted(events.EventKind)] == [*range(1, 46), 50, 51, 56, 57]
