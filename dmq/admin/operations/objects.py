"""RPCs of ``AdminService`` about topics and groups as objects: a request in, a response or an exception out."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Literal

from google.protobuf.message import Message

from broker_adapter.contracts.errors import Refused, Rule
from broker_adapter.contracts.limits import DELIVER_AT_MS_MAX
from broker_adapter.contracts.message import MessageType
from broker_adapter.contracts.topics import check_group, check_topic
from dmq.admin import admin_v1 as wire
from dmq.admin.operations.groups import GroupOperations
from dmq.admin.operations.topics import Topics
from dmq.admin.requests import mapping
from dmq.broker.topics.settings import FLOW_STAYS, KEEP_STAYS, QUOTAS_STAY, FlowChange, KeepChange, QuotaChange

MIXED: Literal["MIXED"] = "MIXED"


class ObjectCalls:
    """RPCs that create, change and remove. Raise ``Refused`` for invalid input."""

    def __init__(self, topics: Topics, groups: GroupOperations) -> None:
        self._topics = topics
        self._groups = groups
        self.calls: Mapping[str, Callable[..., Awaitable[Message]]] = {
            "GetTopic": self.get_topic,
            "CreateTopic": self.create_topic,
            "SetTopic": self.set_topic,
            "RemoveTopic": self.remove_topic,
            "CreateGroup": self.create_group,
            "RemoveGroup": self.remove_group,
            "ResetGroup": self.reset_group,
            "Subscribe": self.subscribe,
        }

    async def get_topic(self, request: wire.GetTopicRequest) -> wire.GetTopicResponse:
        """Return the status of one topic with its readers."""
        return wire.GetTopicResponse(topic=mapping.wire_topic(await self._topics.topic(check_topic(request.topic))))

    async def create_topic(self, request: wire.CreateTopicRequest) -> wire.CreateTopicResponse:
        """Create a topic."""
        name, message_type = check_topic(request.topic), _type_of(request.type or MIXED)
        made = await self._topics.create_topic(
            name,
            queues=request.queues,
            message_type=None if message_type == MIXED else message_type,
            keep=_keep_of(request.keep),
        )
        return wire.CreateTopicResponse(topic=mapping.wire_topic(made))

    async def set_topic(self, request: wire.SetTopicRequest) -> wire.SetTopicResponse:
        """Change a topic, and return its status."""
        name, message_type = check_topic(request.topic), _type_of(request.type) if request.type else None
        keep = _keep_of(request.keep)
        flow = FlowChange(
            request.is_paused if request.HasField("is_paused") else None,
            request.deliver_rate if request.HasField("deliver_rate") else None,
        )
        fields = QuotaChange._fields
        quotas = QuotaChange(*(getattr(request, each) if request.HasField(each) else None for each in fields))
        stays = keep == KEEP_STAYS and flow == FLOW_STAYS and quotas == QUOTAS_STAY
        if message_type is None and not request.queues and stays:
            raise Refused(Rule.REQUEST, "the request changes nothing")
        changed = await self._topics.set_topic(
            name, queues=request.queues, message_type=message_type, keep=keep, flow=flow, quotas=quotas
        )
        return wire.SetTopicResponse(topic=mapping.wire_topic(changed))

    async def remove_topic(self, request: wire.RemoveTopicRequest) -> wire.RemoveTopicResponse:
        await self._topics.remove_topic(check_topic(request.topic), is_forced=request.force)
        return wire.RemoveTopicResponse()

    async def create_group(self, request: wire.CreateGroupRequest) -> wire.CreateGroupResponse:
        """Create a group."""
        made = await self._groups.create_group(check_group(request.group))
        return wire.CreateGroupResponse(group=mapping.wire_group(made))

    async def remove_group(self, request: wire.RemoveGroupRequest) -> wire.RemoveGroupResponse:
        await self._groups.remove_group(
            check_group(request.group), is_forced=request.force, with_dead_letters=request.with_dead_letters
        )
        return wire.RemoveGroupResponse()

    async def reset_group(self, request: wire.ResetGroupRequest) -> wire.ResetGroupResponse:
        """Move the position of a group."""
        group, topic = check_group(request.group), check_topic(request.topic)
        to: int | Literal["begin", "end"]
        match request.WhichOneof("to"):
            case "begin":
                to = "begin"
            case "end":
                to = "end"
            case "at_ms" if 0 <= request.at_ms <= DELIVER_AT_MS_MAX:
                to = request.at_ms
            case _:
                raise Refused(Rule.REQUEST, "the target must be the beginning, the end, or a time", value=request.at_ms)
        return wire.ResetGroupResponse(offsets=await self._groups.reset_group(group, topic, to))

    async def subscribe(self, request: wire.SubscribeRequest) -> wire.SubscribeResponse:
        """Subscribe a group to a topic."""
        await self._groups.subscribe(check_group(request.group), check_topic(request.topic))
        return wire.SubscribeResponse()


def _keep_of(given: wire.KeepChange) -> KeepChange:
    unread = given.unread or None
    if unread not in {None, "yes", "no", "default"}:
        raise Refused(Rule.REQUEST, "unknown word for keeping what is unread", value=unread, limit="yes, no, default")
    return KeepChange(
        given.time_ms if given.HasField("time_ms") else None,
        given.size_bytes if given.HasField("size_bytes") else None,
        unread,  # type: ignore[arg-type]  # one of those
    )


def _type_of(name: str) -> MessageType | Literal["MIXED"]:
    if name == MIXED:
        return MIXED
    if name not in MessageType.__members__:
        limit = ", ".join((*MessageType.__members__, MIXED))
        raise Refused(Rule.REQUEST, "unknown message type", value=name, limit=limit)
    return MessageType[name]
