"""What operators ask of a cluster over the classic protocol: topics, groups, messages by key, who reads what.

Topics and groups are each broker's own: they are made at every master that the name servers know. Every method raises
``BrokerUnavailable``, ``Overloaded``, ``Refused(UNAUTHORIZED)`` and ``Refused(FORBIDDEN)`` beside what it names.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Any, NamedTuple, Self

from broker_adapter.contracts.adapter import QueueRange
from broker_adapter.contracts.classic import Filter, MemberState
from broker_adapter.contracts.errors import BrokerUnavailable, Refused, Rule
from broker_adapter.contracts.limits import DELIVER_AT_MS_MAX
from broker_adapter.contracts.message_queue import MessageQueue
from broker_adapter.remoting.bodies import queue_of_name
from broker_adapter.remoting.calls import Calls, RemotingOptions, number_of
from broker_adapter.remoting.codes import Operation, Result
from broker_adapter.remoting.frames import FrameBroken
from broker_adapter.remoting.ids import decode_offset_id
from broker_adapter.remoting.loose_json import decode_object, unreadable
from broker_adapter.remoting.pulling import SQL, offset_fields
from broker_adapter.remoting.routes import MASTER, ClusterInfo, Part, decode_cluster
from broker_adapter.remoting.running import decode_running
from broker_adapter.remoting.stored import StoredMessage, UnreadableMessage, decode_messages

_READ_WRITE = 6
_KEYS_MAX = 64


class QueueStats(NamedTuple):
    """A queue, and when a message was stored in it last; 0 if none ever was, or it is gone."""

    readable: QueueRange
    stored_last_at_ms: int


class GroupQueueStats(NamedTuple):
    """How far a group has come in a queue. ``last_at_ms``: when what it finished last was stored."""

    end_offset: int
    committed_offset: int
    last_at_ms: int


class Connected(NamedTuple):
    """A member of a group as a broker sees it."""

    client_id: str
    address: str
    language: str
    version: int


class GroupSettings(NamedTuple):
    """What a broker was told about a group."""

    is_enabled: bool
    retries_max: int


class Connections(NamedTuple):
    """A group as a broker sees it. ``filters`` are those that its members told last, by topic."""

    members: Sequence[Connected]
    filters: Mapping[str, Filter]
    is_broadcast: bool
    start: str  # a value of Start; a newer RocketMQ may have others


class RemotingAdmin(AbstractAsyncContextManager["RemotingAdmin"]):
    """Belongs to one event loop; connects when it is first used, ``close`` it."""

    def __init__(self, options: RemotingOptions) -> None:
        self._calls = Calls(options)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def __aenter__(self) -> Self:
        return self

    async def close(self) -> None:
        """Close all connections."""
        await self._calls.close()

    async def cluster(self) -> ClusterInfo:
        """Return every broker that the name servers know."""
        found = decode_cluster((await self._calls.ask_names(Operation.CLUSTER, {})).body)
        self._calls.remember(found.addresses)
        return found

    async def topics(self) -> Sequence[str]:
        """Return the names of all topics, RocketMQ's own too, sorted."""
        what = "the list of topics"
        body = (await self._calls.ask_names(Operation.TOPICS, {})).body
        try:
            return tuple(sorted(map(str, decode_object(body, what)["topicList"])))
        except (TypeError, KeyError) as error:
            raise unreadable(what, error) from None

    async def route(self, topic: str) -> Sequence[Part]:
        """Return what each broker has of a topic. ``Refused(TOPIC_UNKNOWN)``."""
        return await self._calls.route(topic)

    # -- topics and groups ----------------------------------------------------------------------------------------

    async def make_topic(self, topic: str, *, queues: int = 8, kind: str = "", brokers: Sequence[str] = ()) -> None:
        """Make a topic at all brokers, or those that are named; change it where it is there.

        ``kind`` is NORMAL, FIFO, DELAY, TRANSACTION or MIXED, which clients of RocketMQ 5 over gRPC need; brokers
        before it know none.
        """
        fields = {
            "topic": topic,
            "defaultTopic": "TBW102",
            "readQueueNums": str(queues),
            "writeQueueNums": str(queues),
            "perm": str(_READ_WRITE),
            "topicFilterType": "SINGLE_TAG",
            "topicSysFlag": "0",
            "order": "true" if kind == "FIFO" else "false",
            **({"attributes": f"+message.type={kind}"} if kind else {}),
        }
        await self._at_masters(Operation.UPDATE_TOPIC, fields, brokers=brokers)

    async def delete_topic(self, topic: str) -> None:
        """Delete a topic everywhere, with its messages. One that is not there is none."""
        await self._at_masters(Operation.DELETE_TOPIC, {"topic": topic})
        asks = (self._calls.ask(each, Operation.FORGET_TOPIC, {"topic": topic}) for each in self._calls.names)
        await asyncio.gather(*asks)

    async def make_group(
        self, group: str, *, retries_max: int = 16, is_fifo: bool = False, brokers: Sequence[str] = ()
    ) -> None:
        """Make a consumer group at all brokers, or those that are named; change it where it is there."""
        settings = {
            "groupName": group,
            "consumeEnable": True,
            "consumeFromMinEnable": True,
            "consumeBroadcastEnable": True,
            "consumeMessageOrderly": is_fifo,
            "retryQueueNums": 1,
            "retryMaxTimes": retries_max,
            "brokerId": 0,
            "whichBrokerWhenConsumeSlowly": 1,
            "notifyConsumerIdsChangedEnable": True,
        }
        await self._at_masters(Operation.UPDATE_GROUP, {}, json.dumps(settings).encode(), brokers=brokers)

    async def delete_group(self, group: str) -> None:
        """Delete a consumer group everywhere, and where it had come to."""
        await self._at_masters(Operation.DELETE_GROUP, {"groupName": group, "cleanOffset": "true"})

    async def reset_offsets(self, group: str, topic: str, stored_at_ms: int) -> None:
        """Have a group go on, in all queues of a topic, at the first message stored at or after a time.

        RocketMQ 5 does it itself. Brokers before it have the members do it: ``Refused(NOT_FOUND)`` if none is online,
        or if the group never said how far it has come in one of the queues.
        """
        fields = {"topic": topic, "group": group, "timestamp": str(stored_at_ms), "isForce": "true"}
        try:
            for address in await self._masters_of(topic):
                await self._calls.ask(address, Operation.RESET_OFFSETS, fields)
        except BrokerUnavailable as error:
            if error.code == Result.FAILED:
                raise Refused(Rule.NOT_FOUND, str(error), value=group, code=error.code) from None
            raise

    # -- messages ----------------------------------------------------------------------------------------

    async def messages_by_key(self, topic: str, key: str) -> Sequence[StoredMessage | UnreadableMessage]:
        """Return messages of a topic that have a key, or a message id, up to 64 of each broker.

        By the brokers' indexes: a key with the same hash code is found as well.
        """
        fields = {"topic": topic, "key": key, "maxNum": str(_KEYS_MAX), "beginTimestamp": "0"}
        fields["endTimestamp"] = str(DELIVER_AT_MS_MAX)
        found = []
        for address in await self._masters_of(topic):
            accepted = (Result.OK, Result.NOT_FOUND)
            answer = await self._calls.ask(address, Operation.MESSAGES_BY_KEY, fields, accepted=accepted)
            found += list(decode_messages(answer.body))
        return found

    async def message_by_id(self, offset_id: str, topic: str = "") -> StoredMessage | UnreadableMessage:
        """Return the message that a broker has under an offset id, asking the broker whose address is in it."""
        place = decode_offset_id(offset_id)
        fields = {"offset": str(place.log_offset), "topic": topic}
        answer = await self._calls.ask(place.host, Operation.MESSAGE_BY_ID, fields)
        try:
            (found,) = decode_messages(answer.body)
        except ValueError:
            raise FrameBroken(f"{place.host} answers a question for one message with several, or none") from None
        return found

    # -- who reads what ----------------------------------------------------------------------------------------

    async def topic_stats(self, topic: str) -> Mapping[MessageQueue, QueueStats]:
        """Return the queues of a topic with what is in them."""
        found = [await self.topic_stats_at(each, topic) for each in await self._masters_of(topic)]
        return {queue: each for part in found for queue, each in sorted(part.items())}

    async def consume_stats(self, group: str, topic: str) -> Mapping[MessageQueue, GroupQueueStats]:
        """Return how far a group has come in each queue of a topic."""
        found = [await self.consume_stats_at(each, group, topic) for each in await self._masters_of(topic)]
        return {queue: each for part in found for queue, each in sorted(part.items())}

    async def members(self, group: str, topic: str) -> Sequence[Connected]:
        """Return the members of a group that brokers of a topic see, sorted; none if nobody is online."""
        seen = [await self.connections_at(each, group) for each in await self._masters_of(topic)]
        found = {each.client_id: each for part in seen if part is not None for each in part.members}
        return [found[name] for name in sorted(found)]

    # -- what one broker says, by its address -----------------------------------------------------------------------

    async def broker_facts(self, address: str) -> Mapping[str, str]:
        """Return what a broker says of itself, a slave too, by RocketMQ's names: ``brokerVersionDesc``, ``putTps``."""
        what = f"the facts of broker {address}"
        body = (await self._calls.ask(address, Operation.BROKER_FACTS, {})).body
        try:
            return {str(name): str(value) for name, value in decode_object(body, what)["table"].items()}
        except (KeyError, AttributeError) as error:
            raise unreadable(what, error) from None

    async def groups_at(self, address: str) -> Mapping[str, GroupSettings]:
        """Return the groups that a broker knows, RocketMQ's own too."""
        what = f"the groups of broker {address}"
        body = (await self._calls.ask(address, Operation.GROUPS, {})).body
        try:
            table = decode_object(body, what)["subscriptionGroupTable"]
            return {
                str(name): GroupSettings(bool(each.get("consumeEnable", True)), _int(each, "retryMaxTimes", what))
                for name, each in table.items()
            }
        except (KeyError, AttributeError) as error:
            raise unreadable(what, error) from None

    async def topic_stats_at(self, address: str, topic: str) -> Mapping[MessageQueue, QueueStats]:
        """Return the queues that a broker has of a topic, with what is in them."""
        what = f"the queues of {topic}"
        table = await self._table(address, Operation.TOPIC_STATS, {"topic": topic}, what)
        return {
            queue: QueueStats(
                QueueRange(_int(each, "minOffset", what), _int(each, "maxOffset", what)),
                _int(each, "lastUpdateTimestamp", what),
            )
            for queue, each in table.items()
        }

    async def consume_stats_at(
        self, address: str, group: str, topic: str = ""
    ) -> Mapping[MessageQueue, GroupQueueStats]:
        """Return how far a group has come in a broker's queues of a topic, or of all topics that it ever committed in.

        A broker says 0 of a queue that the group never committed. While members are online, it passes over topics that
        they do not subscribe to.
        """
        what = f"how far {group} has come"
        fields = {"consumerGroup": group, **({"topic": topic} if topic else {})}
        return {
            queue: GroupQueueStats(
                _int(each, "brokerOffset", what), _int(each, "consumerOffset", what), _int(each, "lastTimestamp", what)
            )
            for queue, each in (await self._table(address, Operation.CONSUME_STATS, fields, what)).items()
        }

    async def committed_at(self, address: str, group: str, queue: MessageQueue) -> int | None:
        """As ``ClassicBroker.committed_offset``; a broker before RocketMQ 5 may say 0 in place of nothing."""
        fields = {"consumerGroup": group, **offset_fields(queue), "setZeroIfNotFound": "false"}
        accepted = (Result.OK, Result.NOT_FOUND)
        answer = await self._calls.ask(address, Operation.COMMITTED_OFFSET, fields, accepted=accepted)
        return None if answer.code == Result.NOT_FOUND else number_of(answer, "offset", address)

    async def connections_at(self, address: str, group: str) -> Connections | None:
        """Return the members of a group that a broker sees, ``None`` if nobody is online."""
        what = f"the members of {group}"
        accepted = (Result.OK, Result.NOBODY_ONLINE)
        answer = await self._calls.ask(
            address, Operation.CONSUMER_CONNECTIONS, {"consumerGroup": group}, accepted=accepted
        )
        if answer.code == Result.NOBODY_ONLINE:
            return None
        try:
            found = decode_object(answer.body, what)
            members = [
                Connected(str(each["clientId"]), str(each["clientAddr"]), str(each["language"]), int(each["version"]))
                for each in found["connectionSet"]
            ]
            filters = {
                str(topic): Filter(str(each["subString"]), each.get("expressionType") == SQL)
                for topic, each in (found.get("subscriptionTable") or {}).items()
            }
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise unreadable(what, error) from None
        is_broadcast = found.get("messageModel") == "BROADCASTING"
        return Connections(sorted(members), filters, is_broadcast, str(found.get("consumeFromWhere") or ""))

    async def state_of(self, address: str, group: str, client_id: str) -> MemberState:
        """Have a broker ask a member how it is. ``BrokerUnavailable`` if the member does not answer."""
        fields = {"consumerGroup": group, "clientId": client_id, "jstackEnable": "false"}
        return decode_running((await self._calls.ask(address, Operation.RUNNING_INFO, fields)).body)

    # -- inside ----------------------------------------------------------------------------------------

    async def _masters_of(self, topic: str) -> Sequence[str]:
        parts = await self._calls.route(topic)
        return [part.addresses[MASTER] for part in parts if MASTER in part.addresses]

    async def _at_masters(
        self, operation: Operation, fields: Mapping[str, str], body: bytes = b"", *, brokers: Sequence[str] = ()
    ) -> None:
        known = self._calls.brokers
        if not brokers or not known.keys() >= set(brokers):
            known = (await self.cluster()).addresses  # those that are gone are not in it
        if not known:
            raise BrokerUnavailable("the name servers know no broker yet, or none any more")
        unknown = set(brokers) - known.keys()
        if unknown:
            raise Refused(Rule.NOT_FOUND, "the name servers know no broker of this name", value=min(unknown))
        for broker in brokers or sorted(known):
            if MASTER not in known[broker]:
                raise BrokerUnavailable(f"broker {broker} has no master now")
            await self._calls.ask(known[broker][MASTER], operation, fields, body)

    async def _table(
        self, address: str, operation: Operation, fields: Mapping[str, str], what: str
    ) -> Mapping[MessageQueue, Mapping[str, Any]]:
        """Return what a broker says of each of its queues, sorted. Its JSON has queues for names."""
        body = (await self._calls.ask(address, operation, fields)).body
        try:
            found = decode_object(body, what)["offsetTable"]
            return dict(sorted((queue_of_name(name), dict(each)) for name, each in found.items()))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise unreadable(what, error) from None


def _int(found: Mapping[str, Any], name: str, what: str) -> int:
    value = found.get(name, 0)
    if type(value) is not int:
        raise unreadable(what, f"{name} is no number")
    return value
