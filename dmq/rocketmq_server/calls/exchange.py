"""The message port between protocol and broker: checks quotas, then calls the broker.

The calls that come once per message end here. In a single process the port is the broker itself. A front process uses
the other end of a stream instead (``dmq.processes``), with the same calls.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import partial
from typing import Any, Final, NamedTuple, Protocol

from broker_adapter.contracts.adapter import PopBroker, Subscription
from broker_adapter.contracts.message import Delivery, Envelope, SendReceipt
from dmq.acl.quotas import Holder, Quota, Quotas, pair_name
from dmq.rocketmq_server.sessions.slots import PollSlots
from retry.failure_reason import FailureReason


class Receive(NamedTuple):
    """The parameters of a receive, as in ``PopBroker.receive``.

    With ``is_renewed`` the broker renews the leases for as long as the client is alive.
    """

    group: str
    subscription: Subscription
    batch_max: int
    invisible_ms: int
    wait_ms: int
    is_renewed: bool


class ServedBroker(PopBroker, Protocol):
    """A broker that is notified of failure reasons and of undelivered answers."""

    def note_failure(self, group: str, receipt_handle: str, reason: FailureReason) -> bool:
        """Store the reason of a failure that the client is about to report; return False if reasons are not kept here.

        The reason is merged with an earlier one of the same delivery. An unknown delivery is ignored.
        """
        ...

    async def not_taken(self, group: str, leased: Sequence[tuple[str, str]]) -> None:
        """End deliveries that did not reach their client, given as pairs of topic and receipt handle.

        The messages are redelivered at once, as the next attempt: a client may have crashed on a message that it
        received in part. Errors are not reported: a message that is not redelivered now is redelivered when its lease
        expires.
        """
        ...


class Caller(NamedTuple):
    """The client that makes a call."""

    client_id: str = ""
    address: str = ""


UNKNOWN_CALLER: Final = Caller()


class Received(NamedTuple):
    """The result of a receive. The caller calls exactly one of the two callbacks.

    ``over`` reports whether the client's connection accepted the whole answer; otherwise its unfinished messages are
    redelivered at once, as the next attempt. ``give_back`` reports that the client received none of it; the messages
    are redelivered at once, as the same attempt.
    """

    deliveries: Sequence[Delivery]
    over: Callable[[bool], None]
    give_back: Callable[[], None]


class MessagePort(Protocol):
    """The calls that come once per message. ``holders`` are a call's quota holders. Raises as ``PopBroker`` does."""

    def send(self, envelopes: Sequence[Envelope], holders: tuple[Holder, ...]) -> Awaitable[Sequence[SendReceipt]]:
        """Send as ``PopBroker.send`` does. All messages have the same topic, which is created if it does not exist."""
        ...

    def receive(self, wanted: Receive, client_id: str, holders: tuple[Holder, ...]) -> Awaitable[Received]:
        """Receive as ``PopBroker.receive`` does; create the topic and the group if they do not exist.

        The wait ends early, with no messages, when the client announces its termination and when the daemon stops.
        """
        ...

    def ack(self, group: str, topic: str, receipt_handles: Sequence[str]) -> Awaitable[Sequence[Exception | None]]:
        """Acknowledge as ``PopBroker.ack`` does; the result may be empty if all entries succeed."""
        ...

    def change_invisible(
        self,
        group: str,
        topic: str,
        receipt_handle: str,
        invisible_ms: int,
        *,
        suspend: bool,
        caller: Caller = UNKNOWN_CALLER,
    ) -> Awaitable[str]:
        """Change the invisible duration as ``PopBroker.change_invisible`` does; ``caller`` is stored with a failure."""
        ...


class BrokerExchange:
    """The message port in the broker's own process. The event loop owns it."""

    def __init__(self, broker: ServedBroker, quotas: Quotas, polls: PollSlots) -> None:
        self._broker = broker
        self._quotas = quotas
        self._polls = polls
        self._giving_back: set[asyncio.Task[None]] = set()
        self.ack = broker.ack

    def send(self, envelopes: Sequence[Envelope], holders: tuple[Holder, ...]) -> Awaitable[Sequence[SendReceipt]]:
        quotas, topic = self._quotas, envelopes[0].topic
        if quotas.limits_sends:
            quotas.spend(Quota.SENDS_PER_S, holders, len(envelopes))
        if not quotas.is_known(Quota.TOPICS, topic):
            quotas.make(Quota.TOPICS, holders, topic)
        return self._broker.send(envelopes)

    async def receive(self, wanted: Receive, client_id: str, holders: tuple[Holder, ...]) -> Received:
        group, subscription, batch_max, invisible_ms, wait_ms, is_renewed = wanted
        broker = self._broker
        self._quotas.about_to_make(Quota.TOPICS, holders, subscription.topic)
        self._quotas.about_to_make(Quota.GROUPS, holders, group)
        self._quotas.about_to_make(Quota.SUBSCRIPTIONS, holders, pair_name(group, subscription.topic))
        await broker.ensure_group(group)
        renew_for = ""
        if is_renewed:
            renew_for = client_id
            broker.client_seen(client_id)

        def receive(left_ms: int) -> Awaitable[Sequence[Delivery]]:
            return broker.receive(
                group,
                subscription,
                batch_max=batch_max,
                invisible_ms=invisible_ms,
                wait_ms=left_ms,
                renew_for=renew_for,
            )

        nothing: Sequence[Delivery] = ()
        deliveries = await self._polls.run(client_id, holders, receive, wait_ms, nothing=nothing)
        leased = [(each.topic, each.receipt_handle) for each in deliveries]  # without their messages
        return Received(deliveries, partial(self._over, group, leased), partial(self._give_back, group, leased))

    def _over(self, group: str, leased: Sequence[tuple[str, str]], is_taken: bool) -> None:
        if leased and not is_taken:
            self._begin(self._broker.not_taken(group, leased))

    def _give_back(self, group: str, leased: Sequence[tuple[str, str]]) -> None:
        if leased:
            self._begin(self._suspend(group, leased))

    async def _suspend(self, group: str, leased: Sequence[tuple[str, str]]) -> None:
        """End deliveries without counting an attempt; if a call fails, the message is redelivered when its lease
        expires.
        """
        ending = (self._broker.change_invisible(group, topic, handle, 0, suspend=True) for topic, handle in leased)
        await asyncio.gather(*ending, return_exceptions=True)

    def _begin(self, ending: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(ending)
        self._giving_back.add(task)
        task.add_done_callback(self._giving_back.discard)

    async def change_invisible(
        self,
        group: str,
        topic: str,
        receipt_handle: str,
        invisible_ms: int,
        *,
        suspend: bool,
        caller: Caller = UNKNOWN_CALLER,
    ) -> str:
        if not suspend:
            reason = FailureReason(client_id=caller.client_id, address=caller.address)
            self._broker.note_failure(group, receipt_handle, reason)
        return await self._broker.change_invisible(group, topic, receipt_handle, invisible_ms, suspend=suspend)
