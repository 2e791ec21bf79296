"""Texts that lead back to one entry: recall handles and transaction ids.

    handle     base64url of: kind 1 | sequence of the entry 8 | topic length 1 | topic | packed message id | code 16

The sequence makes a handle good for one entry only, wherever on the timeline it lies by now: a later message with the
same id has another one. The kind keeps one use from passing for the other. The code is keyed with the secret of the
store: handles of another one, or from before a restore, are refused, and nobody can make one.
"""

from __future__ import annotations

import struct
from base64 import urlsafe_b64decode
from binascii import Error as Base64Error
from binascii import b2a_base64
from enum import IntEnum
from hashlib import blake2b
from hmac import compare_digest
from typing import NamedTuple

from dmq.store.schema.identity import Identity

_HEAD = struct.Struct(">BQB")
_CODE_BYTES = 16
_URL_SAFE = bytes.maketrans(b"+/", b"-_")


class HandleKind(IntEnum):
    """What a handle is for; the number is its first byte, and never used again for something else.

    1 and 17 were these two before they had a keyed code.
    """

    RECALL = 2
    TRANSACTION = 18


class EntryHandle(NamedTuple):
    """What a handle says."""

    sequence: int
    topic: str
    message_id: bytes  # packed


class NotAHandle(ValueError):
    """This store never wrote such a handle of this kind."""


class EntryHandles:
    """Writes the handles of one store, and reads no other ones. For any thread."""

    def __init__(self, identity: Identity) -> None:
        self._keyed = blake2b(key=identity.secret, digest_size=_CODE_BYTES, person=b"entry handle")
        self._keyed.update(identity.number.to_bytes(8, "big"))

    def encode(self, kind: HandleKind, handle: EntryHandle) -> str:
        """Return the text of a handle."""
        sequence, name, message_id = handle
        topic = name.encode()
        packed = _HEAD.pack(kind, sequence, len(topic)) + topic + message_id
        code = self._keyed.copy()
        code.update(packed)
        text = b2a_base64(packed + code.digest(), newline=False)
        return text.translate(_URL_SAFE, b"=").decode()

    def decode(self, kind: HandleKind, text: str) -> EntryHandle:
        """Undo ``encode``; ``NotAHandle`` for anything that it cannot have written."""
        handle, packed, found = _read(kind, text)
        code = self._keyed.copy()
        code.update(packed)
        if not compare_digest(code.digest(), found):
            raise NotAHandle(text)
        return handle


def read_handle(kind: HandleKind, text: str) -> EntryHandle:
    """Return what a handle says, whoever wrote it: for those who look at one, and do nothing by it."""
    return _read(kind, text)[0]


def _read(kind: HandleKind, text: str) -> tuple[EntryHandle, bytes, bytes]:
    try:
        raw = urlsafe_b64decode(text.encode("ascii") + b"=" * (-len(text) % 4))
        packed, code = raw[:-_CODE_BYTES], raw[-_CODE_BYTES:]
        found, sequence, topic_len = _HEAD.unpack_from(packed)
        topic, message_id = packed[_HEAD.size :][:topic_len], packed[_HEAD.size + topic_len :]
        if found != kind or not topic or not message_id:
            raise NotAHandle(text)
        return EntryHandle(sequence, topic.decode(), message_id), packed, code
    except (ValueError, Base64Error, struct.error) as error:
        raise NotAHandle(text) from error
