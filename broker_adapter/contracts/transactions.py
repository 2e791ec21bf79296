"""Transactional messages: an optional contract of a broker in addition to ``PopBroker``.

A *half message* is durable and invisible. Its producer decides: *commit* makes it a normal message, *rollback* removes
it. Without a decision the broker checks with the producers of its topic, a bounded number of times.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from broker_adapter.contracts.errors import Refused, Rule
from broker_adapter.contracts.message import Envelope


class Half(NamedTuple):
    """Half message of a send.

    The envelope's ``deliver_at_ms`` is the delivery time after a commit; ``delay_ms`` is a delay from the commit
    instead. 0 means none. ``check_after_ms`` is the delay until the first check, 0 for the broker's default.
    """

    envelope: Envelope
    delay_ms: int = 0
    check_after_ms: int = 0


class HalfReceipt(NamedTuple):
    """Receipt of a durable half message, with the id for its decision."""

    message_id: str
    transaction_id: str
    repeated: bool = False  # the same message id was accepted before; this is the first answer
    ended: str = ""  # earlier end of the transaction, unless a commit; nothing was stored


class Check(NamedTuple):
    """Transaction check of a half message, number ``number``."""

    topic: str
    message_id: str
    transaction_id: str
    payload: bytes  # a serialized apache.rocketmq.v2.Message
    number: int


class Checker(Protocol):
    """Registry of the connected producers, implemented by the server of clients."""

    def is_live(self, topic: str) -> bool:
        """Return True if a producer of ``topic`` can be asked now. Called from any thread; must not block."""
        ...

    async def check(self, check: Check) -> bool:
        """Send the check to one producer of the topic; return True if it was sent."""
        ...


class TransactionalBroker(Protocol):
    """Broker that stores half messages until their decision. Every method is safe for concurrent calls on one loop."""

    def attach(self, checker: Checker) -> None:
        """Send checks through ``checker`` from now on. Until then all checks are deferred."""
        ...

    async def prepare(self, halves: Sequence[Half]) -> Sequence[HalfReceipt]:
        """Accept all half messages or none, and return one receipt each, in order, once they are durable.

        A half message with a known id in its topic is not stored again. Raises ``Overloaded`` (nothing done),
        ``BrokerUnavailable`` (in doubt), ``Refused(MESSAGE_ID)`` if another message of the topic has the id.
        """
        ...

    async def commit(self, topic: str, transaction_id: str) -> None:
        """Make a half message visible, or pending until its delivery time; durable on return.

        A repeated commit succeeds. ``Refused(TRANSACTION_ID)`` if the transaction ended differently, is unknown, or its
        id cannot be of this broker and ``topic``; ``Refused(TOPIC_UNKNOWN)`` if the topic was never used.
        ``BrokerUnavailable``: in doubt, repeat it.
        """
        ...

    async def roll_back(self, topic: str, transaction_id: str) -> None:
        """Remove a half message, durable on return; raises as ``commit``. A repeated rollback succeeds."""
        ...


def single_half(halves: Sequence[Half]) -> Half:
    """Return the half message of a send to a cluster, which accepts one without a delay and a message group."""
    (half, *others) = halves
    if others or half.delay_ms or half.envelope.deliver_at_ms or half.envelope.message_group:
        why = "RocketMQ accepts one half message per send, without a delay or a message group"
        raise Refused(Rule.UNSUPPORTED, why, value=f"{len(halves)} half messages")
    return half
