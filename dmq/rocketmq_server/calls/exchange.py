"""Where messages go in and out, behind the protocol: what a caller may have is judged, then the broker does it.

The calls that come for each message end here. In one process it is the broker itself; a front process has the other
end of a stream in its place (``dmq.processes``), and the calls are the same.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import partial
from typing import Any, Final, NamedTuple, Protocol

from broker_adapter.contracts.adapter import PopBroker, Subscription
from broker_adapter.contracts.message import Delivery, Envelope, SendReceipt
from dmq.acl.quotas import Holder, Quota, Quotas, pair_name
from dmq.rocketmq_server.sessions.slots import Polls
from retry.failure_reason import FailureReason


class Receive(NamedTuple):
    """What a receive asks for, as ``PopBroker.receive``; the leases of who ``is_renewed`` last as long as it lives."""

    group: str
    subscription: Subscription
    batch_max: int
    invisible_ms: int
    wait_ms: int
    is_renewed: bool


class ServedBroker(PopBroker, Protocol):
    """A broker that hears what became of the answers."""

    def note_failure(self, group: str, receipt_handle: str, reason: FailureReason) -> bool:
        """Keep why a delivery fails whose failure is about to come; False if its reasons are not kept here.

        It adds to what was noted of the delivery before. An unknown delivery is ignored.
        """
        ...

    async def not_taken(self, group: str, leased: Sequence[tuple[str, str]]) -> None:
        """End deliveries that did not reach their client, told by topics and receipt handles.

        They come again at once, as the next attempt: a client may have died of what it got of one. Whatever fails is
        not told: what does not come again now does so when its lease ends.
        """
        ...


class Caller(NamedTuple):
    """The client that makes a call."""

    client_id: str = ""
    address: str = ""


UNKNOWN_CALLER: Final = Caller()


class Received(NamedTuple):
    """What a receive got. One of the two is to be called once.

    ``over`` says whether the client's connection took all of it: what it did not take comes again at once, as the next
    attempt. ``give_back`` says that the client was shown nothing of it: it comes again at once, as the same attempt.
    """

    deliveries: Sequence[Delivery]
    over: Callable[[bool], None]
    give_back: Callable[[], None]


class Exchange(Protocol):
    """The calls that come for each message. ``holders`` is who a call counts for. Raises as ``PopBroker`` does."""

    def send(self, envelopes: Sequence[Envelope], holders: tuple[Holder, ...]) -> Awaitable[Sequence[SendReceipt]]:
        """As ``PopBroker.send``, of messages to one topic, which is made if it does not exist."""
        ...

    def receive(self, wanted: Receive, client_id: str, holders: tuple[Holder, ...]) -> Awaitable[Received]:
        """As ``PopBroker.receive``; a topic and a group that do not exist are made.

        The wait ends early, with nothing, when the client says goodbye and when the daemon ends.
        """
        ...

    def ack(self, group: str, topic: str, receipt_handles: Sequence[str]) -> Awaitable[Sequence[Exception | None]]:
        """As ``PopBroker.ack``; it may give no results at all if all are good."""
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
        """As ``PopBroker.change_invisible``; ``caller`` is kept with a failure."""
        ...


class BrokerExchange:
    """The exchange in the process of the broker. Belongs to the event loop."""

    def __init__(self, broker: ServedBroker, quotas: Quotas, polls: Polls) -> None:
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
        """End deliveries at no attempt; what fails comes again when its lease ends."""
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
