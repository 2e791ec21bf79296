"""Rows of own keys: the pending message of a topic under a key given by its sender.

    own key    version 1 | sequence 8 | deliver_at_ms 8 | bytes 4 | packed message id

The row exists exactly as long as the message is pending, so at most one message per topic and key is pending. The time
is the message's true delivery time, and the bytes are those of its row (``waiting_bytes``). Removing the message from
the timeline therefore needs no read of it.

The batch that frees a key writes an index row in the scope ``own_key_scope``, in the same generation as the end of the
message. Its value is that of an absorbed message and names the last holder of the key.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from dmq.errors import StoreCorrupt
from dmq.store.schema.keys import META_OWN_KEY, OWN_KEY_SCOPE, meta_id
from dmq.store.schema.messages.record import DELAYED_KINDS, WAITING_HEADER_BYTES, OwnKey, decode_waiting, split_own_key

VERSION = 1
_HOLDER = struct.Struct(">BQQI")


class KeyHolder(NamedTuple):
    """Pending message under an own key."""

    sequence: int  # of its entry
    deliver_at_ms: int
    size: int  # of its row, in bytes
    message_id: bytes  # packed


def encode_key_holder(holder: KeyHolder) -> bytes:
    """Return the value of an own key's row."""
    return _HOLDER.pack(VERSION, *holder[:3]) + holder.message_id


def decode_key_holder(value: bytes) -> KeyHolder:
    """Decode an own key's row; raise ``StoreCorrupt`` if it is invalid."""
    if len(value) <= _HOLDER.size or value[0] != VERSION:
        raise StoreCorrupt(f"the row of an own key of {len(value)} bytes has no version {VERSION} header")
    _, sequence, deliver_at_ms, size = _HOLDER.unpack_from(value)
    return KeyHolder(sequence, deliver_at_ms, size, value[_HOLDER.size :])


def own_key_row(topic_id: int, own_key: bytes) -> bytes:
    """Return the meta key of an own key's row."""
    return META_OWN_KEY + topic_id.to_bytes(4, "big") + own_key


def own_key_scope(topic_id: int) -> int:
    """Return the scope of the last holders of a topic's own keys. Name ids are far below the bit it sets."""
    return topic_id | OWN_KEY_SCOPE


def is_own_key_scope(scope: int) -> bool:
    """Return True if a scope is that of the last holders of a topic's own keys."""
    return bool(scope & OWN_KEY_SCOPE)


def last_holder_suffix(row: bytes) -> bytes:
    """Return the index key of an own key's last holder, without its generation, from the key of the own key's row."""
    return own_key_scope(meta_id(row)).to_bytes(4, "big") + own_key_of_row(row)


def own_key_of_row(row: bytes) -> bytes:
    """Return the own key in the key of its row, after the letter and the topic id."""
    return row[5:]


def own_key_in(value: bytes) -> OwnKey | None:
    """Return the own key of a timeline entry, or ``None`` if it has none."""
    if decode_waiting(value).kind not in DELAYED_KINDS:  # a half message gets its own-key row only when it is committed
        return None
    return split_own_key(value[WAITING_HEADER_BYTES:])[0]


def row_of(value: bytes) -> bytes:
    """Return the key of the own-key row of a timeline entry; empty if it has no own key."""
    found = own_key_in(value)
    return own_key_row(decode_waiting(value).topic_id, found.key) if found is not None else b""


def without_own_key(value: bytes) -> bytes:
    """Return the value of a timeline entry without its own key."""
    return value[:WAITING_HEADER_BYTES] + split_own_key(value[WAITING_HEADER_BYTES:])[1]
