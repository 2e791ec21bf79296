"""Messages of an inner topic that need no replay, by the trails of the daemons that share it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NamedTuple

from dmq.trail.cells import cells_of
from dmq.trail.export.reading import read_events

_FETCHED = "FETCHED"
_ENDED = ("FORWARDED", "RECALLED", "REPLACED", "ABSORBED")


class Spared(NamedTuple):
    """Packed ids of messages that need no replay: those that ended, and those fetched by cells that are not lost."""

    ended: Collection[bytes] = frozenset()
    theirs: Collection[bytes] = frozenset()


def spared_by(trails: Sequence[Path], lost: Collection[str]) -> Spared:
    """Return the messages that need no replay by these trails; ``lost`` are the cells with a lost disk.

    Raise ``ValueError`` for a missing trail or an unreadable file of events, and for a lost cell that no trail has.
    """
    known: set[str] = set()
    for trail in trails:
        if not trail.is_dir():
            raise ValueError(f"there is no trail at {trail}")
        known |= {each.cell for each in cells_of(trail)}
    if unknown := sorted(set(lost) - known):
        raise ValueError(f"no trail has a cell {unknown[0]}; there are: {', '.join(sorted(known)) or 'none'}")
    ended: set[bytes] = set()
    theirs: set[bytes] = set()
    for trail in trails:
        for cell, columns in read_events(trail, (_FETCHED, *_ENDED), ("kind", "message_id")):
            for kind, message_id in zip(columns["kind"], columns["message_id"], strict=True):
                if kind in _ENDED:
                    ended.add(message_id)
                elif cell not in lost:
                    theirs.add(message_id)
    return Spared(ended, theirs)
