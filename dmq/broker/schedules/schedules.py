"""Schedules of recurring messages for operators: create, list, pause, resume, remove. All changes are durable on
return.

A schedule is three rows of the meta family and, while it is active, a timeline entry.
``dmq.broker.schedules.firing`` handles the entry when it is due. Each change here withdraws the entry in the same unit,
so the writer decides between the change and an occurrence. A change that loses reads the schedule again.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

from broker_adapter.contracts.errors import BrokerUnavailable, Overloaded, Refused, Rule
from broker_adapter.contracts.limits import DELIVER_AT_MS_MAX, TOPIC_CHARS_MAX
from broker_adapter.contracts.message import MessageType, pack_id
from broker_adapter.contracts.topics import check_topic
from dmq.broker.io import look_at
from dmq.broker.schedules.cron import (
    EVERY_MS_MIN,
    JITTER_MS_MAX,
    RuleError,
    due_ms,
    next_time,
    read_cron,
    zone_of,
)
from dmq.broker.schedules.firing import changed_event, waiting_record
from dmq.broker.topics import LIMITS_DEFAULT, BrokerPart, ScheduleLimits, SharedParts, Topic
from dmq.errors import StoreCorrupt, UnitRefused
from dmq.runtime.slices import in_slices
from dmq.store import Store
from dmq.store.schema.keys import (
    META_SCHEDULE,
    Family,
    meta_range,
    recurring_scope,
)
from dmq.store.schema.messages.index import Receipt
from dmq.store.schema.messages.record import body_payload, decode_waiting, encode_body
from dmq.store.schema.messages.recurring import (
    CatchUp,
    Phase,
    RecurrenceRule,
    ScheduleProgress,
    decode_message,
    decode_progress,
    decode_schedule,
    encode_message,
    encode_progress,
    encode_schedule,
    schedule_keys,
    schedule_name,
)
from dmq.store.schema.topics.names import GROUPED, PLAIN
from dmq.store.writer.operations import Delete, Emit, Op, Put, Withdraw
from dmq.store.writer.operations import Schedule as ScheduleOp

_TRIES_MAX = 16  # reads of a schedule that fires between two of them
_ROWS_MAX = 1_000_000
_FOLLOWING_SHOWN = 3
_SHOWN_MAX = 10  # names in a refusal
_Result = TypeVar("_Result")


class NewSchedule(NamedTuple):
    """Schedule to create. ``payload`` is a serialized wire message without an id; see ``RecurrenceRule`` for the other
    fields.

    With ``start_after_ms`` or ``end_after_ms`` it starts or ends that long after its creation, or before if negative.
    A repeated request with the same values then counts as the same schedule.
    """

    name: str
    topic: str
    payload: bytes
    tag: str = ""
    every_ms: int = 0
    cron: str = ""
    zone: str = ""
    start_ms: int = 0
    end_ms: int = 0
    count: int = 0  # type: ignore[assignment]  # hides ``tuple.count``, which is not used
    jitter_ms: int = 0
    catch_up: CatchUp = CatchUp.ONE
    message_group: str = ""
    start_after_ms: int | None = None
    end_after_ms: int | None = None

    def made_at(self, topic_id: int, now_ms: int) -> RecurrenceRule:
        """Return the stored form of the schedule, created at ``now_ms``."""
        start_ms = self.start_ms if self.start_after_ms is None else max(1, now_ms + self.start_after_ms)
        end_ms = self.end_ms if self.end_after_ms is None else max(1, now_ms + self.end_after_ms)
        return RecurrenceRule(
            topic_id=topic_id,
            every_ms=self.every_ms,
            cron=self.cron,
            zone=self.zone,
            start_ms=start_ms,
            end_ms=end_ms,
            count=self.count,
            jitter_ms=self.jitter_ms,
            catch_up=self.catch_up,
            message_group=self.message_group,
            created_at_ms=now_ms,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleStatus:
    """Status of a schedule. Times are epoch ms, 0: none. ``next_due_ms`` is the due time of the next occurrence."""

    name: str
    topic: str
    schedule: RecurrenceRule
    progress: ScheduleProgress
    next_due_ms: int
    following_ms: Sequence[int] = ()  # times of the rule after the next one; only from ``show``
    payload: bytes = b""  # only from ``show``


class _Found(NamedTuple):
    schedule: RecurrenceRule
    progress: ScheduleProgress
    body: bytes
    key: bytes  # of its timeline entry; empty: none
    due_ms: int


class Schedules(BrokerPart):
    """Schedules of all topics, on the event loop. ``Refused`` and ``Overloaded`` leave everything unchanged."""

    def __init__(self, shared: SharedParts, limits: ScheduleLimits = LIMITS_DEFAULT) -> None:
        super().__init__(shared)
        self._limits = limits
        self._topics: dict[str, int] = {}  # topic id by schedule name, including schedules under creation
        self._asked_for: Counter[str] = Counter()  # number of ``add`` calls in progress, by name
        self._grouped: set[str] = set()  # names of schedules with a message group
        self._turn = asyncio.Lock()  # changes are few, so they run one at a time
        self._changes: set[asyncio.Task[object]] = set()
        self._load()

    def _load(self) -> None:
        for key, value in self._store.scan(Family.META, *meta_range(META_SCHEDULE), limit=_ROWS_MAX).rows:
            schedule, name = decode_schedule(value), schedule_name(key)
            self._topics[name] = schedule.topic_id
            if schedule.message_group:
                self._grouped.add(name)

    async def close(self) -> None:
        """Wait for changes in progress."""
        await asyncio.gather(*self._changes, return_exceptions=True)

    def is_known(self, name: str) -> bool:
        """Return True if a schedule of this name exists, has ended, or is under creation."""
        return name in self._topics or name in self._asked_for

    def of_topic(self, topic: Topic) -> list[str]:
        """Return the sorted names of a topic's schedules, including those under creation."""
        return sorted(name for name, topic_id in self._topics.items() if topic_id == topic.topic_id)

    def check_none(self, topic: Topic) -> None:
        """Refuse the removal of a topic that has schedules."""
        if found := self.of_topic(topic):
            why = f"schedules send to it: {_shown(found)}; remove them first with 'dmq cron rm'"
            raise Refused(Rule.REQUEST, why, value=topic.name)

    def check_type(self, topic: Topic, message_type: MessageType | None) -> None:
        """Refuse a message type that does not allow the messages of the topic's schedules."""
        wrong = [name for name in self.of_topic(topic) if _type_problem(message_type, is_grouped=name in self._grouped)]
        if wrong:
            assert message_type is not None
            why = f"a topic of type {message_type.name} does not accept the messages of its schedules: {_shown(wrong)}"
            raise Refused(Rule.MESSAGE_TYPE, f"{why}; remove them first", value=topic.name)

    # -- queries ------------------------------------------------------------------------------------------------------

    async def show(self, name: str) -> ScheduleStatus:
        """Return one schedule, with its message and its next times."""
        found = await self._find(check_name(name))
        status = self._status(name, found.schedule, found.progress)
        following: tuple[int, ...] = ()
        if found.progress.phase is Phase.WAITING:
            left = found.schedule.count - found.progress.occurrences - 1 if found.schedule.count else _FOLLOWING_SHOWN
            following = _following(found.schedule, found.progress.next_ms, min(left, _FOLLOWING_SHOWN))
        return replace(status, payload=body_payload(found.body), following_ms=following)

    async def page(self, *, topic: str, token: str, limit: int) -> tuple[list[ScheduleStatus], str]:
        """Return schedules sorted by name after ``token``, and the token of the next page, empty at the end."""
        topic_id = self._catalog.known_topic(topic).topic_id if topic else 0
        names = sorted(name for name, of in self._topics.items() if name > token and topic_id in {0, of})
        wanted = names[:limit]

        def read(store: Store) -> list[bytes | None]:
            return store.get_many(Family.META, [key for name in wanted for key in schedule_keys(name)[:2]])

        values = iter(await self._reader.run(read))
        found: list[ScheduleStatus] = []
        async for name, schedule, progress in in_slices(zip(wanted, values, values, strict=False)):
            if schedule is not None and progress is not None:  # else it is under creation or removed
                found.append(self._status(name, decode_schedule(schedule), decode_progress(progress)))
        return found, wanted[-1] if len(names) > limit else ""

    def _status(self, name: str, schedule: RecurrenceRule, progress: ScheduleProgress) -> ScheduleStatus:
        next_due_ms = due_ms(schedule, name, progress.next_ms) if progress.next_ms else 0
        topic = self._names.topics_by_id[schedule.topic_id].name
        return ScheduleStatus(name=name, topic=topic, schedule=schedule, progress=progress, next_due_ms=next_due_ms)

    async def _find(self, name: str) -> _Found:
        topic_id = self._topics.get(name)
        if topic_id is None:
            raise Refused(Rule.NOT_FOUND, "unknown schedule", value=name)

        def read(store: Store) -> tuple[Receipt | None, bytes | None, list[bytes | None]]:
            # The entry first: if the schedule fires in between, its key is gone, and a unit with that key is refused.
            waiting = store.find(recurring_scope(topic_id), pack_id(name))
            value = store.get_many(Family.TIMELINE, [waiting.key])[0] if waiting is not None else None
            return waiting, value, store.get_many(Family.META, schedule_keys(name))

        waiting, value, (schedule, progress, message) = await self._reader.run(read)
        if schedule is None or progress is None or message is None:
            raise Refused(Rule.NOT_FOUND, "unknown schedule", value=name)
        key = waiting.key if waiting is not None else b""
        due = decode_waiting(value).deliver_at_ms if value is not None else 0  # without a value the key is already gone
        return _Found(decode_schedule(schedule), decode_progress(progress), decode_message(message), key, due)

    # -- changes ------------------------------------------------------------------------------------------------------

    async def add(self, wanted: NewSchedule, *, is_replacing: bool = False) -> tuple[ScheduleStatus, bool]:
        """Create a schedule; return its status, and False if it already existed with the same content.

        A schedule with different content is refused, unless ``is_replacing``. The replacement starts from its
        beginning.
        """
        check_name(wanted.name)
        _check_own(wanted.topic, self._names.is_derived(wanted.topic))
        _check_rule(wanted.made_at(0, self._clock.now_ms()))
        self._asked_for[wanted.name] += 1
        try:
            return await self._change(lambda: self._add(wanted, is_replacing=is_replacing))
        finally:
            self._asked_for[wanted.name] -= 1
            if not self._asked_for[wanted.name]:
                del self._asked_for[wanted.name]

    async def pause(self, name: str) -> ScheduleStatus:
        """Pause a schedule until it is resumed; a paused one stays unchanged."""
        return await self._change(lambda: self._pause(check_name(name)))

    async def resume(self, name: str) -> ScheduleStatus:
        """Resume a paused schedule from now; a schedule that is not paused stays unchanged.

        Occurrences missed during the pause are not sent.
        """
        return await self._change(lambda: self._resume(check_name(name)))

    async def remove(self, name: str) -> ScheduleStatus:
        """Remove a schedule and return its last status. Messages already sent stay."""
        return await self._change(lambda: self._remove(check_name(name)))

    async def _change(self, change: Callable[[], Awaitable[_Result]]) -> _Result:
        """Run a change in turn, and again if the schedule fired first. It completes even if its caller is cancelled."""

        async def run() -> _Result:
            async with self._turn:
                for _ in range(_TRIES_MAX):
                    await self._commits.flush()  # after the flush, all reads are durable
                    try:
                        return await change()
                    except BrokerUnavailable as error:
                        if not isinstance(error.__cause__, UnitRefused):
                            raise
                raise BrokerUnavailable("the schedule changes too often; repeat the call")

        task = asyncio.get_running_loop().create_task(run(), name="dmq-schedules")
        self._changes.add(task)
        task.add_done_callback(self._changes.discard)
        task.add_done_callback(look_at)
        return await asyncio.shield(task)

    async def _add(self, wanted: NewSchedule, *, is_replacing: bool) -> tuple[ScheduleStatus, bool]:
        name, now_ms = wanted.name, self._clock.now_ms()
        before = await self._find(name) if name in self._topics else None
        topic = self._names.topics.get(wanted.topic)
        topic_id = topic.topic_id if topic is not None else 0
        body = encode_body(pack_id(name), wanted.tag.encode(), wanted.message_group.encode(), wanted.payload)
        if before is not None:
            if (wanted.made_at(topic_id, before.schedule.created_at_ms), body) == (before.schedule, before.body):
                return self._status(name, before.schedule, before.progress), False
            if not is_replacing:
                why = "there is one of this name with another content; replace it (--replace), or choose another name"
                raise Refused(Rule.REQUEST, why, value=name)
        if self._store.is_disk_low():
            raise Overloaded("the disk is almost full", limit="disk_low_water_bytes")
        self._check_room(name, topic_id)
        schedule = wanted.made_at(topic_id, now_ms)
        following = _following(schedule, now_ms, 1)
        if not following:
            raise Refused(
                Rule.REQUEST,
                "the schedule has no occurrence within the next nine years",
                value=schedule.cron or name,
            )
        if topic is None:
            await self._catalog.topic(wanted.topic)
        topic = self._catalog.known_topic(wanted.topic)  # no await from here on
        if problem := _type_problem(topic.message_type, is_grouped=bool(wanted.message_group)):
            raise Refused(Rule.MESSAGE_TYPE, problem, value=topic.name)
        schedule = schedule._replace(topic_id=topic.topic_id)
        progress = ScheduleProgress(Phase.WAITING, next_ms=following[0])
        ops: list[Op] = self._withdrawn(name, before) if before is not None else []
        values = encode_schedule(schedule), encode_progress(progress), encode_message(body)
        ops += [Put(Family.META, key, value) for key, value in zip(schedule_keys(name), values, strict=True)]
        ops.append(self._entry(name, schedule, progress, "replaced" if before is not None else "made"))
        changed, more = self._names.plan_first({topic.name: GROUPED if schedule.message_group else PLAIN})
        done = self._commits.submit([*ops, *more])
        known, self._topics[name] = self._topics.get(name), topic.topic_id  # blocks the removal of the topic
        self._names.change_topics(changed)
        try:
            await self._commits.committed(done)
        except BaseException:
            del self._topics[name]
            if known is not None:
                self._topics[name] = known
            raise
        (self._grouped.add if schedule.message_group else self._grouped.discard)(name)
        return self._status(name, schedule, progress), True

    def _check_room(self, name: str, topic_id: int) -> None:
        others = Counter(of for other, of in self._topics.items() if other != name)
        if others.total() >= self._limits.total:
            raise Overloaded("there are too many schedules", limit=f"schedules_max = {self._limits.total}")
        if others[topic_id] >= self._limits.per_topic:
            raise Overloaded(
                "the topic has too many schedules", limit=f"schedules_per_topic_max = {self._limits.per_topic}"
            )

    async def _pause(self, name: str) -> ScheduleStatus:
        found = await self._find(name)
        if found.progress.phase is Phase.ENDED:
            raise Refused(Rule.REQUEST, "the schedule has ended and cannot be paused", value=name)
        if found.progress.phase is Phase.PAUSED:
            return self._status(name, found.schedule, found.progress)
        progress = found.progress._replace(phase=Phase.PAUSED, next_ms=0, why="")
        ops = [*self._withdrawn(name, found), self._kept(name, progress)]
        await self._commits.commit([*ops, Emit(changed_event(found.schedule.topic_id, "paused", name, 0))])
        return self._status(name, found.schedule, progress)

    async def _resume(self, name: str) -> ScheduleStatus:
        schedule, progress, *_ = await self._find(name)
        if progress.phase is Phase.ENDED:
            raise Refused(Rule.REQUEST, "the schedule has ended; replace it to start again", value=name)
        if progress.phase is Phase.WAITING:
            return self._status(name, schedule, progress)
        # Not an earlier time again: the clock may have been set back meanwhile.
        following = _following(schedule, max(self._clock.now_ms(), progress.last_ms), 1)
        progress = progress._replace(
            phase=Phase.WAITING if following else Phase.ENDED, next_ms=following[0] if following else 0, why=""
        )
        ops: list[Op] = [self._kept(name, progress)]
        if following:
            ops.append(self._entry(name, schedule, progress, "resumed"))
        else:
            ops.append(Emit(changed_event(schedule.topic_id, "ended", name, 0)))
        await self._commits.commit(ops)
        return self._status(name, schedule, progress)

    async def _remove(self, name: str) -> ScheduleStatus:
        found = await self._find(name)
        ops = self._withdrawn(name, found)
        ops += [Delete(Family.META, key) for key in schedule_keys(name)]
        await self._commits.commit([*ops, Emit(changed_event(found.schedule.topic_id, "removed", name, 0))])
        del self._topics[name]
        self._grouped.discard(name)
        return self._status(name, found.schedule, found.progress)

    @staticmethod
    def _withdrawn(name: str, found: _Found) -> list[Op]:
        """Return the op that withdraws the timeline entry of an active schedule, else none."""
        if found.progress.phase is not Phase.WAITING:
            return []
        if not found.key:
            raise StoreCorrupt(f"the pending schedule {name!r} has no timeline entry")
        return [Withdraw(found.key, recurring_scope(found.schedule.topic_id), pack_id(name), found.due_ms, 0)]

    @staticmethod
    def _kept(name: str, progress: ScheduleProgress) -> Put:
        return Put(Family.META, schedule_keys(name)[1], encode_progress(progress))

    def _entry(self, name: str, schedule: RecurrenceRule, progress: ScheduleProgress, what: str) -> ScheduleOp:
        at_ms = due_ms(schedule, name, progress.next_ms)
        record = waiting_record(schedule.topic_id, name, schedule.message_group, at_ms, self._clock.now_ms())
        event = changed_event(schedule.topic_id, what, name, progress.next_ms)
        scope = recurring_scope(schedule.topic_id)
        return ScheduleOp(scope, pack_id(name), at_ms, record, event, is_new=True)


def check_name(name: str) -> str:
    """Return ``name`` if it is valid for a schedule: the rule of topic names applies."""
    try:
        if len(name) > TOPIC_CHARS_MAX:
            raise Refused(Rule.REQUEST, "")
        return check_topic(name)
    except Refused as error:
        limit = f"1 to {TOPIC_CHARS_MAX} of a-z, A-Z, 0-9, _, -, % and |"
        raise Refused(Rule.REQUEST, "invalid schedule name", value=name, limit=limit) from error


def _check_own(topic: str, is_derived: bool) -> None:
    if check_topic(topic) and is_derived:
        raise Refused(Rule.TOPIC, "cannot send to a retry or dead-letter topic", value=topic)


def _check_rule(wanted: RecurrenceRule) -> None:
    if bool(wanted.every_ms) == bool(wanted.cron):
        raise Refused(Rule.REQUEST, "a schedule requires either an interval or a cron expression")
    if wanted.every_ms and wanted.zone:
        raise Refused(Rule.REQUEST, "a time zone requires a cron expression", value=wanted.zone)
    for what, value, least, most in (
        ("the interval in ms", wanted.every_ms or EVERY_MS_MIN, EVERY_MS_MIN, DELIVER_AT_MS_MAX),
        ("the start in epoch ms", wanted.start_ms, 0, DELIVER_AT_MS_MAX),
        ("the end in epoch ms", wanted.end_ms, 0, DELIVER_AT_MS_MAX),
        ("the count", wanted.count, 0, 2**53),
        ("the jitter in ms", wanted.jitter_ms, 0, min(wanted.every_ms or JITTER_MS_MAX, JITTER_MS_MAX)),
    ):
        if not least <= value <= most:
            raise Refused(Rule.REQUEST, f"{what} is out of range", value=value, limit=f"{least} to {most}")
    if wanted.end_ms and wanted.end_ms < wanted.start_ms:
        raise Refused(Rule.REQUEST, "the schedule ends before it starts", value=wanted.end_ms)
    try:
        if wanted.cron:
            read_cron(wanted.cron)
            zone_of(wanted.zone)
    except RuleError as error:
        raise Refused(Rule.REQUEST, str(error)) from error


def _following(schedule: RecurrenceRule, after_ms: int, number: int) -> tuple[int, ...]:
    """Return the first ``number`` times of a rule after ``after_ms``, or fewer if the rule ends."""
    found: list[int] = []
    try:
        while len(found) < number and (following := next_time(schedule, after_ms)) is not None:
            found.append(following)
            after_ms = following
    except RuleError:  # a time zone unknown on this host: the schedule comes from another one
        pass
    return tuple(found)


def _type_problem(message_type: MessageType | None, *, is_grouped: bool) -> str:
    """Return why a topic of a type does not allow the messages of a schedule; empty if it does."""
    if message_type is MessageType.TRANSACTION:
        return "a topic of type TRANSACTION accepts only transactions, which a schedule cannot send"
    if message_type is MessageType.FIFO and not is_grouped:
        return "a topic of type FIFO requires a message group"
    if message_type is MessageType.NORMAL and is_grouped:
        return "a topic of type NORMAL does not accept a message group"
    return ""


def check_types(topic: str, types: Sequence[MessageType], *, is_grouped: bool) -> None:
    """Refuse a schedule for a cluster topic that allows none of its messages."""
    problems = [_type_problem(each, is_grouped=is_grouped) for each in types]
    if problems and all(problems):
        raise Refused(Rule.MESSAGE_TYPE, problems[0], value=topic)


def _shown(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN_MAX} more" if len(names) > _SHOWN_MAX else ""
    return ", ".join(names[:_SHOWN_MAX]) + more
