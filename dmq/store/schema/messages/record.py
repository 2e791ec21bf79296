"""Values of the timeline and queue families. Each starts with a format version; integers are big-endian.

    waiting entry (timeline)                              queued message (queue)
    0  version 1                                          0  version 1
    1  kind 1                                             1  flags 1 (1: has a history)
    2  retry count 2; of a delayed send its queue         2  attempts before 2
    4  topic id 4                                         4  stored_at_ms 8
    8  scope 4                                            12 deliver_at_ms 8 (0: was not delayed)
    12 deliver_at_ms 8 (the true one)                     20 body
    20 accepted_at_ms 8
    28 history 39 or more, of kind RETRY
    28 terms 16, of kind WHOLE_HALF
    28 check 30, of kind TRANSACTION
       body; of kinds TRANSACTION and RECURRING without its wire message

    history    topic id 4 | queue id 2 | offset 8 | since_ms 8 | first_failed_at_ms 8 | last_failed_at_ms 8 | reason 1
               | epoch 8, if the highest bit of the reason is set: copies of format 2 and older have none
               | length 2 | failure reason, if the next bit is set: since format 6
               of a retry copy: the place of the original, the time it became visible there, its failures, and the
               delivery that failed last
    terms      deliver_at_ms 8 | delay_ms 8           of a half message: its due time once committed; 0: unset
    check      terms 16 | waited_ms 8 | unasked 2 | payload bytes 4
               of a half message whose body is a separate row: the total waiting time at its next check, and the number
               of consecutive checks that found no producer
    half body (timeline, after all times)                 version 1 | body
    body       id length 1 | tag length 1 | message group length 1 | id | tag | message group | wire message
    with a tag of more than 255 bytes, since format version 3:
               0 | id length 1 | message group length 1 | tag length 2 | id | tag | message group | wire message
               no id is empty, so the first byte distinguishes the two
    with an expiry, since format version 4:
               0 | 0 | not_after_ms 8 | one of the two above
    with an own key, since format version 5, while the message is pending:
               0 | 0 | flags and not_after_ms 8 (0: none) | length of the key 1 | key | one of the first two
               flags are the highest bits: 1 has a key, always; 2 a pending message under the key is kept

The body is the same in both values, so a hand-over copies it without decoding.

A delayed send has no attempts yet. Its retry count field has the queue chosen by its sender plus 1, or 0 for none.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import NamedTuple

from dmq.errors import StoreCorrupt

VERSION = 1

_WAITING = struct.Struct(">BBHIIQQ")
_WAITING_FACTS = struct.Struct(">BHIIQQ")  # without the version
_QUEUED = struct.Struct(">BBHQQ")
_BODY = struct.Struct(">BBB")
_PLAIN_QUEUED = struct.Struct(">BBHQQBBB")  # _QUEUED and _BODY, as most queue values begin
_WIDE_BODY = struct.Struct(">BBBH")
_DATED = struct.Struct(">HQ")
_HAS_KEY, _KEEPS_FIRST, _TIME = 1 << 63, 1 << 62, (1 << 62) - 1  # in the prefix of a body
_KEYED = (b"\0\0\x80", b"\0\0\xc0")  # first bytes of a body with an own key
_HISTORY = struct.Struct(">IHQQQQB")
_EPOCH = struct.Struct(">Q")
_LENGTH = struct.Struct(">H")
_TERMS = struct.Struct(">QQ")
_VIGIL = struct.Struct(">QQQHI")
_new_tuple = tuple.__new__  # skips the argument list of the NamedTuple's constructor

WAITING_HEADER_BYTES = _WAITING.size
_PLACE = struct.Struct(">BBHII")  # first fields of a waiting entry
PLACE_BYTES = _PLACE.size
QUEUED_HEADER_BYTES = _QUEUED.size
TERMS_BYTES = _TERMS.size
_NARROW_TAG_BYTES_MAX = 255
_HAS_HISTORY = 1
_HAS_EPOCH, _HAS_FAILURE, _REASON = 0x80, 0x40, 0x3F  # in the byte of the reason


class EntryKind(IntEnum):
    """Reason why an entry is on the timeline."""

    DELAYED = 1
    RETRY = 2  # a copy of a message that a group failed; its scope is the group
    SPOOLED = 3  # a send that a producer's hook retries later (``dmq.producer_store``)
    WHOLE_HALF = 4  # as TRANSACTION with its body in the same row, as stores of format 2 have it
    TRANSACTION = 5  # a half message, under the time of its next check; the retry count is that of its checks
    DELAYED_FOR = 6  # as DELAYED; its delay counts from when it was accepted (format 3)
    RECURRING = 7  # a schedule, under the time of its next occurrence (format 3)


DELAYED_KINDS = frozenset((EntryKind.DELAYED, EntryKind.DELAYED_FOR))
HALF_KINDS = frozenset((EntryKind.TRANSACTION, EntryKind.WHOLE_HALF))
_HALVES = frozenset(bytes((kind,)) for kind in HALF_KINDS)
_RECURRING = bytes((EntryKind.RECURRING,))
_COUNTED_WHOLE = frozenset(map(int, (EntryKind.DELAYED, EntryKind.DELAYED_FOR, EntryKind.RETRY, EntryKind.WHOLE_HALF)))
_PAYLOAD_BYTES_AT = WAITING_HEADER_BYTES + _VIGIL.size - 4
_STAYING = _HALVES | {_RECURRING}


class History(NamedTuple):
    """History of a retry copy: the place of the original message and its failures."""

    topic_id: int
    queue_id: int
    queue_offset: int
    since_ms: int  # when the original became visible
    first_failed_at_ms: int
    last_failed_at_ms: int
    reason: int  # ``retry.policy.Reason`` of a dead letter, 0 otherwise
    epoch: int = 0  # of the delivery that failed last; 0: the copy was made before format 3
    failure: bytes = b""  # last failure reason (``failure_reason``); empty: unknown, or made before format 6


class Terms(NamedTuple):
    """Due time of a half message once it is committed: a time, or a delay after the commit; 0 is unset."""

    deliver_at_ms: int
    delay_ms: int


class HalfMessageState(NamedTuple):
    """State of a half message that each check rewrites, in addition to the entry's head."""

    terms: Terms
    waited_ms: int  # in total at its next check: a sum of pauses, so a clock step cannot increase it
    unasked: int  # consecutive checks that found no producer
    payload_bytes: int


class WaitingEntry(NamedTuple):
    """Head of a timeline value."""

    kind: int
    retry_count: int
    topic_id: int
    scope: int
    deliver_at_ms: int
    accepted_at_ms: int

    @property
    def attempts(self) -> int:
        """Number of failed attempts, or of transaction checks."""
        return 0 if self.kind in DELAYED_KINDS else self.retry_count


class QueuedMessage(NamedTuple):
    """Decoded queue value."""

    attempts_before: int
    stored_at_ms: int
    deliver_at_ms: int
    message_id: bytes  # packed
    tag: str
    message_group: str
    payload: bytes
    history: History | None
    not_after_ms: int = 0  # 0: no expiry

    @property
    def is_dead(self) -> bool:
        """Whether it is a dead letter. Consumers get it like any other message; it also has a history."""
        return self.history is not None and self.history.reason != 0

    @property
    def attempts_so_far(self) -> int:
        """Deliveries to its group before it reached this queue; 0 for a dead letter.

        The attempts of a dead letter were another group's.
        """
        return 0 if self.is_dead else self.attempts_before

    @property
    def since_ms(self) -> int:
        """Time of its first visibility to its group."""
        return self.history.since_ms if self.history is not None and not self.is_dead else self.stored_at_ms


class OwnKey(NamedTuple):
    """Sender's key of a pending message, and the rule for a message that is already pending under it."""

    key: bytes
    keeps_first: bool  # the pending message is kept and this one absorbed; else it is replaced


def encode_body(
    message_id: bytes,
    tag: bytes,
    message_group: bytes,
    payload: bytes,
    not_after_ms: int = 0,
    own_key: OwnKey | None = None,
) -> bytes:
    """Return the body of a message.

    The id has 1 to 255 bytes, the tag at most 65,535, the message group and the own key at most 255 each.
    """
    if len(tag) > _NARROW_TAG_BYTES_MAX:
        head = _WIDE_BODY.pack(0, len(message_id), len(message_group), len(tag))
    else:
        head = _BODY.pack(len(message_id), len(tag), len(message_group))
    if own_key is not None:
        flags = _HAS_KEY | _KEEPS_FIRST if own_key.keeps_first else _HAS_KEY
        head = _DATED.pack(0, flags | not_after_ms) + bytes((len(own_key.key),)) + own_key.key + head
    elif not_after_ms:
        head = _DATED.pack(0, not_after_ms) + head
    return head + message_id + tag + message_group + payload


def _body_lengths(value: bytes, at: int) -> tuple[int, int, int, int]:
    """Return the start of the id in the body at ``at``, and the lengths of id, tag and message group."""
    if value[at : at + 2] == b"\0\0":
        at += _DATED.size
        if len(value) > at and value[at - 8] & 0x80:
            at += 1 + value[at]
    if len(value) >= at + _BODY.size:
        id_len, tag_len, group_len = _BODY.unpack_from(value, at)
        if id_len:
            return at + _BODY.size, id_len, tag_len, group_len
        if tag_len and len(value) >= at + _WIDE_BODY.size:
            _, id_len, group_len, tag_len = _WIDE_BODY.unpack_from(value, at)
            return at + _WIDE_BODY.size, id_len, tag_len, group_len
    raise StoreCorrupt(f"a value of {len(value)} bytes is too short for the body it should have")


def split_own_key(body: bytes) -> tuple[OwnKey | None, bytes]:
    """Return a body's own key, or ``None``, and the body without it. The body must be valid; it is not checked."""
    if not body.startswith(_KEYED) or len(body) <= _DATED.size:
        return None, body
    (_, flags), at = _DATED.unpack_from(body), _DATED.size
    end = at + 1 + body[at]
    not_after_ms = flags & _TIME
    rest = (_DATED.pack(0, not_after_ms) if not_after_ms else b"") + body[end:]
    return OwnKey(body[at + 1 : end], bool(flags & _KEEPS_FIRST)), rest


def body_header_bytes(tag_bytes: int, not_after_ms: int) -> int:
    """Return the size of the head of a body with a tag of ``tag_bytes``."""
    size = _BODY.size if tag_bytes <= _NARROW_TAG_BYTES_MAX else _WIDE_BODY.size
    return size + _DATED.size if not_after_ms else size


def encode_waiting(  # noqa: PLR0917 - the layout, in its order; called once per message
    kind: int, retry_count: int, topic_id: int, scope: int, deliver_at_ms: int, accepted_at_ms: int, body: bytes
) -> bytes:
    """Return a timeline value."""
    return _WAITING.pack(VERSION, kind, retry_count, topic_id, scope, deliver_at_ms, accepted_at_ms) + body


def decode_waiting(value: bytes) -> WaitingEntry:
    """Decode the head of a timeline value; raise ``StoreCorrupt`` if it is invalid."""
    if len(value) < WAITING_HEADER_BYTES or value[0] != VERSION:
        raise StoreCorrupt(f"a timeline value of {len(value)} bytes has no version {VERSION} header")
    return _new_tuple(WaitingEntry, _WAITING_FACTS.unpack_from(value, 1))


def decode_place(head: bytes) -> tuple[int, int, int]:
    """Return kind, topic id and scope from the first ``PLACE_BYTES`` of a timeline value."""
    if len(head) < PLACE_BYTES or head[0] != VERSION:
        raise StoreCorrupt(f"a timeline value of {len(head)} bytes has no version {VERSION} header")
    _, kind, _, topic_id, scope = _PLACE.unpack(head)
    return kind, topic_id, scope


def waiting_bytes(value: bytes) -> int:
    """Return the size of an entry in the count of pending bytes: its row plus, for a half message, its body row.

    The size is constant while the entry moves, except when the body of a half message leaves its row. Schedules count
    0, and so do entries of a producer store, which has its own totals.
    """
    kind = value[1]
    if kind in _COUNTED_WHOLE:
        return len(value)
    if kind == EntryKind.TRANSACTION:
        return len(value) + int.from_bytes(value[_PAYLOAD_BYTES_AT : _PAYLOAD_BYTES_AT + 4], "big")
    return 0


def whole_half_bytes(half_body: bytes) -> int:
    """Return ``waiting_bytes`` of a half message before its body moved from its timeline row to ``half_body``."""
    return WAITING_HEADER_BYTES + TERMS_BYTES + len(half_body) - 1


def waiting_scope(value: bytes) -> bytes:
    """Return the packed scope of a timeline value without decoding the head. Packed scopes are comparable."""
    return value[8:12]


def waiting_topic_id(value: bytes) -> int:
    """Return the topic id of a timeline value without decoding the head."""
    return int.from_bytes(value[4:8], "big")


def encode_history(history: History) -> bytes:
    """Encode a history. It precedes the body in a value."""
    *facts, reason, epoch, failure = history
    flags = (_HAS_EPOCH if epoch else 0) | (_HAS_FAILURE if failure else 0)
    packed = _HISTORY.pack(*facts, reason | flags)
    if epoch:
        packed += _EPOCH.pack(epoch)
    return packed + _LENGTH.pack(len(failure)) + failure if failure else packed


def history_bytes(value: bytes, at: int) -> int:
    """Return the length of the history at ``at``; raise ``StoreCorrupt`` if the value ends before it does."""
    last = at + _HISTORY.size
    size = _HISTORY.size
    flags = value[last - 1] if len(value) >= last else 0
    if flags & _HAS_EPOCH:
        size += _EPOCH.size
    if flags & _HAS_FAILURE:
        length_at = at + size
        size += _LENGTH.size + int.from_bytes(value[length_at : length_at + _LENGTH.size], "big")
    if len(value) < at + size:
        raise StoreCorrupt(f"a value of {len(value)} bytes is too short for the history it should have")
    return size


def decode_history(value: bytes, at: int) -> History:
    """Decode the history at ``at``; raise ``StoreCorrupt`` if the value ends before it does."""
    size = history_bytes(value, at)
    *facts, reason = _HISTORY.unpack_from(value, at)
    epoch, failure, rest = 0, b"", at + _HISTORY.size
    if reason & _HAS_EPOCH:
        (epoch,) = _EPOCH.unpack_from(value, rest)
        rest += _EPOCH.size
    if reason & _HAS_FAILURE:
        failure = value[rest + _LENGTH.size : at + size]
    return _new_tuple(History, (*facts, reason & _REASON, epoch, failure))


def encode_terms(terms: Terms) -> bytes:
    """Encode the terms of a half message. They precede the body in a value."""
    return _TERMS.pack(*terms)


def decode_terms(value: bytes, at: int) -> Terms:
    """Decode the terms at ``at``; raise ``StoreCorrupt`` if the value ends before they do."""
    if len(value) < at + TERMS_BYTES:
        raise StoreCorrupt(f"a value of {len(value)} bytes is too short for the terms of a half message")
    return _new_tuple(Terms, _TERMS.unpack_from(value, at))


class HalfRow(NamedTuple):
    """Decoded timeline row of a half message."""

    entry: WaitingEntry
    vigil: HalfMessageState
    message_id: bytes  # packed
    body: bytes | None  # of a store of format 2; else the body is a separate row
    size: int  # ``waiting_bytes`` of its row


def encode_half(entry: WaitingEntry, vigil: HalfMessageState, message_id: bytes) -> bytes:
    """Return the timeline row of a half message, without its body, since each check rewrites the row."""
    unasked = min(vigil.unasked, 0xFFFF)
    packed = _VIGIL.pack(*vigil.terms, vigil.waited_ms, unasked, vigil.payload_bytes)
    return encode_waiting(*entry, packed + encode_body(message_id, b"", b"", b""))


def decode_half(value: bytes) -> HalfRow:
    """Decode the timeline row of a half message; raise ``StoreCorrupt`` if it is invalid."""
    entry = decode_waiting(value)
    at = half_body_at(entry.kind)
    if len(value) < at:
        raise StoreCorrupt(f"a value of {len(value)} bytes is too short for a half message")
    message_id, _ = body_facts(value[at:])
    if entry.kind == EntryKind.WHOLE_HALF:
        body = value[at:]
        terms = decode_terms(value, WAITING_HEADER_BYTES)
        return HalfRow(entry, HalfMessageState(terms, 0, 0, len(body_payload(body))), message_id, body, len(value))
    deliver_at_ms, delay_ms, *rest = _VIGIL.unpack_from(value, WAITING_HEADER_BYTES)
    return HalfRow(
        entry, HalfMessageState(Terms(deliver_at_ms, delay_ms), *rest), message_id, None, waiting_bytes(value)
    )


def half_body_at(kind: int) -> int:
    """Return the offset of the body in a half message's timeline row; for ``TRANSACTION`` only its head is there."""
    if kind == EntryKind.TRANSACTION:
        return WAITING_HEADER_BYTES + _VIGIL.size
    if kind == EntryKind.WHOLE_HALF:
        return WAITING_HEADER_BYTES + TERMS_BYTES
    raise StoreCorrupt(f"an entry of kind {kind} waits among half messages")


def is_half(value: bytes) -> bool:
    """Return True if a timeline value is that of a half message."""
    return value[1:2] in _HALVES


def is_recurring(value: bytes) -> bool:
    """Return True if a timeline value is that of a schedule."""
    return value[1:2] == _RECURRING


def stays(value: bytes) -> bool:
    """Return True for a half message or a schedule: these usually return to the timeline after they were due."""
    return value[1:2] in _STAYING


def encode_half_body(body: bytes) -> bytes:
    """Return the row of a half message's body, which is written once."""
    return bytes((VERSION,)) + body


def decode_half_body(value: bytes) -> bytes:
    """Return the body in a half message's body row; raise ``StoreCorrupt`` if it is invalid."""
    if not value or value[0] != VERSION:
        raise StoreCorrupt(f"the body of a half message, {len(value)} bytes, has no version {VERSION} header")
    body_facts(value[1:])
    return value[1:]


def encode_queued(
    attempts_before: int, stored_at_ms: int, deliver_at_ms: int, body: bytes, *, has_history: bool = False
) -> bytes:
    """Return a queue value. If ``has_history``, ``body`` must begin with the history."""
    flags = _HAS_HISTORY if has_history else 0
    return _QUEUED.pack(VERSION, flags, attempts_before, stored_at_ms, deliver_at_ms) + body


def decode_queued(value: bytes) -> QueuedMessage:
    """Decode a queue value; raise ``StoreCorrupt`` if it is invalid."""
    if len(value) < _PLAIN_QUEUED.size or value[0] != VERSION:
        raise StoreCorrupt(f"a queue value of {len(value)} bytes has no version {VERSION} header")
    # fmt: off
    _, flags, attempts_before, stored_at_ms, deliver_at_ms, id_len, tag_len, group_len = (
        _PLAIN_QUEUED.unpack_from(value)
    )
    # fmt: on
    history, body_at, start = None, QUEUED_HEADER_BYTES, _PLAIN_QUEUED.size
    if flags or not id_len:
        if flags & _HAS_HISTORY:
            history = decode_history(value, QUEUED_HEADER_BYTES)
            body_at += history_bytes(value, QUEUED_HEADER_BYTES)
        start, id_len, tag_len, group_len = _body_lengths(value, body_at)
    tag_at = start + id_len
    payload_at = tag_at + tag_len + group_len
    if payload_at > len(value):
        raise StoreCorrupt(f"a queue value of {len(value)} bytes is shorter than its own lengths say")
    tag = message_group = ""
    if payload_at != tag_at:
        group_at = tag_at + tag_len
        try:
            tag, message_group = value[tag_at:group_at].decode(), value[group_at:payload_at].decode()
        except UnicodeDecodeError as error:
            raise StoreCorrupt(f"a queue value of {len(value)} bytes holds a tag or a group that is no text") from error
    not_after_ms = 0
    if start >= body_at + _DATED.size + _BODY.size:
        not_after_ms = _DATED.unpack_from(value, body_at)[1] & _TIME
    message_id, payload = value[start:tag_at], value[payload_at:]
    facts = attempts_before, stored_at_ms, deliver_at_ms, message_id, tag, message_group, payload, history, not_after_ms
    return _new_tuple(QueuedMessage, facts)


def body_facts(body: bytes) -> tuple[bytes, bytes]:
    """Return ``(packed message id, message group)`` of a body; raise ``StoreCorrupt`` if it is truncated."""
    start, id_len, tag_len, group_len = _body_lengths(body, 0)
    group_at = start + id_len + tag_len
    if group_at + group_len > len(body):
        raise StoreCorrupt(f"a message body of {len(body)} bytes is shorter than its own lengths say")
    return body[start : start + id_len], body[group_at : group_at + group_len]


def body_id(value: bytes, at: int) -> bytes:
    """Return the packed message id of the body at ``at``; raise ``StoreCorrupt`` if it is truncated."""
    start, id_len, _, _ = _body_lengths(value, at)
    if start + id_len > len(value):
        raise StoreCorrupt(f"a value of {len(value)} bytes is shorter than its own lengths say")
    return value[start : start + id_len]


def body_not_after_ms(body: bytes) -> int:
    """Return the expiry of a message in epoch ms; 0 if it has none."""
    expiry: int = _DATED.unpack_from(body)[1] & _TIME if body.startswith(b"\0\0") else 0
    return expiry


def body_payload(body: bytes) -> bytes:
    """Return the wire message of a body."""
    return body[sum(_body_lengths(body, 0)) :]
