"""Texts that lead back to one entry: recall handles and transaction ids.

    handle     base64url of: kind 1 | sequence of the entry 8 | topic length 1 | topic | packed message id | crc 4

The sequence makes a handle good for one entry only, wherever on the timeline it lies by now: a later message with the
same id has another one. The kind keeps one use from passing for the other.
"""

from __future__ import annotations

import struct
from base64 import urlsafe_b64decode
from binascii import Error as Base64Error
from binascii import b2a_base64, crc32
from enum import IntEnum
from typing import NamedTuple

_HEAD = struct.Struct(">BQB")
_CRC = struct.Struct(">I")
_URL_SAFE = bytes.maketrans(b"+/", b"-_")


class HandleKind(IntEnum):
    """What a handle is for; the number is its first byte, and never used again for something else."""

    RECALL = 1
    TRANSACTION = 17


class EntryHandle(NamedTuple):
    """What a handle says."""

    sequence: int
    topic: str
    message_id: bytes  # packed


class NotAHandle(ValueError):
    """This broker never wrote such a handle of this kind."""


def encode_handle(kind: HandleKind, handle: EntryHandle) -> str:
    """Return the text of a handle."""
    sequence, name, message_id = handle
    topic = name.encode()
    packed = _HEAD.pack(kind, sequence, len(topic)) + topic + message_id
    text = b2a_base64(packed + _CRC.pack(crc32(packed)), newline=False)
    return text.translate(_URL_SAFE, b"=").decode()


def decode_handle(kind: HandleKind, text: str) -> EntryHandle:
    """Undo ``encode_handle``; ``NotAHandle`` for anything that it cannot have written."""
    try:
        raw = urlsafe_b64decode(text.encode("ascii") + b"=" * (-len(text) % 4))
        packed, crc = raw[: -_CRC.size], raw[-_CRC.size :]
        found, sequence, topic_len = _HEAD.unpack_from(packed)
        topic, message_id = packed[_HEAD.size :][:topic_len], packed[_HEAD.size + topic_len :]
        if found != kind or _CRC.unpack(crc)[0] != crc32(packed) or not topic or not message_id:
            raise NotAHandle(text)
        return EntryHandle(sequence, topic.decode(), message_id)
    except (ValueError, Base64Error, struct.error) as error:
        raise NotAHandle(text) from error
