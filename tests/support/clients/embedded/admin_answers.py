"""Answers of the admin service of a broker under test."""

from __future__ import annotations

from typing import Any

from google.protobuf.message import Message
from support.rigs.broker.rig import GROUP, TOPIC, EmbeddedRig

from dmq.admin import admin_v1 as wire
from dmq.admin.api import AdminService
from dmq.admin.operations.daemon import RunningDaemon
from dmq.admin.operations.messages.messages import FoundMessage, MessageCalls
from dmq.config.settings import DaemonConfig
from dmq.metrics.registry import Metrics


async def ask(rig: EmbeddedRig, request: Message) -> Any:  # noqa: ANN401 - the response of its RPC
    """Return the answer of the admin service to a request."""
    cell = RunningDaemon(DaemonConfig(), rig.store, rig.broker, Metrics(process=False), "1", rig.clock.now_ms())
    return await AdminService(cell).handler(type(request).__name__.removesuffix("Request"))(request)


async def group_of(rig: EmbeddedRig, name: str = GROUP, *, with_unread: bool = False) -> wire.Group:
    """Return a group as operators see it."""
    found: wire.Group = (await ask(rig, wire.GetGroupRequest(group=name, with_unread=with_unread))).group
    return found


async def groups_of(rig: EmbeddedRig, *, with_removed: bool = False) -> list[wire.Group]:
    """Return all groups as operators see them."""
    return list((await ask(rig, wire.ListGroupsRequest(with_removed=with_removed))).groups)


async def message_of(rig: EmbeddedRig, message_id: str, *, topic: str = TOPIC) -> FoundMessage:
    """Return the state of a message; its payload may be any bytes."""
    return await MessageCalls(rig.store, rig.broker).find(topic, message_id)
