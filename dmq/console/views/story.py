"""Story of one message: its events in the trail, and those that are not exported yet."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from dmq.admin import admin_v1 as wire
from dmq.admin.client import AdminClient, NotAllowed
from dmq.console.views.screens import Query, Screen, Values, command

READ_S_MAX: Final = 20.0  # the id column of each file of the trail is read
_EVENTS_MAX: Final = 500  # shown, the newest
_NOT_FOUND: Final = 3  # exit code of ``explain``

_reading = threading.BoundedSemaphore(2)  # processes that read the trail at the same time


class StoryEvent(NamedTuple):
    """Event of a message. ``is_exported`` is False if only the store has it."""

    sequence: int
    kind: str
    at_ms: int
    group: str
    attempt: int
    due_at_ms: int
    error: str
    client: str
    is_exported: bool = True


def story(client: AdminClient, query: Query) -> Values:
    """The events of a message from the store and from the trail, if the console is on the host of the daemon."""
    topic, message_id = query.get("topic", ""), query.get("id", "")
    found = client.message_events(topic, message_id)
    waiting = [_waiting(each) for each in found.events]
    exported, missing = _exported(client, topic, message_id)
    # An event that was exported between the two reads is in both.
    events = {each.sequence: each for each in (*waiting, *exported)}
    return {
        "topic": topic,
        "message_id": message_id,
        "events": [events[sequence] for sequence in sorted(events)[-_EVENTS_MAX:]],
        "missing": missing if found.is_whole else "Older events are not exported, and were not searched.",
        "now_ms": client.now_ms(),
        "command": command("audit", "explain", message_id),
    }


def _waiting(event: wire.MessageEvent) -> StoryEvent:
    named = (event.sequence, event.kind, event.at_ms, event.group)
    return StoryEvent(*named, event.attempt, event.due_at_ms, event.error, event.client, is_exported=False)


def _exported(client: AdminClient, topic: str, message_id: str) -> tuple[Sequence[StoryEvent], str]:
    """Return the events of the trail, and why some may be missing; empty if none are."""
    try:
        status = client.status()
    except NotAllowed:
        return (), "This access key may not read where the trail is."
    trail = Path(status.outbox.trail)
    if not status.outbox.trail:
        return (), "The daemon writes no trail: only events of the last seconds are known."
    if not (trail / "cells" / f"{status.cell_id}.json").is_file():
        return (), f"The trail is on the host of the daemon, in {trail}. The command reads it there."
    if not (trail / "events").is_dir():
        return (), ""
    with _reading:
        try:
            # A process of its own: pyarrow needs memory, and a large trail time.
            ended = subprocess.run(
                [sys.executable, "-m", "spark_audit", "explain", "--trail", str(trail), "--json", "--", message_id],
                capture_output=True,
                timeout=READ_S_MAX,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return (), f"The trail was not read within {READ_S_MAX:.0f} s. The command has no limit."
    if ended.returncode == _NOT_FOUND:
        return (), ""
    try:
        rows = json.loads(ended.stdout)["events"]
    except (ValueError, KeyError):
        return (), "The trail cannot be read. The command shows the reason."
    return [_row(each) for each in rows if each["cell"] == status.cell_id and each["topic"] == topic], ""


def _row(row: dict[str, Any]) -> StoryEvent:
    named = (row["sequence"], row["kind"], row["at_ms"], row["group"] or "")
    return StoryEvent(*named, row["attempt"], row["due_ms"] or 0, row["error"] or "", row["client"] or "")


SCREENS: Final = (Screen("/story", "story", story, parent="/messages"),)
