"""Schedules for tests: how they are made, what they sent, and whether their rows agree with each other."""

from __future__ import annotations

from typing import Any

from support.forges.messages.letters import queued
from support.rigs.broker.rig import TOPIC, EmbeddedRig
from support.rigs.store.rows import waiting_rows

from broker_adapter.contracts.message import Message, unpack_id
from broker_adapter.contracts.schedules import OCCURRENCE, SCHEDULE
from broker_adapter.wire.mapping import decode, encode
from dmq.broker.schedules.schedules import NewSchedule, ScheduleStatus
from dmq.store.schema.keys import META_PROGRESS, META_RECURRING, META_SCHEDULE, Family, meta_range
from dmq.store.schema.messages.record import WAITING_HEADER_BYTES, body_facts, is_recurring
from dmq.store.schema.messages.recurring import Phase, decode_progress, decode_schedule, schedule_name

NAME = "tick"


def wanted(name: str = NAME, *, topic: str = TOPIC, body: bytes = b"body", **facts: Any) -> NewSchedule:  # noqa: ANN401
    """A schedule, every second unless something else is said."""
    if not facts.get("cron"):
        facts.setdefault("every_ms", 1_000)
    tag, group = facts.pop("tag", ""), facts.get("message_group", "")
    payload = encode(Message(topic, body, tag=tag, message_group=group, properties={"color": "red"})).payload
    return NewSchedule(name, topic, payload, tag, **facts)


async def add(rig: EmbeddedRig, name: str = NAME, **facts: Any) -> ScheduleStatus:  # noqa: ANN401
    """Make a schedule that is not there."""
    status, is_made = await rig.broker.schedules.add(wanted(name, **facts))
    assert is_made
    return status


async def tick(rig: EmbeddedRig, times: int, every_ms: int = 1_000) -> None:
    """Let time pass a step at a time."""
    for _ in range(times):
        await rig.pass_ms(every_ms)


def occurrences(rig: EmbeddedRig, name: str = NAME, topic: str = TOPIC) -> list[tuple[int, int]]:
    """The number and the due time of each occurrence in the queues of a topic, by number."""
    if topic not in rig.broker.names.topics:
        return []
    found = []
    for _, _, record in queued(rig, topic):
        message = decode(record.payload)
        assert message.message_id == unpack_id(record.message_id)
        assert message.deliver_at_ms == record.deliver_at_ms
        if message.properties.get(SCHEDULE) == name:
            found.append((int(message.properties[OCCURRENCE]), record.deliver_at_ms))
    return sorted(found)


def check_rows(rig: EmbeddedRig) -> dict[str, Phase]:
    """Each schedule has its three rows, and an entry of the timeline if it waits, and nothing else has one."""
    store = rig.store
    rows = {
        letter: {
            schedule_name(key): value for key, value in store.scan(Family.META, *meta_range(letter), limit=100_000).rows
        }
        for letter in (META_SCHEDULE, META_PROGRESS, META_RECURRING)
    }
    names = rows[META_SCHEDULE].keys()
    assert names == rows[META_PROGRESS].keys() == rows[META_RECURRING].keys()
    entries = [
        unpack_id(body_facts(value[WAITING_HEADER_BYTES:])[0])
        for _, value in waiting_rows(store)
        if is_recurring(value)
    ]
    phases = {name: decode_progress(value).phase for name, value in rows[META_PROGRESS].items()}
    assert sorted(entries) == sorted(name for name, phase in phases.items() if phase is Phase.WAITING)
    assert all(
        decode_schedule(value).topic_id in rig.broker.names.topics_by_id for value in rows[META_SCHEDULE].values()
    )
    return phases
