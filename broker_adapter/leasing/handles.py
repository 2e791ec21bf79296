"""Handles of deliveries and half messages: text that contains the position of the message. Pure."""

from __future__ import annotations

import json
from typing import NamedTuple

from broker_adapter.contracts.classic import QueueReceipt, ReceivedMessage, SendStatus, TransactionCheck
from broker_adapter.contracts.errors import Refused, Rule
from broker_adapter.contracts.message import Message
from broker_adapter.contracts.message_queue import MessageQueue

_LEASE, _HALF, _RECALL = "lease", "half", "recall"
_DIGITS_MAX = 20


class LeaseHandle(NamedTuple):
    """Handle of one delivery of the message at an offset of a queue. ``run`` identifies the process that issued it."""

    queue: MessageQueue
    offset: int
    run: str
    number: int

    def __str__(self) -> str:
        topic, broker, queue_id = self.queue
        return f"{_LEASE} {self.run} {self.number} {self.offset} {queue_id} {topic} {broker}"

    @classmethod
    def of(cls, text: str) -> LeaseHandle:
        """Parse the text form of a handle; ``Refused(RECEIPT_HANDLE)`` for a handle that this adapter did not issue."""
        try:
            kind, run, number, offset, queue_id, topic, broker = text.split(" ", 6)
            if kind != _LEASE:
                raise ValueError(kind)
            return cls(MessageQueue(topic, broker, _number(queue_id)), _number(offset), run, _number(number))
        except ValueError:
            raise Refused(Rule.RECEIPT_HANDLE, "not issued by this adapter", value=text) from None


class HalfHandle(NamedTuple):
    """Handle of a half message, with the fields that its broker needs for the decision."""

    queue: MessageQueue
    queue_offset: int
    offset_id: str
    message_id: str
    transaction_id: str
    is_asked: bool = False  # it answers a transaction check of the broker

    def __str__(self) -> str:
        return f"{_HALF} {json.dumps([*self.queue, *self[1:]], separators=(',', ':'))}"

    @classmethod
    def of(cls, text: str, topic: str) -> HalfHandle:
        """Parse a transaction id; ``Refused(TRANSACTION_ID)`` for an id that is not ours, or not of ``topic``."""
        try:
            kind, rest = text.split(" ", 1)
            lies_in, broker, queue_id, queue_offset, offset_id, message_id, transaction_id, is_asked = json.loads(rest)
            if kind != _HALF or lies_in != topic:
                raise ValueError(kind)
            queue = MessageQueue(topic, str(broker), int(queue_id))
            return cls(queue, int(queue_offset), str(offset_id), str(message_id), str(transaction_id), is_asked is True)
        except (ValueError, TypeError, OverflowError, RecursionError):
            why = f"not issued by this adapter for topic {topic}"
            raise Refused(Rule.TRANSACTION_ID, why, value=text) from None

    @property
    def receipt(self) -> QueueReceipt:
        """Receipt of its send."""
        return QueueReceipt(
            SendStatus.STORED, self.message_id, self.queue, self.queue_offset, self.offset_id, self.transaction_id
        )

    def question(self, group: str) -> TransactionCheck | None:
        """Return the transaction check that it answers, or ``None``."""
        if not self.is_asked:
            return None
        lies = ReceivedMessage(
            message=Message(self.queue.topic, b"", message_id=self.message_id),
            queue=self.queue,
            queue_offset=self.queue_offset,
            stored_at_ms=0,
            offset_id=self.offset_id,
        )
        return TransactionCheck(group, lies, self.transaction_id, self.queue.broker)


def recall_handle(given: str) -> str:
    """Return our recall handle for a broker's handle of a delayed message; empty stays empty."""
    return f"{_RECALL} {given}" if given else ""


def given_recall_handle(text: str) -> str:
    """Return the broker's handle in our recall handle; ``Refused(REQUEST)`` for an invalid one."""
    kind, _, given = text.partition(" ")
    if kind != _RECALL or not given:
        raise Refused(Rule.REQUEST, "not issued by this adapter", value=text)
    return given


def is_ours(text: str) -> bool:
    """Return True if a text has the form of a handle of this adapter."""
    return text.partition(" ")[0] in {_LEASE, _HALF, _RECALL}


def _number(digits: str) -> int:
    if not digits.isascii() or not digits.isdigit() or len(digits) > _DIGITS_MAX:
        raise ValueError(digits)
    return int(digits)
