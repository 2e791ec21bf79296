"""Administration of a cluster over the classic protocol: topics, groups, messages by key, consumer positions.

Each broker stores its own topics and groups, so they are created at every master that the name servers list. Every
method raises ``BrokerUnavailable``, ``Overloaded``, ``Refused(UNAUTHORIZED)`` and ``Refused(FORBIDDEN)`` in addition
to the errors of its docstring.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from broker_adapter.contracts.adapter import QueueRange
from broker_adapter.contracts.classic import Filter, MemberState
from broker_adapter.contracts.errors import BrokerUnavailable, Refused, Rule
from broker_adapter.contracts.limits import DELIVER_AT_MS_MAX
from broker_adapter.contracts.message_queue import MessageQueue
from broker_adapter.remoting.calls import CallingClient
from broker_adapter.remoting.protocol.codes import Operation, Result
from broker_adapter.remoting.protocol.frames import FrameBroken, number_of
from broker_adapter.remoting.protocol.ids import decode_offset_id
from broker_adapter.remoting.protocol.loose_json import decode_object, unreadable
from broker_adapter.remoting.protocol.requests.bodies import queue_of_name
from broker_adapter.remoting.protocol.requests.pulling import SQL, offset_fields
from broker_adapter.remoting.protocol.requests.routes import MASTER, ClusterInfo, Part, decode_cluster
from broker_adapter.remoting.protocol.requests.running import decode_running
from broker_adapter.remoting.protocol.stored import StoredMessage, UnreadableMessage, decode_messages

_READ_WRITE = 6
_KEYS_MAX = 64


class QueueStats(NamedTuple):
    """Offset range of a queue and the time of its last stored message; 0 if it never had one or the message was
    deleted.
    """

    readable: QueueRange
    stored_last_at_ms: int


class GroupQueueStats(NamedTuple):
    """Position of a group in a queue. ``last_at_ms``: store time of the last finished message."""

    end_offset: int
    committed_offset: int
    last_at_ms: int


class Connected(NamedTuple):
    """Member of a group, as a broker reports it."""

    client_id: str
    address: str
    language: str
    version: int


class RemotingGroupSettings(NamedTuple):
    """Settings of a group at a broker."""

    is_enabled: bool
    retries_max: int


class Connections(NamedTuple):
    """Members and subscriptions of a group at a broker. ``filters``: last subscription of each topic."""

    members: Sequence[Connected]
    filters: Mapping[str, Filter]
    is_broadcast: bool
    start: str  # a value of Start, or a new value of a later RocketMQ


class RemotingAdmin(CallingClient):
    """Administration client. Belongs to one event loop, connects on first use, and must be closed with ``close``."""

    async def cluster(self) -> ClusterInfo:
        """Return every broker that the name servers list, and remember their addresses."""
        found = decode_cluster((await self._calls.ask_names(Operation.CLUSTER, {})).body)
        self._calls.remember(found.addresses)
        return found

    async def topics(self) -> Sequence[str]:
        """Return the names of all topics, including RocketMQ's system topics, sorted."""
        what = "the list of topics"
        body = (await self._calls.ask_names(Operation.TOPICS, {})).body
        try:
            return tuple(sorted(map(str, decode_object(body, what)["topicList"])))
        except (TypeError, KeyError) as error:
            raise unreadable(what, error) from None

    async def route(self, topic: str) -> Sequence[Part]:
        """Return the part of a topic at each broker. ``Refused(TOPIC_UNKNOWN)``."""
        return await self._calls.route(topic)

    # -- topics and groups ----------------------------------------------------------------------------------------

    async def make_topic(self, topic: str, *, queues: int = 8, kind: str = "", brokers: Sequence[str] = ()) -> None:
        """Create or update a topic at all brokers, or at the named ones only.

        ``kind`` is NORMAL, FIFO, DELAY, TRANSACTION or MIXED. gRPC clients of RocketMQ 5 require it; brokers before
        RocketMQ 5 do not support it.
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
        """Delete a topic and its messages at all brokers and name servers. A missing topic is no error."""
        await self._at_masters(Operation.DELETE_TOPIC, {"topic": topic})
        asks = (self._calls.ask(each, Operation.FORGET_TOPIC, {"topic": topic}) for each in self._calls.names)
        await asyncio.gather(*asks)

    async def make_group(
        self, group: str, *, retries_max: int = 16, is_fifo: bool = False, brokers: Sequence[str] = ()
    ) -> None:
        """Create or update a consumer group at all brokers, or at the named ones only."""
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
        """Delete a consumer group and its committed offsets at all brokers."""
        await self._at_masters(Operation.DELETE_GROUP, {"groupName": group, "cleanOffset": "true"})

    async def reset_offsets(self, group: str, topic: str, stored_at_ms: int) -> None:
        """Reset a group, in all queues of a topic, to the first message stored at or after a time.

        RocketMQ 5 performs the reset itself. Brokers before it delegate the reset to the online members:
        ``Refused(NOT_FOUND)`` if no member is online, or if the group has no committed offset in one of the queues.
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
        """Return messages of a topic with a key or message id, up to 64 from each broker.

        The brokers' indexes compare hash codes: messages with another key of the same hash code are included.
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
        """Return the message with an offset id, read from the broker address in the id."""
        place = decode_offset_id(offset_id)
        fields = {"offset": str(place.log_offset), "topic": topic}
        answer = await self._calls.ask(place.host, Operation.MESSAGE_BY_ID, fields)
        try:
            (found,) = decode_messages(answer.body)
        except ValueError:
            raise FrameBroken(f"{place.host} answered a query for one message with several messages, or none") from None
        return found

    # -- positions and members ----------------------------------------------------------------------------------------

    async def topic_stats(self, topic: str) -> Mapping[MessageQueue, QueueStats]:
        """Return the queues of a topic with their offset ranges and last store times."""
        found = [await self.topic_stats_at(each, topic) for each in await self._masters_of(topic)]
        return {queue: each for part in found for queue, each in sorted(part.items())}

    async def consume_stats(self, group: str, topic: str) -> Mapping[MessageQueue, GroupQueueStats]:
        """Return the position of a group in each queue of a topic."""
        found = [await self.consume_stats_at(each, group, topic) for each in await self._masters_of(topic)]
        return {queue: each for part in found for queue, each in sorted(part.items())}

    async def members(self, group: str, topic: str) -> Sequence[Connected]:
        """Return the members of a group that the brokers of a topic report, sorted; empty if none is online."""
        seen = [await self.connections_at(each, group) for each in await self._masters_of(topic)]
        found = {each.client_id: each for part in seen if part is not None for each in part.members}
        return [found[name] for name in sorted(found)]

    # -- one broker, by its address -----------------------------------------------------------------------

    async def broker_facts(self, address: str) -> Mapping[str, str]:
        """Return the runtime facts of a master or slave by RocketMQ's names, for example ``brokerVersionDesc``,
        ``putTps``.
        """
        what = f"the facts of broker {address}"
        body = (await self._calls.ask(address, Operation.BROKER_FACTS, {})).body
        try:
            return {str(name): str(value) for name, value in decode_object(body, what)["table"].items()}
        except (KeyError, AttributeError) as error:
            raise unreadable(what, error) from None

    async def groups_at(self, address: str) -> Mapping[str, RemotingGroupSettings]:
        """Return the groups of a broker, including RocketMQ's system groups."""
        what = f"the groups of broker {address}"
        body = (await self._calls.ask(address, Operation.GROUPS, {})).body
        try:
            table = decode_object(body, what)["subscriptionGroupTable"]
            return {
                str(name): RemotingGroupSettings(
                    bool(each.get("consumeEnable", True)), _int(each, "retryMaxTimes", what)
                )
                for name, each in table.items()
            }
        except (KeyError, AttributeError) as error:
            raise unreadable(what, error) from None

    async def topic_stats_at(self, address: str, topic: str) -> Mapping[MessageQueue, QueueStats]:
        """Return a broker's queues of a topic, with their offset ranges and last store times."""
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
        """Return the position of a group in a broker's queues of one topic, or of all topics with a committed offset.

        A broker reports 0 for a queue without a committed offset. While members are online, it omits topics without a
        subscription.
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
        """Return the committed offset, as ``ClassicBroker.committed_offset`` does.

        A broker before RocketMQ 5 may report 0 where no offset is committed.
        """
        fields = {"consumerGroup": group, **offset_fields(queue), "setZeroIfNotFound": "false"}
        accepted = (Result.OK, Result.NOT_FOUND)
        answer = await self._calls.ask(address, Operation.COMMITTED_OFFSET, fields, accepted=accepted)
        return None if answer.code == Result.NOT_FOUND else number_of(answer, "offset", address)

    async def connections_at(self, address: str, group: str) -> Connections | None:
        """Return the members of a group that a broker reports, or ``None`` if none is online."""
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
        """Return the state of a member, requested through a broker. ``BrokerUnavailable`` if the member does not
        answer.
        """
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
            known = (await self.cluster()).addresses  # drops brokers that are gone
        if not known:
            raise BrokerUnavailable("the name servers know no broker")
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
        """Return a broker's statistics by queue, sorted. The keys of its JSON table are queues, encoded as JSON."""
        body = (await self._calls.ask(address, operation, fields)).body
        try:
            found = decode_object(body, what)["offsetTable"]
            return dict(sorted((queue_of_name(name), dict(each)) for name, each in found.items()))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise unreadable(what, error) from None


def _int(found: Mapping[str, Any], name: str, what: str) -> int:
    value = found.get(name, 0)
    if type(value) is not int:
        raise unreadable(what, f"{name} is not a number")
    return value
