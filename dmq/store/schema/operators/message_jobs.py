"""Bulk changes of pending messages: a row for each job, and one for each message that it selected.

job        version 1 | JSON: the fields of ``MessageJob`` by name
message    sequence 8 | at_ms 8 | outcome 1 | packed message id      outcome 0: the job has not reached it

A message gets its outcome in the batch that changes it. After a kill it has its outcome or is unchanged.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final, NamedTuple

from dmq.errors import StoreCorrupt
from dmq.store.schema.keys import META_JOB_MESSAGE, META_MESSAGE_JOB
from retry.dead_letter import JobState

VERSION: Final = 1
_VERSION: Final = bytes((VERSION,))
_KEY: Final = struct.Struct(">cQQ")
_MESSAGE: Final = struct.Struct(">QQB")
_U64_MAX: Final = 2**64 - 1


class MessageJobKind(StrEnum):
    """Bulk change of pending messages."""

    CANCEL = "cancel"
    FIRE = "fire"
    RESCHEDULE = "reschedule"


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageFilter:
    """Filter for pending messages, with the fields of ``ListMessagesRequest``; an empty field matches all."""

    message_id: str = ""
    due_after_ms: int = 0
    due_before_ms: int = 0  # 0: no end
    key: str = ""
    tag: str = ""
    own_key: str = ""
    property: str = ""  # NAME=VALUE
    only_held: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageJob:
    """A bulk change of pending messages. It is durable and continues after a restart.

    First all matching messages are selected; a restart before the end of that starts the selection again. Then each
    selected message of ``[next_offset, end_offset)`` gets one outcome. The counts are messages: ``done`` were changed.
    ``gone`` were delivered, cancelled or replaced before. ``unchanged`` are pending with their old delivery time.
    """

    job_id: int
    kind: MessageJobKind
    topic: str
    topic_id: int = 0
    query: str = ""  # as it was given
    filter: MessageFilter = MessageFilter()
    deliver_at_ms: int = 0  # of a reschedule to one time
    delay_by_ms: int = 0  # of a reschedule by an offset
    rate_per_s: float = 0.0  # 0: no limit
    created_at_ms: int = 0
    is_selected: bool = False
    next_offset: int = 0
    end_offset: int = 0
    done: int = 0
    gone: int = 0
    unchanged: int = 0
    state: JobState = JobState.RUNNING

    def selected(self, count: int) -> MessageJob:
        """Return the job after the selection of ``count`` messages."""
        return replace(self, is_selected=True, end_offset=count).advanced(0)

    def advanced(self, next_offset: int, *, done: int = 0, gone: int = 0, unchanged: int = 0) -> MessageJob:
        """Return the job after all messages below ``next_offset`` have their outcome."""
        is_done = next_offset >= self.end_offset and self.state is JobState.RUNNING
        return replace(
            self,
            next_offset=next_offset,
            done=self.done + done,
            gone=self.gone + gone,
            unchanged=self.unchanged + unchanged,
            state=JobState.DONE if is_done else self.state,
        )


class JobMessage(NamedTuple):
    """Message that a job selected. ``outcome`` is a ``ChangeOutcome``, or 0 before the job has reached the message."""

    message_id: bytes  # packed
    sequence: int
    outcome: int = 0
    at_ms: int = 0  # of the outcome, as in ``Changed``


def message_job_key(job_id: int) -> bytes:
    """Return the meta key of a bulk change of pending messages."""
    return META_MESSAGE_JOB + job_id.to_bytes(8, "big")


def job_message_key(job_id: int, offset: int) -> bytes:
    """Return the meta key of a message that a job selected."""
    return _KEY.pack(META_JOB_MESSAGE, job_id, offset)


def job_message_offset(key: bytes) -> int:
    """Return the offset in the key of a selected message."""
    offset: int = _KEY.unpack(key)[2]
    return offset


def job_messages_range(job_id: int) -> tuple[bytes, bytes]:
    """Return the range of all messages that a job selected."""
    return job_message_key(job_id, 0), job_message_key(job_id, _U64_MAX)


def encode_message_job(job: MessageJob) -> bytes:
    """Return the value of a job's row."""
    import msgspec  # clients of the admin API lack it, and need the class only

    return _VERSION + msgspec.json.encode(job)


def decode_message_job(value: bytes) -> MessageJob:
    """Decode a job's row; raise ``StoreCorrupt`` if it is invalid."""
    import msgspec

    try:
        if value[:1] != _VERSION:
            raise StoreCorrupt("a job of messages has an unknown version")
        return msgspec.json.decode(value[1:], type=MessageJob)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise StoreCorrupt(f"a job of messages cannot be read: {error}") from error


def encode_job_message(message: JobMessage) -> bytes:
    """Return the value of a selected message's row."""
    return _MESSAGE.pack(message.sequence, message.at_ms, message.outcome) + message.message_id


def decode_job_message(value: bytes) -> JobMessage:
    """Decode a selected message's row; raise ``StoreCorrupt`` if it is invalid."""
    if len(value) <= _MESSAGE.size:
        raise StoreCorrupt(f"a message of a job with {len(value)} bytes")
    sequence, at_ms, outcome = _MESSAGE.unpack_from(value)
    return JobMessage(value[_MESSAGE.size :], sequence, outcome, at_ms)
