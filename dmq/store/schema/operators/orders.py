"""Operator orders that resume after a restart: rows of the meta family.

procedure  version 1 | JSON: first and end, lists of offsets per queue, of a reset only
job        JSON: the fields of ``Job`` by name
"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any, NamedTuple, TypeVar

from dmq.errors import StoreCorrupt
from dmq.store.schema.keys import procedure_key
from retry.dead_letter import DeadFilter, Job, JobKind, JobState
from retry.policy import Reason

VERSION = 1
_VERSION = bytes((VERSION,))
_Kind = TypeVar("_Kind")


class Procedure(NamedTuple):
    """Removal of a topic (group id 0) or a group (topic id 0), or a reset of the group on the topic.

    A reset moves the group's position on each queue to ``first``; the topic's queues ended at ``end``.
    """

    topic_id: int
    group_id: int
    first: tuple[int, ...] = ()
    end: tuple[int, ...] = ()

    @property
    def key(self) -> bytes:
        """Key of the procedure's row."""
        return procedure_key(self.topic_id, self.group_id)


def encode_procedure(procedure: Procedure) -> bytes:
    """Return the value of a procedure's row."""
    plain = {"first": procedure.first, "end": procedure.end} if procedure.first else {}
    return _VERSION + json.dumps(plain).encode()


def decode_procedure(key: bytes, value: bytes) -> Procedure:
    """Decode a procedure's row; raise ``StoreCorrupt`` if it is invalid."""
    try:
        if value[:1] != _VERSION:
            raise ValueError("unknown version")
        plain = json.loads(value[1:])
        first, end = tuple(plain.get("first", ())), tuple(plain.get("end", ()))
        return Procedure(int.from_bytes(key[1:5], "big"), int.from_bytes(key[5:9], "big"), first, end)
    except (ValueError, TypeError, AttributeError) as error:
        raise StoreCorrupt(f"procedure {key[1:].hex()} cannot be read: {error}") from error


def encode_job(job: Job) -> bytes:
    """Return the value of a job's row, as JSON."""
    plain = asdict(job)
    chosen = plain["filter"] | {"reasons": frozenset(reason or 0 for reason in job.filter.reasons)}
    plain["filter"] = {name: sorted(v) if isinstance(v, frozenset) else v for name, v in chosen.items()}
    return json.dumps(plain, separators=(",", ":")).encode()


def decode_job(value: bytes) -> Job:
    """Decode a job's row; raise ``ValueError`` if it is invalid."""
    try:
        plain = json.loads(value)
        return Job(
            job_id=_read(plain, "job_id", int),
            kind=JobKind(plain["kind"]),
            group=_read(plain, "group", str),
            filter=_filter_of(plain["filter"]),
            to_topic=_read(plain, "to_topic", str),
            # A job from before this option resumes with the behaviour of that time.
            all_groups=_read(plain, "all_groups", bool) if "all_groups" in plain else plain["kind"] == JobKind.REDRIVE,
            why=_read(plain, "why", str),
            rate_per_s=_read(plain, "rate_per_s", float, int),
            created_at_ms=_read(plain, "created_at_ms", int),
            first_offset=_read(plain, "first_offset", int),
            next_offset=_read(plain, "next_offset", int),
            end_offset=_read(plain, "end_offset", int),
            done=_read(plain, "done", int),
            passed=_read(plain, "passed", int),
            failed=_read(plain, "failed", int),
            state=JobState(plain["state"]),
        )
    except (TypeError, KeyError, ValueError) as error:
        raise ValueError(f"a job cannot be read: {error!r}") from error


def _filter_of(plain: dict[str, Any]) -> DeadFilter:
    return DeadFilter(
        reasons=frozenset(None if number == 0 else Reason(number) for number in _read(plain, "reasons", list)),
        topics=_texts(plain, "topics"),
        keys=_texts(plain, "keys"),
        message_ids=_texts(plain, "message_ids"),
        since_ms=_read(plain, "since_ms", int),
        until_ms=_read(plain, "until_ms", int),
    )


def _texts(plain: dict[str, Any], name: str) -> frozenset[str]:
    texts = _read(plain, name, list)
    if not all(isinstance(text, str) for text in texts):
        raise TypeError(f"{name} has entries that are not text")
    return frozenset(texts)


def _read(plain: dict[str, Any], name: str, *kinds: type[_Kind]) -> _Kind:
    value: _Kind = plain[name]
    if type(value) not in kinds:  # not isinstance, for which True is an int
        raise TypeError(f"{name} is {value!r:.60}")
    return value
