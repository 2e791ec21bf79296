"""Keys of every column family. Fixed width, big-endian, so that byte order is the order that is meant.

    timeline   deliver_at_ms 8 | sequence 8; behind all times: 0xff 17 | sequence 8, the body of a half message
    index      generation 4 | scope 4 | packed message id        generation 0: waits; else finished in that generation
    queue      topic_id 4 | queue_id 2 | queue_offset 8
    group      group_id 4 | topic_id 4 | queue_id 2 | kind 1 | number 8
    audit      sequence of the block's first event 8
    meta       one letter of kind, then what it names

In memory a timeline key is the integer ``deliver_at_ms << 64 | sequence``: marks compare and step as numbers.
"""

from __future__ import annotations

import struct

from dmq.errors import StoreCorrupt

_TIMELINE = struct.Struct(">QQ")
_QUEUE = struct.Struct(">IHQ")
_INDEX = struct.Struct(">II")
_GROUP_QUEUE = struct.Struct(">IIH")
_GROUP = struct.Struct(">IIHBQ")
_U64 = struct.Struct(">Q")

WAITING_GENERATION = 0
TIMELINE_END = b"\xff" * 17  # behind every time; bodies of half messages follow

META_FORMAT = b"F"
META_BOOT = b"B"
META_SEQUENCE = b"S"
META_DONE = b"D"
META_OUTBOX = b"O"
META_GENERATION = b"G"
META_CLOSED = b"X"
META_IDENTITY = b"I"
META_CLOCK = b"C"  # one reading of the clocks, see ``dmq.store.believed``
META_MOVES = b"M"  # steps back whose delays are being moved, see ``dmq.scheduler.moves``
META_QUOTAS = b"Q"  # the limits of keys and addresses, see ``dmq.acl.quotas``
META_HOUR = b"m"  # first letter of the keys of hours
_META_NAME = b"n"
_HOUR = struct.Struct(">cIQ")
_META_TOTAL = struct.Struct(">cI")


def timeline_mark(deliver_at_ms: int, sequence: int) -> int:
    """Return the number of a timeline key."""
    return deliver_at_ms << 64 | sequence


def timeline_key(mark: int) -> bytes:
    """Return the bytes of a timeline key."""
    return mark.to_bytes(16, "big")


pack_timeline_key = _TIMELINE.pack
unpack_timeline_key = _TIMELINE.unpack
pack_index_prefix = _INDEX.pack  # (generation, scope)
pack_queue_key = _QUEUE.pack  # (topic_id, queue_id, queue_offset)
pack_group_key = _GROUP.pack  # (group_id, topic_id, queue_id, kind, number)
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


def half_body_key(sequence: int) -> bytes:
    """Return the timeline key of the body of a half message, which lies behind everything that has a time."""
    return TIMELINE_END + _U64.pack(sequence)


def is_half_body_key(key: bytes) -> bool:
    """Say whether a timeline key is that of a half message's body."""
    return len(key) == len(TIMELINE_END) + 8 and key.startswith(TIMELINE_END)


def queue_offset_of(key: bytes) -> int:
    """Return the offset in a queue key."""
    return int.from_bytes(key[6:14], "big")


def group_queue_range(group_id: int, topic_id: int, queue_id: int) -> tuple[bytes, bytes]:
    """Return the range of all rows one group keeps for one queue."""
    start = _GROUP_QUEUE.pack(group_id, topic_id, queue_id)
    return start, start + b"\xff" * 10


def unpack_group_row(key: bytes) -> tuple[int, int]:
    """Return ``(kind, number)`` of a group row."""
    return key[10], int.from_bytes(key[11:19], "big")


def generation_range(first: int, last: int) -> tuple[bytes, bytes]:
    """Return the index range of generations ``first`` up to, not including, ``last``."""
    return first.to_bytes(4, "big"), last.to_bytes(4, "big")


def hour_key(scope: int, hour: int) -> bytes:
    """Return the meta key of how many entries of ``scope`` are due in each minute of an hour since 1970."""
    return _HOUR.pack(META_HOUR, scope, hour)


def hour_range(scope: int, first: int, last: int) -> tuple[bytes, bytes]:
    """Return the range of a scope's hours ``first`` up to, not including, ``last``."""
    return _HOUR.pack(META_HOUR, scope, first), _HOUR.pack(META_HOUR, scope, last)


def scope_of_hour(key: bytes) -> int:
    """Return the scope in an hour's key."""
    return int.from_bytes(key[1:5], "big")


def hour_of(key: bytes) -> int:
    """Return the number of the hour in its key."""
    return int.from_bytes(key[5:13], "big")


def total_key(scope: int) -> bytes:
    """Return the meta key of how many entries of ``scope`` wait."""
    return _META_TOTAL.pack(b"t", scope)


def total_range() -> tuple[bytes, bytes]:
    """Return the range of all scopes' totals."""
    return b"t", b"u"


def scope_of_total(key: bytes) -> int:
    """Return the scope in a total key."""
    return int.from_bytes(key[1:5], "big")


def name_key(name_id: int) -> bytes:
    """Return the meta key of a topic's or group's record."""
    return _META_NAME + name_id.to_bytes(4, "big")


def name_range() -> tuple[bytes, bytes]:
    """Return the range of all topics' and groups' records."""
    return b"n", b"o"


def settings_key(group_id: int) -> bytes:
    """Return the meta key of a group's settings."""
    return b"p" + group_id.to_bytes(4, "big")


def settings_range() -> tuple[bytes, bytes]:
    """Return the range of all groups' settings."""
    return b"p", b"q"


def holds_key(topic_id: int) -> bytes:
    """Return the meta key of what kinds of messages a topic took."""
    return b"h" + topic_id.to_bytes(4, "big")


def holds_range() -> tuple[bytes, bytes]:
    """Return the range of what topics took."""
    return b"h", b"i"


def spool_total_key(type_id: int) -> bytes:
    """Return the meta key of what a spool holds of a type."""
    return b"w" + type_id.to_bytes(4, "big")


def spool_range(letter: bytes, type_id: int, rest: bytes = b"") -> tuple[bytes, bytes]:
    """Return the range of group rows a spool keeps of one kind (one letter) for a type; no group has their id."""
    start = b"\xff\xff\xff\xff" + letter + type_id.to_bytes(4, "big") + rest
    return start, start + b"\xff" * 32


def waiting_range(scope: int) -> tuple[bytes, bytes]:
    """Return the index range of all that waits of a scope."""
    return _INDEX.pack(WAITING_GENERATION, scope), _INDEX.pack(WAITING_GENERATION, scope + 1)


def begin_key(topic_id: int, queue_id: int) -> bytes:
    """Return the meta key of where a queue begins, once something was removed from its front."""
    return b"b" + topic_id.to_bytes(4, "big") + queue_id.to_bytes(2, "big")


def procedure_key(topic_id: int, group_id: int) -> bytes:
    """Return the meta key of a procedure that an operator ordered; an id may be 0."""
    return b"k" + topic_id.to_bytes(4, "big") + group_id.to_bytes(4, "big")


def procedure_range() -> tuple[bytes, bytes]:
    """Return the range of all procedures."""
    return b"k", b"l"


def reset_key(group_id: int, topic_id: int) -> bytes:
    """Return the meta key of the last epoch before a group was reset on a topic: handles up to it are void."""
    return b"e" + group_id.to_bytes(4, "big") + topic_id.to_bytes(4, "big")


def reset_range(group_id: int) -> tuple[bytes, bytes]:
    """Return the range of the resets of a group."""
    return reset_key(group_id, 0), reset_key(group_id + 1, 0)


def job_key(job_id: int) -> bytes:
    """Return the meta key of a job on dead letters."""
    return b"j" + job_id.to_bytes(8, "big")


def job_range() -> tuple[bytes, bytes]:
    """Return the range of all jobs, in the order of their ids."""
    return b"j", b"k"
