"""Activity log: a row for each call that changes something or reads bodies of messages, written before the call and
completed after it.

The row is durable before the call starts, so the next start finds a call that a kill interrupted and marks its outcome
as unknown. The one audit event of the call, ``OPERATED``, is in the batch that records its outcome.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import Any, Final, NamedTuple, TypeVar

import structlog
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from broker_adapter.contracts.errors import BrokerError, Refused
from dmq.admin import admin_v1 as wire
from dmq.admin.requests import validate
from dmq.admin.requests.mapping import filled
from dmq.errors import DmqError, StoreBusy, StoreError
from dmq.store import Store
from dmq.store.schema.keys import META_ACTIVITY, Family, activity_key, meta_range
from dmq.store.schema.operators.activity import Activity, CallOutcome, decode_activity, encode_activity, text_of
from dmq.store.writer.operations import Delete, Emit, Op, Put
from dmq.trail.events import operated_event

log = structlog.get_logger("dmq.admin")

KEPT: Final = 1_000
READ_AGAIN_S: Final = 60.0  # pages of one reading, and a page that is loaded again, are one activity
_READS_MAX: Final = 1_000
_AGAIN_S: Final = 0.1
_CLOSE_S: Final = 5.0
_ROWS_MAX: Final = 1_000_000
_NAME_CHARS_MAX: Final = 255
_TEXT_CHARS_MAX: Final = 300
_SHOWN_OF_LIST: Final = 3
# Of messages: counted, not shown. Readers of activities do not need the contents, and trails are kept for years.
_OF_MESSAGES: Final = frozenset(
    {"body", "content", "payload", "properties", "messages", "keys", "own_keys", "recall_handles"}
)
_TOLD_ELSEWHERE: Final = frozenset({"topic", "group", "why"})
_Response = TypeVar("_Response", bound=Message)


class AdminCaller(NamedTuple):
    """Caller of an RPC and its reason. ``key`` is empty without access keys."""

    key: str = ""
    address: str = ""
    why: str = ""


class ActivityLog:
    """Newest ``KEPT`` activities of a store, durable. Owned by the event loop."""

    def __init__(self, store: Store) -> None:
        """Raise ``StoreCorrupt`` if a row cannot be read."""
        self._store = store
        found = store.scan(Family.META, *meta_range(META_ACTIVITY), limit=_ROWS_MAX).rows
        read = [decode_activity(int.from_bytes(key[1:], "big"), value) for key, value in found]
        self._by_number = {each.number: each for each in read}
        self._last = max(self._by_number, default=0)
        self._ending: set[asyncio.Task[None]] = set()
        self._read_s: dict[tuple[str, ...], float] = {}  # of the last recorded reading, by caller and subject

    async def settle(self) -> None:
        """Record an outcome for activities that an earlier run began and did not complete.

        It is unknown, except for the backup that a restored store was made by: its copy is complete.
        """
        begun = [each for each in self._by_number.values() if each.outcome is CallOutcome.BEGUN]
        if not begun:
            return
        backups = [each.number for each in begun if each.rpc == "BackUpStore"]
        made_by = backups[0] if self._store.recovery.is_copy and len(backups) == 1 else None
        text = "the daemon ended before it did"
        backup = f"{text}, or this store was restored from this backup"
        await self._write(
            each._replace(outcome=CallOutcome.DONE)
            if each.number == made_by
            else each._replace(outcome=CallOutcome.UNKNOWN, error=backup if each.rpc == "BackUpStore" else text)
            for each in begun
        )

    async def close(self) -> None:
        """Wait for pending records for at most ``_CLOSE_S``; the next run settles the rest."""
        if self._ending:
            await asyncio.wait(self._ending, timeout=_CLOSE_S)

    def newest(self, *, since_ms: int, key: str, before: int) -> Iterator[Activity]:
        """Yield the activities before a number (0: all), newest first."""
        for activity in reversed(self._by_number.values()):
            if activity.began_ms >= since_ms and key in {"", activity.key} and not 0 < before <= activity.number:
                yield activity

    async def list_activity(self, request: wire.ListActivityRequest) -> wire.ListActivityResponse:
        """List a page of the activities, newest first."""
        limit, response = validate.check_limit(request.limit), wire.ListActivityResponse()
        for each in self.newest(since_ms=request.since_ms, key=request.key, before=request.before):
            if len(response.activities) == limit:
                response.next_before = response.activities[-1].number
                break
            times = {"began_at_ms": each.began_ms, "ended_at_ms": each.ended_ms}
            response.activities.append(filled(wire.Activity, each, **times))
        return response

    def is_first_reading(self, caller: AdminCaller, rpc: str, request: Message) -> bool:
        """Return True if a call reads bodies or unmasked contents, and the caller has not read those of the same
        subject within a minute.
        """
        if not _reads_contents(request):
            return False
        now_s, read_s = self._store.clock.monotonic_s(), self._read_s.get(_subject(caller, rpc, request))
        return read_s is None or now_s - read_s >= READ_AGAIN_S

    async def run(
        self,
        caller: AdminCaller,
        rpc: str,
        request: Message,
        call: Callable[[Any], Awaitable[_Response]],
        topic: str = "",
    ) -> _Response:
        """Run a call and record it. ``topic`` is used if the request names none."""
        begun = self._begun(caller, rpc, request, topic)
        try:
            await self._begin(begun)
        except asyncio.CancelledError:
            _ = self._end(begun, CallOutcome.REFUSED, "its caller gave up before it was begun")
            raise
        try:
            response = await call(request)
        except asyncio.CancelledError:
            _ = self._end(begun, CallOutcome.UNKNOWN, "its caller gave up")
            raise
        except Exception as error:
            outcome = CallOutcome.REFUSED if isinstance(error, Refused) else CallOutcome.FAILED
            known = isinstance(error, (DmqError, BrokerError))
            await asyncio.shield(self._end(begun, outcome, str(error) if known else type(error).__name__))
            raise
        await asyncio.shield(self._end(begun, CallOutcome.DONE))
        if _reads_contents(request):
            self._note_reading(_subject(caller, rpc, request))
        return response

    def _note_reading(self, subject: tuple[str, ...]) -> None:
        now_s = self._store.clock.monotonic_s()
        if len(self._read_s) >= _READS_MAX:
            recent = {each: at_s for each, at_s in self._read_s.items() if now_s - at_s < READ_AGAIN_S}
            self._read_s = recent if len(recent) < _READS_MAX else {}
        self._read_s[subject] = now_s

    def _begun(self, caller: AdminCaller, rpc: str, request: Message, topic: str) -> Activity:
        self._last += 1
        subject: Any = getattr(request, "schedule", request)
        return Activity(
            self._last,
            rpc,
            self._store.clock.now_ms(),
            CallOutcome.BEGUN,
            key=caller.key,
            address=caller.address,
            topic=_cut(getattr(subject, "topic", "") or topic, _NAME_CHARS_MAX),
            group=_cut(getattr(subject, "group", ""), _NAME_CHARS_MAX),
            what=_cut(what_of(request), _TEXT_CHARS_MAX),
            why=_cut(caller.why or getattr(subject, "why", ""), _TEXT_CHARS_MAX),
        )

    async def _begin(self, begun: Activity) -> None:
        self._by_number[begun.number] = begun
        ops: list[Op] = [Put(Family.META, activity_key(begun.number), encode_activity(begun))]
        for number in list(self._by_number)[: max(0, len(self._by_number) - KEPT)]:
            if self._by_number[number].outcome is not CallOutcome.BEGUN:  # few: operators' calls are limited
                del self._by_number[number]
                ops.append(Delete(Family.META, activity_key(number)))
        try:
            await self._store.commit_async(ops)
        except StoreError:  # the call was not started
            del self._by_number[begun.number]
            raise

    def _end(self, begun: Activity, outcome: CallOutcome, error: str = "") -> asyncio.Task[None]:
        """Record the outcome of a call, even if its caller is gone."""
        ended = begun._replace(outcome=outcome, error=_cut(error, _TEXT_CHARS_MAX))
        task = asyncio.create_task(self._record(ended))
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)
        return task

    async def _record(self, ended: Activity) -> None:
        while True:
            try:
                await self._write([ended])
            except StoreBusy:
                await asyncio.sleep(_AGAIN_S)
            except StoreError as error:  # the daemon ends; its next run records an unknown outcome
                log.warning("activity_record_failed", number=ended.number, error=str(error))
                return
            else:
                return

    async def _write(self, ended: Iterable[Activity]) -> None:
        now_ms = self._store.clock.now_ms()
        activities = [each._replace(ended_ms=max(now_ms, each.began_ms)) for each in ended]
        ops: list[Op] = []
        for each in activities:
            ops.append(Put(Family.META, activity_key(each.number), encode_activity(each)))
            ops.append(Emit(operated_event(each.number, text_of(each))))
        await self._store.commit_async(ops)
        for each in activities:
            self._by_number[each.number] = each
            told = {name: value for name, value in each._asdict().items() if value}
            log.info("activity_recorded", **{**told, "outcome": str(each.outcome)})


def _reads_contents(request: Message) -> bool:
    return getattr(request, "with_body", False) or getattr(request, "unmasked", False)


def _subject(caller: AdminCaller, rpc: str, request: Message) -> tuple[str, ...]:
    names = ("topic", "group", "message_id", "own_key", "name", "unmasked")
    return caller.key, caller.address, rpc, *(str(getattr(request, name, "")) for name in names)


def what_of(message: Message) -> str:
    """Return a short description of a request, without contents of messages."""
    return " ".join(_parts(message, _TOLD_ELSEWHERE))


def _parts(message: Message, without: frozenset[str] = frozenset()) -> Iterator[str]:
    for field, value in message.ListFields():
        if field.name in without:
            continue
        if field.name in _OF_MESSAGES or field.type == FieldDescriptor.TYPE_BYTES:
            yield f"{field.name}=({len(value)})" if hasattr(value, "__len__") else f"{field.name}=(...)"
        elif field.is_repeated:
            shown = [_cut(str(each), _NAME_CHARS_MAX) for each in value[:_SHOWN_OF_LIST]]
            more = f" and {len(value) - len(shown):,} more" if len(value) > len(shown) else ""
            yield f"{field.name}={','.join(shown)}{more}"
        elif field.type == FieldDescriptor.TYPE_MESSAGE:
            yield f"{field.name}=({' '.join(_parts(value))})"
        elif field.enum_type is not None:
            known = field.enum_type.values_by_number.get(value)
            yield f"{field.name}={known.name if known else value}"
        else:
            yield f"{field.name}={_cut(str(value), _NAME_CHARS_MAX)}"


def _cut(text: str, chars_max: int) -> str:
    """Return the text on one line, cut to ``chars_max``."""
    shown = "".join(each if each.isprintable() else " " for each in text[: chars_max + 1])
    return shown if len(shown) <= chars_max else f"{shown[: chars_max - 3]}..."
