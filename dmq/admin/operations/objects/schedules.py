"""RPCs of ``AdminService`` about recurring messages: a request in, a response or an exception out."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from broker_adapter.contracts.errors import Refused, Rule
from broker_adapter.contracts.topics import check_topic
from broker_adapter.wire import rocketmq_v2 as public
from dmq.admin import admin_v1 as wire
from dmq.admin.requests import mapping, validate
from dmq.broker import EmbeddedBroker
from dmq.broker.schedules import NewSchedule, ScheduleStatus, check_name, largest, sample
from dmq.runtime.slices import in_slices
from dmq.store.schema.messages.recurring import CatchUp

_ENCODINGS = {"": public.IDENTITY, "IDENTITY": public.IDENTITY, "GZIP": public.GZIP}
CheckMessage = Callable[[public.Message], None]


class AddSchedule(Protocol):
    """Function that creates a schedule: ``Schedules.add``."""

    def __call__(self, wanted: NewSchedule, *, is_replacing: bool = False) -> Awaitable[tuple[ScheduleStatus, bool]]:
        """Create the schedule, durable on return."""
        ...


class ScheduleCalls:
    """RPCs of schedules. Raise ``Refused`` for invalid input; exceptions of the broker pass through."""

    def __init__(
        self, broker: EmbeddedBroker, check_message: CheckMessage = lambda _: None, add: AddSchedule | None = None
    ) -> None:
        """``check_message`` raises for messages that no client may send. ``add`` creates a schedule, by default in the
        broker.
        """
        self._broker = broker
        self._check_message = check_message
        self._add = add

    async def add_schedule(self, request: wire.AddScheduleRequest) -> wire.AddScheduleResponse:
        """Create a schedule."""
        wanted = self._wanted(request.schedule)
        found, is_new = await (self._add or self._broker.schedules.add)(wanted, is_replacing=request.replace)
        return wire.AddScheduleResponse(schedule=_shown(found), is_new=is_new)

    async def topic_of(self, name: str) -> str:
        """Return the topic of a schedule; empty if there is no such schedule."""
        try:
            return (await self._broker.schedules.show(name)).topic
        except Refused:
            return ""

    async def list_schedules(self, request: wire.ListSchedulesRequest) -> wire.ListSchedulesResponse:
        """List a page of schedules."""
        topic = check_topic(request.topic) if request.topic else ""
        token, limit = validate.check_token(request.token), validate.check_limit(request.limit)
        found, next_token = await self._broker.schedules.page(topic=topic, token=token, limit=limit)
        schedules = [_shown(each) async for each in in_slices(found)]
        return wire.ListSchedulesResponse(schedules=schedules, next_token=next_token)

    async def get_schedule(self, request: wire.GetScheduleRequest) -> wire.GetScheduleResponse:
        """Return one schedule with its message."""
        found = await self._broker.schedules.show(request.name)
        shown = _shown(found)
        content = mapping.content_if_readable(found.payload, with_body=request.with_body)
        if content is not None:
            shown.content.CopyFrom(content)
        return wire.GetScheduleResponse(schedule=shown)

    async def pause_schedule(self, request: wire.PauseScheduleRequest) -> wire.PauseScheduleResponse:
        return wire.PauseScheduleResponse(schedule=_shown(await self._broker.schedules.pause(request.name)))

    async def resume_schedule(self, request: wire.ResumeScheduleRequest) -> wire.ResumeScheduleResponse:
        return wire.ResumeScheduleResponse(schedule=_shown(await self._broker.schedules.resume(request.name)))

    async def remove_schedule(self, request: wire.RemoveScheduleRequest) -> wire.RemoveScheduleResponse:
        return wire.RemoveScheduleResponse(schedule=_shown(await self._broker.schedules.remove(request.name)))

    def _wanted(self, asked: wire.Schedule) -> NewSchedule:
        check_name(asked.name)
        catch_up = asked.catch_up or "one"
        if catch_up.upper() not in CatchUp.__members__:
            raise Refused(Rule.REQUEST, "unknown catch-up policy", value=catch_up, limit="one, all, skip")
        message = self._message(asked)
        return NewSchedule(
            asked.name,
            check_topic(asked.topic),
            message.SerializeToString(deterministic=True),
            message.system_properties.tag,
            every_ms=asked.interval_ms,
            cron=asked.cron,
            zone=asked.time_zone,
            start_ms=asked.start_at_ms,
            end_ms=asked.end_at_ms,
            count=asked.count,
            jitter_ms=asked.jitter_ms,
            catch_up=CatchUp[catch_up.upper()],
            message_group=message.system_properties.message_group,
        )

    def _message(self, asked: wire.Schedule) -> public.Message:
        content = asked.content
        if content.body_encoding not in _ENCODINGS:
            limit = "IDENTITY, GZIP"
            raise Refused(Rule.REQUEST, "unknown body encoding", value=content.body_encoding, limit=limit)
        message = sample(
            asked.topic,
            content.body,
            tag=content.tag,
            keys=content.keys,
            message_group=content.message_group,
            encoding=_ENCODINGS[content.body_encoding],
            properties=content.properties,
        )
        self._check_message(largest(message, asked.name))
        return message


def _shown(found: ScheduleStatus) -> wire.Schedule:
    schedule, progress = found.schedule, found.progress
    facts: dict[str, Any] = {"topic": found.topic, "interval_ms": schedule.every_ms, "cron": schedule.cron}
    return wire.Schedule(
        name=found.name,
        **facts,
        time_zone=schedule.zone,
        start_at_ms=schedule.start_ms,
        end_at_ms=schedule.end_ms,
        count=schedule.count,
        jitter_ms=schedule.jitter_ms,
        catch_up=schedule.catch_up.name.lower(),
        created_at_ms=schedule.created_at_ms,
        state=progress.phase.name.lower(),
        occurrences=progress.occurrences,
        last_at_ms=progress.last_ms,
        next_at_ms=found.next_due_ms,
        following_at_ms=found.following_ms,
        why=progress.why,
    )
