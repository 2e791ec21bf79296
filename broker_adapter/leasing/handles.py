"""What a client is given to name a message by: text that says where the message lies. Pure."""

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
    """Names one hand-out of the message at an offset of a queue. ``run`` is the process that handed it out."""

    queue: MessageQueue
    offset: int
    run: str
    number: int

    def __str__(self) -> str:
        topic, broker, queue_id = self.queue
        return f"{_LEASE} {self.run} {self.number} {self.offset} {queue_id} {topic} {broker}"

    @classmethod
    def of(cls, text: str) -> LeaseHandle:
        """Undo ``str``; ``Refused(RECEIPT_HANDLE)`` for what is no handle of ours."""
        try:
            kind, run, number, offset, queue_id, topic, broker = text.split(" ", 6)
            if kind != _LEASE:
                raise ValueError(kind)
            return cls(MessageQueue(topic, broker, _number(queue_id)), _number(offset), run, _number(number))
        except ValueError:
            raise Refused(Rule.RECEIPT_HANDLE, "this adapter never gave it", value=text) from None


class HalfHandle(NamedTuple):
    """Names a half message, as its broker wants to be told of its end."""

    queue: MessageQueue
    queue_offset: int
    offset_id: str
    message_id: str
    transaction_id: str
    is_asked: bool = False  # it is the answer to a question of the broker's

    def __str__(self) -> str:
        return f"{_HALF} {json.dumps([*self.queue, *self[1:]], separators=(',', ':'))}"

    @classmethod
    def of(cls, text: str, topic: str) -> HalfHandle:
        """Undo ``str``; ``Refused(TRANSACTION_ID)`` for what is no id of ours, or not one of ``topic``."""
        try:
            kind, rest = text.split(" ", 1)
            lies_in, broker, queue_id, queue_offset, offset_id, message_id, transaction_id, is_asked = json.loads(rest)
            if kind != _HALF or lies_in != topic:
                raise ValueError(kind)
            queue = MessageQueue(topic, str(broker), int(queue_id))
            return cls(queue, int(queue_offset), str(offset_id), str(message_id), str(transaction_id), is_asked is True)
        except (ValueError, TypeError, OverflowError, RecursionError):
            why = f"this adapter never gave it for topic {topic}"
            raise Refused(Rule.TRANSACTION_ID, why, value=text) from None

    @property
    def receipt(self) -> QueueReceipt:
        """The receipt of its send."""
        return QueueReceipt(
            SendStatus.STORED, self.message_id, self.queue, self.queue_offset, self.offset_id, self.transaction_id
        )

    def question(self, group: str) -> TransactionCheck | None:
        """The question that is answered with it, if it is."""
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
    """Return a broker's handle for a delayed message as ours; empty stays empty."""
    return f"{_RECALL} {given}" if given else ""


def given_recall_handle(text: str) -> str:
    """Undo ``recall_handle``; ``Refused(REQUEST)`` for what is none of ours."""
    kind, _, given = text.partition(" ")
    if kind != _RECALL or not given:
        raise Refused(Rule.REQUEST, "this adapter never gave it", value=text)
    return given


def is_ours(text: str) -> bool:
    """Say whether a text looks like something that is made here."""
    return text.partition(" ")[0] in {_LEASE, _HALF, _RECALL}


def _number(digits: str) -> int:
    if not digits.isascii() or not digits.isdigit() or len(digits) > _DIGITS_MAX:
        raise ValueError(digits)
    return int(digits)
