"""Receipt handles that describe themselves, so that they outlive a restart.

    handle     in hexadecimal digits: version 4 | group_id 4 | topic_id 4 | queue_id 2 | queue_offset 8 | epoch 8
               | attempt 2 | is push 1 | number of the store 8 | name of the message | code 16

The epoch is the daemon's run (32 bits) and a counter: no two hand-outs ever share one. The name is the message id, or a
digest of a long one: a handle can only ever finish the message that it was given out with. The code is keyed with the
secret of the store: nobody else can make a handle, nor a copy of the store one that is good for the original.
"""

from __future__ import annotations

import struct
from hashlib import blake2b
from hmac import compare_digest
from typing import NamedTuple

from broker_adapter.contracts.errors import Refused, Rule
from dmq.store.schema.identity import Identity

_HEAD = struct.Struct(">BIIHQQH?Q")
_HEAD_BYTES = _HEAD.size
_CODE_BYTES = 16
_VERSION = 4
_NAME_BYTES_MAX = 32  # those of the clients' own ids have 17
_DIGEST_BYTES = 20
_new_tuple = tuple.__new__  # what a NamedTuple's own constructor calls, without its argument list


class Receipt(NamedTuple):
    """What a handle says."""

    group_id: int
    topic_id: int
    queue_id: int
    queue_offset: int
    epoch: int
    attempt: int  # in this queue
    is_push: bool = False  # handed out to a push consumer
    message: bytes = b""  # its name


def name_of(message_id: bytes) -> bytes:
    """Return the name that handles have for a message, from its packed id."""
    if len(message_id) <= _NAME_BYTES_MAX:
        return message_id
    return b"\2" + blake2b(message_id, digest_size=_DIGEST_BYTES).digest()


class ReceiptHandles:
    """Numbers hand-outs, writes their handles, and reads those of no other store."""

    def __init__(self, identity: Identity, boot: int) -> None:
        self.epoch = boot << 32  # of the last hand-out: greater than every one of an earlier run
        self._store = identity.number
        self._keyed = blake2b(key=identity.secret, digest_size=_CODE_BYTES, person=b"receipt handle")

    def next_epoch(self) -> int:
        """Return an epoch that no hand-out has."""
        self.epoch += 1
        return self.epoch

    def encode(self, receipt: Receipt) -> str:
        """Return the handle text."""
        packed = _HEAD.pack(_VERSION, *receipt[:7], self._store) + receipt.message
        code = self._keyed.copy()
        code.update(packed)
        return (packed + code.digest()).hex()

    def decode(self, handle: str) -> Receipt:
        """Read a handle; ``Refused(RECEIPT_HANDLE)`` for anything that this store has not written."""
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
        return Receipt(group_id, topic_id, queue_id, offset, epoch, attempt, is_push, packed[_HEAD_BYTES:])


def read_handle(handle: str) -> Receipt:
    """Return what a handle says, whoever wrote it: for those who look at one, and do nothing by it."""
    raw = bytes.fromhex(handle)
    _, group_id, topic_id, queue_id, offset, epoch, attempt, is_push, _ = _HEAD.unpack_from(raw)
    said = group_id, topic_id, queue_id, offset, epoch, attempt, is_push, raw[_HEAD_BYTES:-_CODE_BYTES]
    return _new_tuple(Receipt, said)


def _unknown(handle: str) -> Refused:
    why = "the handle is not one of this store: it was changed, or given out before a restore or by an earlier version"
    return Refused(Rule.RECEIPT_HANDLE, why, value=handle)
