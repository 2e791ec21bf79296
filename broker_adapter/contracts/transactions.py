"""Transactional messages, as a broker offers them beside ``PopBroker``.

A *half message* is durable and nobody sees it. Its producer decides: *commit* makes it a message like any other,
*rollback* removes it. If no decision comes, the broker asks the producers of its topic, a bounded number of times.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from broker_adapter.contracts.message import Envelope


class Half(NamedTuple):
    """A half message on its way.

    The envelope's ``deliver_at_ms`` is when it is due once it is committed; with ``delay_ms`` that is so long after the
    commit instead. 0 stands for neither. ``check_after_ms`` is when its producers are asked first, 0 for the broker's
    own rule.
    """

    envelope: Envelope
    delay_ms: int = 0
    check_after_ms: int = 0


class HalfReceipt(NamedTuple):
    """A durable half message, and the id by which it is decided."""

    message_id: str
    transaction_id: str
    repeated: bool = False  # the same message id was accepted before; this is the first answer
    ended: str = ""  # how it ended before it was sent again, unless by a commit; nothing was stored


class Check(NamedTuple):
    """A half message whose producers are asked for its outcome, for the ``number``-th time."""

    topic: str
    message_id: str
    transaction_id: str
    payload: bytes  # a serialized apache.rocketmq.v2.Message
    number: int


class Checker(Protocol):
    """Knows the producers that are connected. What serves clients fits it."""

    def is_live(self, topic: str) -> bool:
        """Say whether a producer of ``topic`` can be asked now. Called from any thread, and returns at once."""
        ...

    async def check(self, check: Check) -> bool:
        """Ask one producer of the topic; say whether the question is on its way."""
        ...


class TransactionalBroker(Protocol):
    """Keeps half messages until they are decided. Every method is safe to call concurrently on one event loop."""

    def attach(self, checker: Checker) -> None:
        """Ask producers through ``checker`` from now on. Until then every check waits."""
        ...

    async def prepare(self, halves: Sequence[Half]) -> Sequence[HalfReceipt]:
        """Accept all half messages or none, and return one receipt each, in order, once they are durable.

        One whose message id is known as a half message of its topic is not stored again. Raises ``Overloaded`` (nothing
        done), ``BrokerUnavailable`` (in doubt), ``Refused(MESSAGE_ID)`` if another message of the topic has the id.
        """
        ...

    async def commit(self, topic: str, transaction_id: str) -> None:
        """Make a half message visible, or let it wait for its delivery time; durable on return.

        Committing what was committed is fine. ``Refused(TRANSACTION_ID)`` says how it ended otherwise, or that nothing
        is known of it, or that this broker cannot have given the id for ``topic``; ``Refused(TOPIC_UNKNOWN)``, that
        nobody ever used the topic. ``BrokerUnavailable``: in doubt, repeat it.
        """
        ...

    async def roll_back(self, topic: str, transaction_id: str) -> None:
        """Remove a half message, durable on return; raises as ``commit``. Rolling back twice is fine."""
        ...
