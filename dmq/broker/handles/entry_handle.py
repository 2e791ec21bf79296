"""Handles of timeline entries: recall handles and transaction ids.

    handle     base64url of: kind 1 | sequence of the entry 8 | topic length 1 | topic | packed message id | code 16

The sequence makes a handle valid for one entry only, wherever the entry is on the timeline. A later message with the
same id has another sequence. The kind separates the uses of handles. The code is keyed with the secret of the store.
Handles of another store, or from before a restore, are refused, and clients cannot forge handles.
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

from dmq.store.schema.cell.identity import Identity

_HEAD = struct.Struct(">BQB")
_CODE_BYTES = 16
_URL_SAFE = bytes.maketrans(b"+/", b"-_")


class HandleKind(IntEnum):
    """Use of a handle. The number is its first byte and is never reused.

    1 and 17 were these two kinds before handles had a keyed code.
    """

    RECALL = 2
    TRANSACTION = 18


class EntryHandle(NamedTuple):
    """Content of a handle."""

    sequence: int
    topic: str
    message_id: bytes  # packed


class NotAHandle(ValueError):
    """The text is not a handle of this kind that this store issued."""


class EntryHandles:
    """Encodes handles of one store, and decodes only these. Safe on any thread."""

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
        """Return the content of a handle; raise ``NotAHandle`` for a text that ``encode`` has not returned."""
        handle, packed, found = _read(kind, text)
        code = self._keyed.copy()
        code.update(packed)
        if not compare_digest(code.digest(), found):
            raise NotAHandle(text)
        return handle


def read_handle(kind: HandleKind, text: str) -> EntryHandle:
    """Return the content of a handle without a check of its code; a caller must not act on the content alone."""
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
