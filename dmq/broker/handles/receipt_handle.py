"""Self-contained receipt handles, which stay valid after a restart.

    handle     in hexadecimal digits: version 4 | group_id 4 | topic_id 4 | queue_id 2 | queue_offset 8 | epoch 8
               | attempt 2 | is push 1 | number of the store 8 | name of the message | code 16

The epoch consists of the daemon's run (32 bits) and a counter, so no two deliveries share one. The name is the message
id, or a digest of a long one: a handle can only finish the message that it was issued for. The code is keyed with the
secret of the store. So clients cannot forge a handle, and handles of a copy of the store are invalid for the original.
"""

from __future__ import annotations

import struct
from hashlib import blake2b
from hmac import compare_digest
from typing import NamedTuple

from broker_adapter.contracts.errors import Refused, Rule
from dmq.store.schema.cell.identity import Identity

_HEAD = struct.Struct(">BIIHQQH?Q")
_HEAD_BYTES = _HEAD.size
_CODE_BYTES = 16
_VERSION = 4
_NAME_BYTES_MAX = 32  # ids made by RocketMQ clients have 17
_DIGEST_BYTES = 20
_new_tuple = tuple.__new__  # a NamedTuple's constructor without the cost of its argument list


class ReceiptHandle(NamedTuple):
    """Content of a handle."""

    group_id: int
    topic_id: int
    queue_id: int
    queue_offset: int
    epoch: int
    attempt: int  # in this queue
    is_push: bool = False  # delivered to a push consumer
    message: bytes = b""  # its name


def name_of(message_id: bytes) -> bytes:
    """Return the name of a message within handles, from its packed id."""
    if len(message_id) <= _NAME_BYTES_MAX:
        return message_id
    return b"\2" + blake2b(message_id, digest_size=_DIGEST_BYTES).digest()


class ReceiptHandles:
    """Assigns epochs to deliveries, encodes their handles, and decodes only handles of this store."""

    def __init__(self, identity: Identity, boot: int) -> None:
        self.epoch = boot << 32  # of the last delivery; greater than all epochs of earlier runs
        self._store = identity.number
        self._keyed = blake2b(key=identity.secret, digest_size=_CODE_BYTES, person=b"receipt handle")

    def next_epoch(self) -> int:
        """Return a new, unique epoch."""
        self.epoch += 1
        return self.epoch

    def encode(self, receipt: ReceiptHandle) -> str:
        """Return the text of a handle."""
        packed = _HEAD.pack(_VERSION, *receipt[:7], self._store) + receipt.message
        code = self._keyed.copy()
        code.update(packed)
        return (packed + code.digest()).hex()

    def decode(self, handle: str) -> ReceiptHandle:
        """Return the content of a handle; raise ``Refused(RECEIPT_HANDLE)`` if this store has not issued it."""
        try:
            raw = bytes.fromhex(handle)
            version, group_id, topic_id, queue_id, offset, epoch, attempt, is_push, store = _HEAD.unpack_from(raw)
        except (ValueError, struct.error) as error:
            raise _unknown(handle) from error
        packed = raw[:-_CODE_BYTES]
        if version != _VERSION or store != self._store or len(packed) < _HEAD_BYTES:
            raise _unknown(handle)
        code = self._keyed.copy()
        code.update(packed)
        if not compare_digest(code.digest(), raw[-_CODE_BYTES:]):
            raise _unknown(handle)
        return ReceiptHandle(group_id, topic_id, queue_id, offset, epoch, attempt, is_push, packed[_HEAD_BYTES:])


def read_receipt(handle: str) -> ReceiptHandle:
    """Return the content of a handle without a check of its code; the caller must verify the handle before it acts on
    it.
    """
    raw = bytes.fromhex(handle)
    _, group_id, topic_id, queue_id, offset, epoch, attempt, is_push, _ = _HEAD.unpack_from(raw)
    said = group_id, topic_id, queue_id, offset, epoch, attempt, is_push, raw[_HEAD_BYTES:-_CODE_BYTES]
    return _new_tuple(ReceiptHandle, said)


def _unknown(handle: str) -> Refused:
    why = "the handle is not one of this store: it was changed, or given out before a restore or by an earlier version"
    return Refused(Rule.RECEIPT_HANDLE, why, value=handle)
