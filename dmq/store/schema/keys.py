"""Families, and the keys of all but the group family. Fixed width, big-endian: byte order is the order that is meant.

    timeline   deliver_at_ms 8 | sequence 8
               behind all times: bit 1, topic_id bits 21, due ms bits 42 | sequence 8, an entry that is held;
               0xff 17 | sequence 8, the body of a half message
    index      generation 4 | scope 4 | packed message id        generation 0: waits; else finished in that generation
               generation 4 | scope 4 | own key                  the last holder of a key that is free
    queue      topic_id 4 | queue_id 2 | queue_offset 8
    audit      sequence of the block's first event 8
    meta       one letter of kind, then what it names

In memory a timeline key is the integer ``deliver_at_ms << 64 | sequence``: marks compare and step as numbers.
"""

from __future__ import annotations

import struct
from enum import IntEnum

from dmq.errors import StoreCorrupt

# 1: counts of what waits in a row per minute.
# 2: no identity, failed copies without an epoch, tags of at most 255 bytes, half messages with their body in their row.
# Also in 2: no row of the clocks, ids aged by wall time.
# 3: no schedules of recurring messages, nothing held, and no message says after which time it is not to be delivered.
# 4: no own keys.
# 5: no reasons of failures.
FORMAT_VERSION = 6

_TIMELINE = struct.Struct(">QQ")
_QUEUE = struct.Struct(">IHQ")
_INDEX = struct.Struct(">II")
_U64 = struct.Struct(">Q")
_HOUR = struct.Struct(">cIQ")
_META_TOTAL = struct.Struct(">cI")
_HALF_SCOPE = 0x8000_0000
_RECURRING_SCOPE = 0x4000_0000
_HELD_MS_BITS = 42  # until the year 2109; what is due later lies under the last of them
_HELD_TOPIC_BITS = 21
_HELD = 1 << 63

OWN_KEY_SCOPE = 0x2000_0000  # the bit in scopes of last holders of own keys
WAITING_GENERATION = 0
TIMELINE_END = b"\xff" * 17  # behind every time and every held entry; bodies of half messages follow
HELD_BEGIN = _HELD.to_bytes(8, "big") + bytes(8)  # behind every time; held entries follow
HELD_TOPIC_ID_MAX = (1 << _HELD_TOPIC_BITS) - 1
TIMELINE_KEY_BYTES, QUEUE_KEY_BYTES, INDEX_PREFIX_BYTES = _TIMELINE.size, _QUEUE.size, _INDEX.size

# Keys of one row.
META_FORMAT = b"F"
META_BOOT = b"B"
META_SEQUENCE = b"S"
META_DONE = b"D"
META_OUTBOX = b"O"
META_GENERATION = b"G"
META_CLOSED = b"X"
META_IDENTITY = b"I"
META_CLOCK = b"C"  # one reading of the clocks
META_MOVES = b"M"  # steps back whose delays are being moved
META_QUOTAS = b"Q"  # the limits of keys and addresses
META_BORDER = b"W"  # what the forwarder left in doubt
META_LEDGER_HEAD = b"U"  # since when there is a ledger
META_BYTES_HEAD = b"Z"  # since when bytes that wait are counted
# First letters of the keys of many.
META_HOUR = b"m"  # how many entries of a scope are due in each minute of an hour
META_MINUTE = b"c"  # the same by the minute, in format 1
META_TOTAL = b"t"  # how many entries of a scope wait
META_LEDGER = b"u"  # what became of messages; right behind the totals, so that one scan sees both at one instant
META_NAME = b"n"  # a topic, a group or a lane
META_SETTINGS = b"p"  # of a topic or a group
META_HOLDS = b"h"  # what kinds of messages a topic took
META_BEGIN = b"b"  # where a queue begins, once something was removed from its front
META_BOUND = b"f"  # the offset below which forwarding may have begun, of a queue that is not being forwarded
META_PROCEDURE = b"k"  # what an operator ordered and takes many units
META_RESET = b"e"  # the last epoch before a group was reset on a topic: handles up to it are void
META_JOB = b"j"  # on dead letters
META_ACTIVITY = b"a"  # what an operator changed
META_SCHEDULE = b"r"  # of a recurring message
META_PROGRESS = b"s"  # how far a schedule is
META_RECURRING = b"y"  # what a schedule sends
META_OWN_KEY = b"x"  # which message of a topic waits under a key of its sender
META_HELD = b"v"  # how many entries of a topic are held
META_BYTES = b"z"  # how many bytes of a scope wait
META_SPOOL_TOTAL = b"w"  # what a spool holds of a type; no daemon has one


class Family(IntEnum):
    """Column families; the number is the index of its handle, the name is its name on disk in lower case."""

    META = 0
    TIMELINE = 1
    INDEX = 2
    QUEUE = 3
    GROUP = 4
    AUDIT = 5


def timeline_mark(deliver_at_ms: int, sequence: int) -> int:
    """Return the number of a timeline key."""
    return deliver_at_ms << 64 | sequence


def sequence_of(mark: int) -> int:
    """Return the sequence in the number of a timeline key."""
    return mark & 2**64 - 1


def timeline_key(mark: int) -> bytes:
    """Return the bytes of a timeline key."""
    return mark.to_bytes(16, "big")


pack_timeline_key = _TIMELINE.pack
unpack_timeline_key = _TIMELINE.unpack
pack_index_prefix = _INDEX.pack  # (generation, scope)
pack_queue_key = _QUEUE.pack  # (topic_id, queue_id, queue_offset)
unpack_queue_key = _QUEUE.unpack
pack_u64 = _U64.pack
pack_pair = _TIMELINE.pack


def unpack_u64(value: bytes) -> int:
    """Return the number in an eight-byte value; ``StoreCorrupt`` for another length."""
    if len(value) != 8:
        raise StoreCorrupt(f"a figure of {len(value)} bytes instead of 8")
    number: int = _U64.unpack(value)[0]
    return number


def unpack_pair(value: bytes) -> tuple[int, int]:
    """Return the two numbers in a sixteen-byte value; ``StoreCorrupt`` for another length."""
    if len(value) != 16:
        raise StoreCorrupt(f"a pair of figures of {len(value)} bytes instead of 16")
    first, second = _TIMELINE.unpack(value)
    return first, second


def unpack_mark(value: bytes) -> int:
    """Return the number of a timeline key that was kept as a figure; ``StoreCorrupt`` if it cannot be one."""
    return timeline_mark(*unpack_pair(value))


def held_mark(topic_id: int, mark: int) -> int:
    """Return the number of the key under which what was due under ``mark`` lies while its topic holds it.

    ``topic_id`` is at most ``HELD_TOPIC_ID_MAX``. A topic's lie together, in the order in which they were due.
    """
    due_ms = min(mark >> 64, (1 << _HELD_MS_BITS) - 1)
    return timeline_mark(_HELD | topic_id << _HELD_MS_BITS | due_ms, sequence_of(mark))


def held_range(topic_id: int) -> tuple[bytes, bytes]:
    """Return the timeline range of what a topic holds."""
    start = _HELD | topic_id << _HELD_MS_BITS
    stop = start + (1 << _HELD_MS_BITS)
    return timeline_key(timeline_mark(start, 0)), timeline_key(stop << 64) if stop < 1 << 64 else TIMELINE_END


def is_held_key(key: bytes) -> bool:
    """Say whether a timeline key is that of an entry that is held."""
    return key >= HELD_BEGIN and len(key) == TIMELINE_KEY_BYTES


def held_topic_id(key: bytes) -> int:
    """Return the topic in the key of an entry that is held."""
    return (int.from_bytes(key[:8], "big") & ~_HELD) >> _HELD_MS_BITS


def half_scope(topic_id: int) -> int:
    """Return the scope of a topic's half messages; ids of names are far smaller."""
    return topic_id | _HALF_SCOPE


def twin_scope(scope: int) -> int:
    """Return the scope of a topic's half messages for the topic's own scope, and the reverse. The former is larger."""
    return scope ^ _HALF_SCOPE


def recurring_scope(topic_id: int) -> int:
    """Return the scope of the schedules of a topic; ids of names are far smaller."""
    return topic_id | _RECURRING_SCOPE


def topic_of_scope(scope: int) -> int:
    """Return the id of the topic, or of the group, that a scope belongs to."""
    return scope & ~(_HALF_SCOPE | _RECURRING_SCOPE | OWN_KEY_SCOPE)


def half_body_key(sequence: int) -> bytes:
    """Return the timeline key of the body of a half message, which lies behind everything that has a time."""
    return TIMELINE_END + _U64.pack(sequence)


def is_half_body_key(key: bytes) -> bool:
    """Say whether a timeline key is that of a half message's body."""
    return len(key) == len(TIMELINE_END) + 8 and key.startswith(TIMELINE_END)


def queue_offset_of(key: bytes) -> int:
    """Return the offset in a queue key."""
    return int.from_bytes(key[6:14], "big")


def index_place(key: bytes) -> tuple[int, int]:
    """Return the generation and the scope in an index key."""
    return int.from_bytes(key[:4], "big"), int.from_bytes(key[4:8], "big")


def generation_range(first: int, last: int) -> tuple[bytes, bytes]:
    """Return the index range of generations ``first`` up to, not including, ``last``."""
    return first.to_bytes(4, "big"), last.to_bytes(4, "big")


def waiting_range(scope: int) -> tuple[bytes, bytes]:
    """Return the index range of all that waits of a scope."""
    return _INDEX.pack(WAITING_GENERATION, scope), _INDEX.pack(WAITING_GENERATION, scope + 1)


def meta_range(letter: bytes) -> tuple[bytes, bytes]:
    """Return the range of all rows of a kind that has many."""
    return letter, bytes((letter[0] + 1,))


def meta_id(key: bytes) -> int:
    """Return the id that follows the letter in a key: of a name, a type or a scope."""
    return int.from_bytes(key[1:5], "big")


def hour_key(scope: int, hour: int) -> bytes:
    """Return the meta key of how many entries of ``scope`` are due in each minute of an hour since 1970."""
    return _HOUR.pack(META_HOUR, scope, hour)


def hour_range(scope: int, first: int, last: int) -> tuple[bytes, bytes]:
    """Return the range of a scope's hours ``first`` up to, not including, ``last``."""
    return _HOUR.pack(META_HOUR, scope, first), _HOUR.pack(META_HOUR, scope, last)


def hour_of(key: bytes) -> int:
    """Return the number of the hour in its key."""
    return int.from_bytes(key[5:13], "big")


def total_key(scope: int) -> bytes:
    """Return the meta key of how many entries of ``scope`` wait."""
    return _META_TOTAL.pack(META_TOTAL, scope)


def bytes_key(scope: int) -> bytes:
    """Return the meta key of how many bytes of ``scope`` wait."""
    return _META_TOTAL.pack(META_BYTES, scope)


def held_key(topic_id: int) -> bytes:
    """Return the meta key of how many entries of a topic are held."""
    return META_HELD + topic_id.to_bytes(4, "big")


def name_key(name_id: int) -> bytes:
    """Return the meta key of a topic's or group's record."""
    return META_NAME + name_id.to_bytes(4, "big")


def settings_key(name_id: int) -> bytes:
    """Return the meta key of a topic's or group's settings."""
    return META_SETTINGS + name_id.to_bytes(4, "big")


def holds_key(topic_id: int) -> bytes:
    """Return the meta key of what kinds of messages a topic took."""
    return META_HOLDS + topic_id.to_bytes(4, "big")


def begin_key(topic_id: int, queue_id: int) -> bytes:
    """Return the meta key of where a queue begins, once something was removed from its front."""
    return META_BEGIN + topic_id.to_bytes(4, "big") + queue_id.to_bytes(2, "big")


def bound_key(topic_id: int, queue_id: int) -> bytes:
    """Return the meta key of the offset below which messages of a queue may have been forwarded."""
    return META_BOUND + topic_id.to_bytes(4, "big") + queue_id.to_bytes(2, "big")


def queue_of_begin(key: bytes) -> tuple[int, int]:
    """Return the topic and the queue in the meta key of where a queue begins."""
    return meta_id(key), int.from_bytes(key[5:7], "big")


def procedure_key(topic_id: int, group_id: int) -> bytes:
    """Return the meta key of a procedure that an operator ordered; an id may be 0."""
    return META_PROCEDURE + topic_id.to_bytes(4, "big") + group_id.to_bytes(4, "big")


def reset_key(group_id: int, topic_id: int) -> bytes:
    """Return the meta key of the last epoch before a group was reset on a topic: handles up to it are void."""
    return META_RESET + group_id.to_bytes(4, "big") + topic_id.to_bytes(4, "big")


def reset_range(group_id: int) -> tuple[bytes, bytes]:
    """Return the range of the resets of a group."""
    return reset_key(group_id, 0), reset_key(group_id + 1, 0)


def job_key(job_id: int) -> bytes:
    """Return the meta key of a job on dead letters."""
    return META_JOB + job_id.to_bytes(8, "big")


def activity_key(number: int) -> bytes:
    """Return the meta key of what an operator changed."""
    return META_ACTIVITY + number.to_bytes(8, "big")
