"""Sends that create a schedule: user properties define it, in the formats of ``dmq cron add``.

=====================  ==============================================================================
``DMQ_SCHEDULE_NAME``  the schedule's name, unique in the daemon
``DMQ_EVERY``          an interval, such as ``5m``; or
``DMQ_CRON``           a cron expression, in the time zone ``DMQ_TIME_ZONE`` (UTC)
``DMQ_START``          not before; RFC 3339, epoch milliseconds, ``+5m`` or ``-1h`` from its creation
``DMQ_END``            not after, in the same formats
``DMQ_COUNT``          total number of occurrences
``DMQ_JITTER``         upper bound of the random delay of each occurrence
``DMQ_CATCH_UP``       after downtime: ``one``, ``all`` or ``skip``
=====================  ==============================================================================

A duration without a unit is in milliseconds here. Applications already send it in this form, and the meaning of an
existing send must not change. Operators' durations need a unit.

Such a send stores no message. It is answered OK once the schedule is durable, or if a schedule with this name and the
same content exists. Occurrences carry the body, tag, keys, message group and other user properties. Each has its own
id.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Final, TypeVar

from broker_adapter.contracts.errors import Overloaded, Refused, Rule
from broker_adapter.contracts.message import SendReceipt
from broker_adapter.contracts.schedules import (
    CATCH_UP,
    COUNT,
    CRON,
    END,
    EVERY,
    JITTER,
    NAME,
    OCCURRENCE,
    PREFIX,
    SCHEDULE,
    SCHEDULE_PROPERTIES,
    START,
    ZONE,
    makes_schedule,
)
from broker_adapter.wire import rocketmq_v2 as wire
from broker_adapter.wire.mapping import NOT_AFTER_MS
from dmq.acl.gate import holders_of
from dmq.acl.quotas import Quota, Quotas
from dmq.broker.schedules import NewSchedule, check_name, largest, sample
from dmq.config.units import After, parse_sent_around, parse_sent_duration
from dmq.rocketmq_server.calls.call import Call
from dmq.rocketmq_server.codec import mapping, validate
from dmq.rocketmq_server.codec.codes import status_of
from dmq.store.schema.messages.recurring import CatchUp
from retry.dead_letter import WRITTEN

AddSchedule = Callable[[NewSchedule], Awaitable[object]]

WAITING_MAX: Final = 64  # changes of schedules are serialized, also those of operators
_COUNT_DIGITS_MAX = 15
_KNOWN = frozenset(
    {*SCHEDULE_PROPERTIES, NOT_AFTER_MS, SCHEDULE, OCCURRENCE}
)  # the last three are refused with a reason
_Read = TypeVar("_Read")


class RecurringCalls:
    """The part of ``MessagingService`` that creates schedules."""

    def __init__(self, add: AddSchedule | None, quotas: Quotas) -> None:
        """``add`` creates a schedule, which is durable on return; ``None`` if the broker has no schedules."""
        self._add = add
        self._quotas = quotas
        self._waiting = 0

    async def send(self, topic: str, messages: Sequence[wire.Message], call: Call) -> wire.SendMessageResponse:
        """Create the schedule that a message defines; the answer is sent once it is durable."""
        if self._waiting >= WAITING_MAX:
            raise Overloaded("sends in flight that make schedules", limit=WAITING_MAX)
        self._waiting += 1
        try:
            await self._made(topic, messages, call)
        except Refused as error:
            position = next(at for at, each in enumerate(messages) if makes_schedule(each.user_properties))
            return mapping.send_refusal(messages, position, status_of(error, call.language))
        finally:
            self._waiting -= 1
        return mapping.send_response([SendReceipt(messages[0].system_properties.message_id, -1, -1)])

    async def _made(self, topic: str, messages: Sequence[wire.Message], call: Call) -> None:
        if self._add is None:
            raise Refused(Rule.UNSUPPORTED, "this broker does not support schedules")
        if len(messages) > 1:
            why = f"a message with {NAME} makes a schedule, and is sent in a request of its own"
            raise Refused(Rule.REQUEST, why, value=len(messages), limit=1)
        try:
            wanted = wanted_of(topic, messages[0])
            holders = holders_of(call.admission)
            self._quotas.about_to_make(Quota.SCHEDULES, holders, wanted.name)
            self._quotas.about_to_make(Quota.TOPICS, holders, topic)
            await self._add(wanted)
        except Refused as error:
            if error.rule is not Rule.REQUEST:
                raise
            raise Refused(Rule.PROPERTY_KEY, error.why, value=error.value, limit=error.limit) from error


def wanted_of(topic: str, message: wire.Message) -> NewSchedule:
    """Return the schedule that the properties of a message define; the message has passed the checks of a send.

    Raises ``Refused`` for an invalid value, and for a message that a schedule cannot send.
    """
    system, properties = message.system_properties, message.user_properties
    name = _name(properties)
    if (EVERY in properties) == (CRON in properties):
        given = "both" if EVERY in properties else "neither"
        raise Refused(Rule.PROPERTY_KEY, f"a schedule requires either {EVERY} or {CRON}", value=given)
    if system.HasField("delivery_timestamp"):
        raise Refused(Rule.DELIVERY_TIME, f"a schedule has no delivery time; use {START}")
    validate.check_undelayed(message)
    sent = sample(
        topic,
        message.body,
        tag=system.tag,
        keys=system.keys,
        message_group=system.message_group,
        encoding=system.body_encoding or wire.IDENTITY,
        properties={key: value for key, value in properties.items() if key not in {*SCHEDULE_PROPERTIES, *WRITTEN}},
    )
    validate.check_recurring(largest(sent, name))
    start_ms, start_after_ms = _instant(properties, START)
    end_ms, end_after_ms = _instant(properties, END)
    return NewSchedule(
        name,
        topic,
        sent.SerializeToString(deterministic=True),
        system.tag,
        every_ms=_duration_ms(properties, EVERY),
        cron=_text(properties, CRON),
        zone=properties.get(ZONE, ""),
        start_ms=start_ms,
        end_ms=end_ms,
        count=_count(properties),
        jitter_ms=_duration_ms(properties, JITTER),
        catch_up=_catch_up(properties),
        message_group=system.message_group,
        start_after_ms=start_after_ms,
        end_after_ms=end_after_ms,
    )


def _name(properties: Mapping[str, str]) -> str:
    if NAME not in properties:
        given = next(each for each in SCHEDULE_PROPERTIES if each in properties)
        raise Refused(Rule.PROPERTY_KEY, f"property {given} requires {NAME}", value=given)
    for each in properties:
        if each.startswith(PREFIX) and each not in _KNOWN:
            allowed = ", ".join(SCHEDULE_PROPERTIES)
            raise Refused(Rule.PROPERTY_KEY, "unknown property of a schedule", value=each, limit=allowed)
    return check_name(properties[NAME])


def _text(properties: Mapping[str, str], name: str) -> str:
    text = properties.get(name, "")
    if name in properties and not text:
        raise Refused(Rule.PROPERTY_KEY, f"property {name} is empty")
    return text


def _duration_ms(properties: Mapping[str, str], name: str) -> int:
    if name not in properties:
        return 0
    duration_ms = _read(properties, name, parse_sent_duration)
    if not duration_ms:
        raise Refused(Rule.PROPERTY_KEY, f"property {name}: more than 0 is expected", value=properties[name])
    return duration_ms


def _instant(properties: Mapping[str, str], name: str) -> tuple[int, int | None]:
    """Return the epoch ms of an absolute time, or the delay in ms relative to the schedule's creation."""
    if name not in properties:
        return 0, None
    found = _read(properties, name, parse_sent_around)
    return (0, found.delay_ms) if isinstance(found, After) else (found.epoch_ms, None)


def _count(properties: Mapping[str, str]) -> int:
    text = properties.get(COUNT, "0")
    if not (text.isascii() and text.isdigit() and len(text) <= _COUNT_DIGITS_MAX):
        why = f"property {COUNT}: a whole number of at most {_COUNT_DIGITS_MAX} digits is expected"
        raise Refused(Rule.PROPERTY_KEY, why, value=text)
    return int(text)


def _catch_up(properties: Mapping[str, str]) -> CatchUp:
    text = properties.get(CATCH_UP, "one")
    if text.upper() not in CatchUp.__members__:
        raise Refused(
            Rule.PROPERTY_KEY, f"property {CATCH_UP}: expected one, all or skip", value=text, limit="one, all, skip"
        )
    return CatchUp[text.upper()]


def _read(properties: Mapping[str, str], name: str, read: Callable[[str], _Read]) -> _Read:
    try:
        return read(properties[name])
    except ValueError as error:
        raise Refused(Rule.PROPERTY_KEY, f"property {name}: {error}", value=properties[name]) from error
