"""Audit trails for measuring: millions of events of one daemon in the real format, made of numpy arrays.

One message is scheduled, delivered and acked; a quarter goes to its queue at once; of some a group fails the first
attempt, and of those one in twenty ends as a dead letter. About 2.8 events a message. Nothing is wrong with the
trail, so an audit that says anything else than "clean" has found a fault of its own.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from bench.trail_files import CELL, EVENT_SCHEMA, PROGRESS_SCHEMA, QUEUES_SCHEMA, Column, Writer, sum_of

ROWS_PER_FILE = 250_000
EVENTS_PER_MESSAGE = 2.81
_PER_S = 500  # messages a second of the trail's own time
_TOPICS, _QUEUES, _LANE = 8, 8, -1
_START_MS = 1_795_219_200_000  # 2026-11-21 00:00 UTC
_HOUR_MS = 3_600_000
_EPOCH_2021_S = 1_609_459_200
_SCHEDULED, _QUEUED, _DELIVERED, _ACKED, _NACKED, _RETRIED, _ACKED_AGAIN, _DEAD = range(8)
_KINDS = ("SCHEDULED", "QUEUED", "DELIVERED", "ACKED", "NACKED", "RETRIED", "ACKED", "DEAD_EXHAUSTED")
_KEPT = _KINDS[:6] + _KINDS[7:]

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


class Made(NamedTuple):
    """What a trail holds."""

    events: int
    messages: int
    scheduled: int
    fired: int
    bytes: int


@dataclass(slots=True)
class _Messages:
    """One value per message; times that never come are beyond ``end_ms``."""

    accepted_ms: Ints
    due_ms: Ints
    fired_ms: Ints
    done_ms: Ints  # acked or failed
    again_ms: Ints  # the copy is visible
    ended_ms: Ints  # acked in the lane, or dead
    topic: Ints
    queue: Ints
    offset: Ints
    lane_offset: Ints
    letter: Ints
    copy_entry: Ints
    is_immediate: Bools
    is_failed: Bools
    is_dead: Bools
    end_ms: int

    def __len__(self) -> int:
        return len(self.accepted_ms)


def make_trail(path: Path, events: int, *, seed: int = 1) -> Made:
    """Write a trail of about ``events`` events in ``path``, which must not be there yet."""
    count = int(events / EVENTS_PER_MESSAGE)
    messages = _draw(count, np.random.default_rng(seed))
    stages = (
        (_SCHEDULED, messages.accepted_ms, ~messages.is_immediate),
        (_QUEUED, messages.fired_ms, messages.is_immediate),
        (_DELIVERED, messages.fired_ms, ~messages.is_immediate),
        (_ACKED, messages.done_ms, ~messages.is_failed),
        (_NACKED, messages.done_ms, messages.is_failed),
        (_RETRIED, messages.again_ms, messages.is_failed),
        (_ACKED_AGAIN, messages.ended_ms, messages.is_failed & ~messages.is_dead),
        (_DEAD, messages.ended_ms, messages.is_dead),
    )
    keys, who = [], []
    for stage, at_ms, is_there in stages:
        index = np.flatnonzero(is_there & (at_ms < messages.end_ms))
        who.append(index.astype(np.int32))
        keys.append((at_ms[index] - _START_MS) << 3 | stage)
    key, index = np.concatenate(keys), np.concatenate(who)
    del keys, who
    order = np.argsort(key, kind="stable")
    writer = Writer(path)
    writer.add(_head(), _START_MS)
    for begin, end in _slices(key, order):
        taken = order[begin:end]
        part = key[taken]
        writer.add(_columns(messages, index[taken], part & 7, (part >> 3) + _START_MS))
    writer.close(messages.end_ms)
    _write_snapshot(path, messages, writer.sequence, messages.end_ms)
    fired = int((messages.fired_ms < messages.end_ms).sum())
    return Made(writer.sequence, count, int((~messages.is_immediate).sum()), fired, writer.bytes)


def _draw(count: int, random: np.random.Generator) -> _Messages:
    never = np.int64(1 << 60)
    span_ms = max(count * 1000 // _PER_S, 60_000)
    accepted = np.sort(random.integers(1, span_ms, count)) + _START_MS
    is_immediate = random.random(count) < 0.25
    due = accepted + 1 + random.integers(0, min(600_000, span_ms // 4), count)
    fired = np.where(is_immediate, accepted, due + random.exponential(3, count).astype(np.int64))
    is_failed = random.random(count) < 0.03
    is_dead = is_failed & (random.random(count) < 0.05)
    done = fired + 1 + random.integers(0, 500, count)
    again = np.where(is_failed, done + 10_001, never)
    ended = np.where(is_failed, again + 1 + random.integers(0, 500, count), never)
    end = _START_MS + span_ms + span_ms // 5
    topic = random.integers(0, _TOPICS, count)
    queue = random.integers(0, _QUEUES, count)
    copies = np.cumsum(is_failed) + count
    return _Messages(
        accepted,
        due,
        fired,
        done,
        again,
        ended,
        topic,
        queue,
        _ranks(topic * _QUEUES + queue, fired, np.ones(count, np.bool_)),
        _ranks(topic, again, is_failed),
        _ranks(topic, ended, is_dead),
        copies,
        is_immediate,
        is_failed,
        is_dead,
        end,
    )


def _ranks(owner: Ints, at_ms: Ints, is_in: Bools) -> Ints:
    """Return the offset of each message in its queue: queues are filled in the order of time."""
    index = np.flatnonzero(is_in)
    order = index[np.lexsort((index, at_ms[index], owner[index]))]
    sorted_owner = owner[order]
    starts = np.searchsorted(sorted_owner, sorted_owner, side="left")
    ranks = np.zeros(len(owner), np.int64)
    ranks[order] = np.arange(len(order)) - starts
    return ranks


def _slices(key: Ints, order: Ints) -> Iterator[tuple[int, int]]:
    """Yield the parts of the events that make a file each: of one hour, and not too many."""
    hours = np.searchsorted((key[order] >> 3) // _HOUR_MS, np.arange(0, int((key.max() >> 3) // _HOUR_MS) + 2))
    for begin, end in itertools.pairwise(hours):
        for at in range(int(begin), int(end), ROWS_PER_FILE):
            yield at, min(at + ROWS_PER_FILE, int(end))


def _head() -> dict[str, Column]:
    """The beginning of the trail: the run, names, who reads what."""
    rows: list[dict[str, Any]] = [{"kind": "OPENED"}]
    for number in range(_TOPICS):
        rows += [{"kind": "TOPIC_CREATED", "topic": f"topic-{number}"}]
        rows += [{"kind": "GROUP_CREATED", "group": f"group-{number}"}]
        place = {"kind": "SUBSCRIBED", "topic": f"topic-{number}", "group": f"group-{number}", "queue_offset": 0}
        rows += [place | {"queue_id": queue} for queue in range(_QUEUES)]
    names = [name for name in EVENT_SCHEMA.names if name not in {"sequence", "boot"}]
    whole = [dict.fromkeys(names) | {"at_ms": _START_MS, "attempt": 0} | row for row in rows]
    return {name: pa.array([row[name] for row in whole], EVENT_SCHEMA.field(name).type) for name in names}


def _columns(
    messages: _Messages, index: npt.NDArray[np.signedinteger[Any]], stage: Ints, at_ms: Ints
) -> dict[str, Column]:
    is_group = stage >= _ACKED
    is_copy = stage >= _NACKED
    is_lane = stage >= _RETRIED
    topic = messages.topic[index]
    offset = np.where(is_lane, messages.lane_offset[index], messages.offset[index])
    due = np.where(is_copy, messages.again_ms[index] - 1, messages.due_ms[index])
    has_due = np.isin(stage, (_SCHEDULED, _DELIVERED, _NACKED, _RETRIED))
    return {
        "kind": _names(np.minimum(stage, 6) - (stage == _ACKED_AGAIN) * 3, _KEPT),
        "at_ms": pa.array(at_ms),
        "topic": _names(topic, [f"topic-{number}" for number in range(_TOPICS)]),
        "group": _names(topic, [f"group-{number}" for number in range(_TOPICS)], ~is_group),
        "queue_id": pa.array(
            np.where(is_lane, _LANE, messages.queue[index]).astype(np.int32), mask=stage == _SCHEDULED
        ),
        "queue_offset": pa.array(offset, mask=np.isin(stage, (_SCHEDULED, _NACKED, _DEAD))),
        "attempt": pa.array((is_group.astype(np.int32) + is_lane).astype(np.int32)),
        "due_ms": pa.array(due, mask=~has_due),
        "detail": pa.array(messages.letter[index], mask=stage != _DEAD),
        "entry": pa.array(np.where(is_copy, messages.copy_entry[index], index + 1).astype(np.int64)),
        "message_id": _ids(messages, index),
    }


def _names(index: Ints, names: Any, is_null: Bools | None = None) -> Column:  # noqa: ANN401 - a sequence of names
    codes: Any = pa.array(index.astype(np.int32), mask=is_null)
    return pa.DictionaryArray.from_arrays(codes, pa.array(list(names))).cast(pa.string())


def _ids(messages: _Messages, index: npt.NDArray[np.signedinteger[Any]]) -> Column:
    """The clients' layout: 01, 6 bytes of a host, 2 of a process, seconds since 2021, a number."""
    content = np.zeros((len(index), 17), np.uint8)
    content[:, :9] = np.frombuffer(bytes.fromhex("0102427fac11d21a2b"), np.uint8)
    seconds = (messages.accepted_ms[index] // 1000 - _EPOCH_2021_S).astype(">u4")
    content[:, 9:13] = seconds.view(np.uint8).reshape(-1, 4)
    content[:, 13:] = index.astype(">u4").view(np.uint8).reshape(-1, 4)
    offsets = np.arange(0, 17 * len(index) + 1, 17, dtype=np.int32)
    buffers: Any = [None, pa.py_buffer(offsets.tobytes()), pa.py_buffer(content.tobytes())]
    return pa.Array.from_buffers(pa.binary(), len(index), buffers)


def _write_snapshot(trail: Path, messages: _Messages, sequence: int, at_ms: int) -> None:
    path = trail / "snapshots" / f"cell={CELL}" / f"{sequence:020}"
    path.mkdir(parents=True)
    queues, progress = _queues(messages)
    tables = {"entries": _entries(messages), "queues": queues, "progress": progress}
    for name, table in tables.items():
        pq.write_table(table, path / f"{name}.parquet", compression="zstd")
    head: dict[str, Any] = {"version": 1, "cell": CELL, "sequence": sequence, "boot": 1, "taken_ms": at_ms}
    head |= {name: table.num_rows for name, table in tables.items()}
    head["files"] = {f"{name}.parquet": sum_of(path / f"{name}.parquet") for name in tables}
    (path / "manifest.json").write_text(json.dumps(head) + "\n", encoding="utf-8")


def _entries(messages: _Messages) -> pa.Table:
    end = messages.end_ms
    waiting = np.flatnonzero(~messages.is_immediate & (messages.fired_ms >= end))
    copies = np.flatnonzero(messages.is_failed & (messages.done_ms < end) & (messages.again_ms >= end))
    index = np.concatenate([waiting, copies]).astype(np.int32)
    is_copy = np.arange(len(index)) >= len(waiting)
    topics, groups = ([f"{name}-{number}" for number in range(_TOPICS)] for name in ("topic", "group"))
    return pa.table(
        {
            "entry": pa.array(np.where(is_copy, messages.copy_entry[index], index + 1).astype(np.int64)),
            "kind": _names(is_copy.astype(np.int64), ("DELAYED", "RETRY")),
            "topic": _names(messages.topic[index], topics),
            "group": _names(messages.topic[index], groups, ~is_copy),
            "message_id": _ids(messages, index),
            "due_ms": pa.array(np.where(is_copy, messages.again_ms[index] - 1, messages.due_ms[index])),
            "attempt": pa.array(is_copy.astype(np.int32)),
            "accepted_at_ms": pa.array(messages.accepted_ms[index]),
            "is_stranded": pa.array(np.zeros(len(index), np.bool_)),
        }
    )


def _queues(messages: _Messages) -> tuple[pa.Table, pa.Table]:
    """Return what is in each queue and lane, and how far each group is."""
    queues: list[dict[str, Any]] = []
    progress: list[dict[str, Any]] = []
    end = messages.end_ms
    for topic in range(_TOPICS):
        of_topic = messages.topic == topic
        name, group = f"topic-{topic}", f"group-{topic}"
        for queue in range(_QUEUES):
            index = np.flatnonzero(of_topic & (messages.queue == queue) & (messages.fired_ms < end))
            finished = messages.offset[index][messages.done_ms[index] < end]
            queues.append(_queue(name, None, queue, len(index)))
            progress.append(_progress(name, group, queue, len(index), finished))
        index = np.flatnonzero(of_topic & messages.is_failed & (messages.again_ms < end))
        finished = messages.lane_offset[index][messages.ended_ms[index] < end]
        queues.append(_queue(name, group, _LANE, len(index)))
        progress.append(_progress(name, group, _LANE, len(index), finished))
        letters = int((of_topic & messages.is_dead & (messages.ended_ms < end)).sum())
        queues.append(_queue(f"%DLQ%{group}", None, 0, letters))
    return pa.Table.from_pylist(queues, schema=QUEUES_SCHEMA), pa.Table.from_pylist(progress, schema=PROGRESS_SCHEMA)


def _queue(topic: str, group: str | None, queue: int, end: int) -> dict[str, Any]:
    return {"topic": topic, "group": group, "queue_id": queue, "first_offset": 0, "end_offset": end}


def _progress(topic: str, group: str, queue: int, end: int, finished: Ints) -> dict[str, Any]:
    is_open = np.ones(end + 1, np.bool_)
    is_open[finished] = False
    floor = int(np.argmax(is_open))
    done = np.flatnonzero(~is_open[floor:]) + floor
    place = {"topic": topic, "group": group, "queue_id": queue}
    return place | {"floor": floor, "done": done.tolist(), "hidden": [], "cursor": end}
