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

from broker_adapter.adapter import QueueRange
from broker_adapter.errors import BrokerUnavailable, Refused, Rule
from broker_adapter.limits import DELIVER_AT_MS_MAX
from broker_adapter.message_queue import MessageQueue
from broker_adapter.remoting.bodies import queue_of_name
from broker_adapter.remoting.calls import Calls, RemotingOptions
from broker_adapter.remoting.codes import Operation, Result
from broker_adapter.remoting.frames import FrameBroken
from broker_adapter.remoting.ids import decode_offset_id
from broker_adapter.remoting.loose_json import decode_object, unreadable
from broker_adapter.remoting.routes import MASTER, ClusterInfo, Part, decode_cluster
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
            await self._of_topic(topic, Operation.RESET_OFFSETS, fields)
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
        tables = await self._tables(topic, Operation.TOPIC_STATS, {"topic": topic})
        what = f"the queues of {topic}"
        return {
            queue: QueueStats(
                QueueRange(_int(each, "minOffset", what), _int(each, "maxOffset", what)),
                _int(each, "lastUpdateTimestamp", what),
            )
            for queue, each in sorted(tables.items())
        }

    async def consume_stats(self, group: str, topic: str) -> Mapping[MessageQueue, GroupQueueStats]:
        """Return how far a group has come in each queue of a topic."""
        fields = {"consumerGroup": group, "topic": topic}
        what = f"how far {group} has come"
        return {
            queue: GroupQueueStats(
                _int(each, "brokerOffset", what), _int(each, "consumerOffset", what), _int(each, "lastTimestamp", what)
            )
            for queue, each in sorted((await self._tables(topic, Operation.CONSUME_STATS, fields)).items())
        }

    async def members(self, group: str, topic: str) -> Sequence[Connected]:
        """Return the members of a group that brokers of a topic see, sorted; none if nobody is online."""
        found: dict[str, Connected] = {}
        what = f"the members of {group}"
        for address in await self._masters_of(topic):
            accepted = (Result.OK, Result.NOBODY_ONLINE)
            fields = {"consumerGroup": group}
            answer = await self._calls.ask(address, Operation.CONSUMER_CONNECTIONS, fields, accepted=accepted)
            if answer.code == Result.OK:
                try:
                    for each in decode_object(answer.body, what)["connectionSet"]:
                        name = str(each["clientId"])
                        version, language = int(each["version"]), str(each["language"])
                        found[name] = Connected(name, str(each["clientAddr"]), language, version)
                except (ValueError, TypeError, KeyError) as error:
                    raise unreadable(what, error) from None
        return [found[name] for name in sorted(found)]

    # -- inside ----------------------------------------------------------------------------------------

    async def _masters_of(self, topic: str) -> Sequence[str]:
        parts = await self._calls.route(topic)
        return [part.addresses[MASTER] for part in parts if MASTER in part.addresses]

    async def _of_topic(self, topic: str, operation: Operation, fields: Mapping[str, str]) -> Sequence[bytes]:
        return [(await self._calls.ask(each, operation, fields)).body for each in await self._masters_of(topic)]

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

    async def _tables(
        self, topic: str, operation: Operation, fields: Mapping[str, str]
    ) -> Mapping[MessageQueue, Mapping[str, Any]]:
        """Return what brokers say of each of their queues. Their JSON has queues for names."""
        what, found = f"the queues of {topic}", {}
        for body in await self._of_topic(topic, operation, fields):
            try:
                for name, each in decode_object(body, what)["offsetTable"].items():
                    found[queue_of_name(name)] = dict(each)
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                raise unreadable(what, error) from None
        return found


def _int(found: Mapping[str, Any], name: str, what: str) -> int:
    value = found.get(name, 0)
    if type(value) is not int:
        raise unreadable(what, f"{name} is no number")
    return value
