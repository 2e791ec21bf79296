"""Column families, and the keys of all families except the group family and the property family.

Fields have a fixed width and are big-endian, so that byte order equals logical order.

    timeline   deliver_at_ms 8 | sequence 8
               after all times: bit 1, topic_id bits 21, due ms bits 42 | sequence 8, a held entry;
               0xff 17 | sequence 8, the body of a half message
    index      generation 4 | scope 4 | packed message id        generation 0: waiting; else finished in that generation
               generation 4 | scope 4 | own key                  the last holder of a free key
    queue      topic_id 4 | queue_id 2 | queue_offset 8
    audit      sequence of the block's first event 8
    meta       one letter for the kind | the id or name of the subject

In memory a timeline key is the integer ``deliver_at_ms << 64 | sequence``, so that marks compare and step as numbers.
"""

from __future__ import annotations

import struct
from enum import IntEnum

from dmq.errors import StoreCorrupt

# Older formats and their differences. 1: counts of pending entries in one row per minute.
# 2: no identity, failed copies without an epoch, tags of at most 255 bytes, half messages with their body in their row.
# Also in 2: no clock row, message ids aged by wall time.
# 3: no schedules of recurring messages, no held entries, no message expiry.
# 4: no own keys.
# 5: no failure reasons.
# 6: no indexed properties, and no family for them.
FORMAT_VERSION = 7

_TIMELINE = struct.Struct(">QQ")
_QUEUE = struct.Struct(">IHQ")
_INDEX = struct.Struct(">II")
_U64 = struct.Struct(">Q")
_HOUR = struct.Struct(">cIQ")
_META_TOTAL = struct.Struct(">cI")
_HALF_SCOPE = 0x8000_0000
_RECURRING_SCOPE = 0x4000_0000
_HELD_MS_BITS = 42  # until the year 2109; later due times are stored as the last one
_HELD_TOPIC_BITS = 21
_HELD = 1 << 63

OWN_KEY_SCOPE = 0x2000_0000  # bit set in scopes of last holders of own keys
WAITING_GENERATION = 0
TIMELINE_END = b"\xff" * 17  # after every time and every held entry; bodies of half messages follow
HELD_BEGIN = _HELD.to_bytes(8, "big") + bytes(8)  # after every time; held entries follow
HELD_TOPIC_ID_MAX = (1 << _HELD_TOPIC_BITS) - 1
TIMELINE_KEY_BYTES, QUEUE_KEY_BYTES, INDEX_PREFIX_BYTES = _TIMELINE.size, _QUEUE.size, _INDEX.size

# Keys of single rows.
META_FORMAT = b"F"
META_BOOT = b"B"
META_SEQUENCE = b"S"
META_DONE = b"D"
META_OUTBOX = b"O"
META_GENERATION = b"G"
META_CLOSED = b"X"
META_IDENTITY = b"I"
META_CLOCK = b"C"  # one reading of the clocks
META_MOVES = b"M"  # unfinished corrections after backward clock steps
META_QUOTAS = b"Q"  # limits of access keys and addresses
META_BORDER = b"W"  # whether forwarding left messages in doubt
META_LEDGER_HEAD = b"U"  # start of the ledger
META_BYTES_HEAD = b"Z"  # start of counting pending bytes
META_POSITION = b"L"  # position in the replication log
META_OVERDUE = b"N"  # last notification of overdue messages
# First letters of the keys of kinds with many rows.
META_HOUR = b"m"  # counts of a scope's due entries for each minute of an hour
META_MINUTE = b"c"  # the same for one minute, in format 1
META_TOTAL = b"t"  # number of pending entries of a scope
META_LEDGER = b"u"  # ledger; directly after the totals, so that one scan reads both at one instant
META_NAME = b"n"  # a topic, a group or a lane
META_SETTINGS = b"p"  # settings of a topic or a group
META_HOLDS = b"h"  # kinds of messages that a topic has accepted
META_BEGIN = b"b"  # first offset of a queue, once messages were removed from its front
META_BOUND = b"f"  # the offset below which forwarding may have begun, of a queue that is not being forwarded
META_PROCEDURE = b"k"  # an operator's procedure, which needs many units
META_RESET = b"e"  # reset epoch of a group on a topic: handles up to it are void
META_JOB = b"j"  # a redrive or purge of dead letters
META_MESSAGE_JOB = b"l"  # a bulk change of pending messages: dmq.store.schema.operators.message_jobs
META_JOB_MESSAGE = b"i"  # a message that such a job selected, with its outcome
META_ACTIVITY = b"a"  # an operator's activity
META_SCHEDULE = b"r"  # schedule of a recurring message
META_PROGRESS = b"s"  # progress of a schedule
META_RECURRING = b"y"  # message that a schedule sends
META_OWN_KEY = b"x"  # pending message of a topic under a sender's own key
META_NOTIFIED = b"d"  # position of notifications in a dead-letter queue
META_HELD = b"v"  # number of held entries of a topic
META_BYTES = b"z"  # number of pending bytes of a scope
META_SPOOL_TOTAL = b"w"  # a producer store's totals of a type; never in a daemon's store


class Family(IntEnum):
    """Column families. The number is the index of the family's handle; the lower-case name is its name on disk."""

    META = 0
    TIMELINE = 1
    INDEX = 2
    QUEUE = 3
    GROUP = 4
    AUDIT = 5
    PROPERTY = 6  # dmq.store.schema.messages.properties


def timeline_mark(deliver_at_ms: int, sequence: int) -> int:
    """Return a timeline key as a number."""
    return deliver_at_ms << 64 | sequence


def sequence_of(mark: int) -> int:
    """Return the sequence of a timeline key that is given as a number."""
    return mark & 2**64 - 1


def timeline_key(mark: int) -> bytes:
    """Return the bytes of a timeline key that is given as a number."""
    return mark.to_bytes(16, "big")


pack_timeline_key = _TIMELINE.pack
unpack_timeline_key = _TIMELINE.unpack
pack_index_prefix = _INDEX.pack  # (generation, scope)
pack_queue_key = _QUEUE.pack  # (topic_id, queue_id, queue_offset)
unpack_queue_key = _QUEUE.unpack
pack_u64 = _U64.pack
pack_pair = _TIMELINE.pack


def unpack_u64(value: bytes) -> int:
    """Return the number in an eight-byte value; raise ``StoreCorrupt`` for another length."""
    if len(value) != 8:
        raise StoreCorrupt(f"a figure of {len(value)} bytes instead of 8")
    number: int = _U64.unpack(value)[0]
    return number


def unpack_pair(value: bytes) -> tuple[int, int]:
    """Return the two numbers in a sixteen-byte value; raise ``StoreCorrupt`` for another length."""
    if len(value) != 16:
        raise StoreCorrupt(f"a pair of figures of {len(value)} bytes instead of 16")
    first, second = _TIMELINE.unpack(value)
    return first, second


def unpack_mark(value: bytes) -> int:
    """Return the number of a timeline key that is stored as a value; raise ``StoreCorrupt`` for another length."""
    return timeline_mark(*unpack_pair(value))


def held_mark(topic_id: int, mark: int) -> int:
    """Return the key number of a held entry that was due under ``mark``.

    ``topic_id`` is at most ``HELD_TOPIC_ID_MAX``. Held entries of a topic are adjacent, in the order of their due
    times.
    """
    due_ms = min(mark >> 64, (1 << _HELD_MS_BITS) - 1)
    return timeline_mark(_HELD | topic_id << _HELD_MS_BITS | due_ms, sequence_of(mark))


def held_range(topic_id: int) -> tuple[bytes, bytes]:
    """Return the timeline range of a topic's held entries."""
    start = _HELD | topic_id << _HELD_MS_BITS
    stop = start + (1 << _HELD_MS_BITS)
    return timeline_key(timeline_mark(start, 0)), timeline_key(stop << 64) if stop < 1 << 64 else TIMELINE_END


def is_held_key(key: bytes) -> bool:
    """Return True if a timeline key is that of a held entry."""
    return key >= HELD_BEGIN and len(key) == TIMELINE_KEY_BYTES


def held_topic_id(key: bytes) -> int:
    """Return the topic id in the key of a held entry."""
    return (int.from_bytes(key[:8], "big") & ~_HELD) >> _HELD_MS_BITS


def half_scope(topic_id: int) -> int:
    """Return the scope of a topic's half messages. Name ids are far below the bit it sets."""
    return topic_id | _HALF_SCOPE


def twin_scope(scope: int) -> int:
    """Convert between a topic's own scope and the scope of its half messages, which is the larger one."""
    return scope ^ _HALF_SCOPE


def recurring_scope(topic_id: int) -> int:
    """Return the scope of a topic's schedules. Name ids are far below the bit it sets."""
    return topic_id | _RECURRING_SCOPE


def topic_of_scope(scope: int) -> int:
    """Return the topic or group id of a scope."""
    return scope & ~(_HALF_SCOPE | _RECURRING_SCOPE | OWN_KEY_SCOPE)


def half_body_key(sequence: int) -> bytes:
    """Return the timeline key of the body of a half message. It sorts after every key with a time."""
    return TIMELINE_END + _U64.pack(sequence)


def is_half_body_key(key: bytes) -> bool:
    """Return True if a timeline key is that of a half message's body."""
    return len(key) == len(TIMELINE_END) + 8 and key.startswith(TIMELINE_END)


def queue_offset_of(key: bytes) -> int:
    """Return the offset in a queue key."""
    return int.from_bytes(key[6:14], "big")


def index_place(key: bytes) -> tuple[int, int]:
    """Return the generation and the scope in an index key."""
    return int.from_bytes(key[:4], "big"), int.from_bytes(key[4:8], "big")


def generation_range(first: int, last: int) -> tuple[bytes, bytes]:
    """Return the index range of generations ``first`` (inclusive) to ``last`` (exclusive)."""
    return first.to_bytes(4, "big"), last.to_bytes(4, "big")


def waiting_range(scope: int) -> tuple[bytes, bytes]:
    """Return the index range of a scope's waiting entries."""
    return _INDEX.pack(WAITING_GENERATION, scope), _INDEX.pack(WAITING_GENERATION, scope + 1)


def meta_range(letter: bytes) -> tuple[bytes, bytes]:
    """Return the range of all meta rows of a kind."""
    return letter, bytes((letter[0] + 1,))


def meta_id(key: bytes) -> int:
    """Return the id after the kind letter in a meta key: the id of a name, a type or a scope."""
    return int.from_bytes(key[1:5], "big")


def hour_key(scope: int, hour: int) -> bytes:
    """Return the meta key of a scope's due counts per minute in one hour, numbered from 1970."""
    return _HOUR.pack(META_HOUR, scope, hour)


def hour_range(scope: int, first: int, last: int) -> tuple[bytes, bytes]:
    """Return the range of a scope's hours ``first`` (inclusive) to ``last`` (exclusive)."""
    return _HOUR.pack(META_HOUR, scope, first), _HOUR.pack(META_HOUR, scope, last)


def hour_of(key: bytes) -> int:
    """Return the hour number in the key of an hour's row."""
    return int.from_bytes(key[5:13], "big")


def total_key(scope: int) -> bytes:
    """Return the meta key of the number of pending entries of ``scope``."""
    return _META_TOTAL.pack(META_TOTAL, scope)


def bytes_key(scope: int) -> bytes:
    """Return the meta key of the number of pending bytes of ``scope``."""
    return _META_TOTAL.pack(META_BYTES, scope)


def held_key(topic_id: int) -> bytes:
    """Return the meta key of the number of held entries of a topic."""
    return META_HELD + topic_id.to_bytes(4, "big")


def name_key(name_id: int) -> bytes:
    """Return the meta key of the record of a topic, a group or a lane."""
    return META_NAME + name_id.to_bytes(4, "big")


def settings_key(name_id: int) -> bytes:
    """Return the meta key of the settings of a topic or a group."""
    return META_SETTINGS + name_id.to_bytes(4, "big")


def holds_key(topic_id: int) -> bytes:
    """Return the meta key of the kinds of messages that a topic has accepted."""
    return META_HOLDS + topic_id.to_bytes(4, "big")


def begin_key(topic_id: int, queue_id: int) -> bytes:
    """Return the meta key of a queue's first offset. The row exists once messages were removed from its front."""
    return META_BEGIN + topic_id.to_bytes(4, "big") + queue_id.to_bytes(2, "big")


def bound_key(topic_id: int, queue_id: int) -> bytes:
    """Return the meta key of the offset below which messages of a queue may have been forwarded."""
    return META_BOUND + topic_id.to_bytes(4, "big") + queue_id.to_bytes(2, "big")


def queue_of_begin(key: bytes) -> tuple[int, int]:
    """Return the topic id and queue id in the meta key of a queue's first offset."""
    return meta_id(key), int.from_bytes(key[5:7], "big")


def procedure_key(topic_id: int, group_id: int) -> bytes:
    """Return the meta key of a procedure. One of the ids may be 0."""
    return META_PROCEDURE + topic_id.to_bytes(4, "big") + group_id.to_bytes(4, "big")


def reset_key(group_id: int, topic_id: int) -> bytes:
    """Return the meta key of a group's reset epoch on a topic: receipt handles up to that epoch are void."""
    return META_RESET + group_id.to_bytes(4, "big") + topic_id.to_bytes(4, "big")


def reset_range(group_id: int) -> tuple[bytes, bytes]:
    """Return the range of all reset epochs of a group."""
    return reset_key(group_id, 0), reset_key(group_id + 1, 0)


def job_key(job_id: int) -> bytes:
    """Return the meta key of a dead-letter job."""
    return META_JOB + job_id.to_bytes(8, "big")


def activity_key(number: int) -> bytes:
    """Return the meta key of an operator activity."""
    return META_ACTIVITY + number.to_bytes(8, "big")
