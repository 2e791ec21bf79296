"""What operators changed: rows of the meta family, and the text of the audit event of each.

activity   version 1 | JSON, by the names of the fields of ``Activity`` but its number; empty ones are left out
"""

from __future__ import annotations

import json
from enum import StrEnum
from typing import NamedTuple

from dmq.errors import StoreCorrupt

VERSION = 1
_VERSION = bytes((VERSION,))


class CallOutcome(StrEnum):
    """How a call ended."""

    BEGUN = "begun"  # it has not ended yet
    DONE = "done"
    REFUSED = "refused"  # nothing was changed
    FAILED = "failed"  # a part of it may have been done
    UNKNOWN = "unknown"  # its caller, or the daemon, was gone before its end: it was done, or a part of it, or nothing


class Activity(NamedTuple):
    """A call that changes something: who made it, of what, why, and how it ended. Times are epoch ms."""

    number: int  # 1, 2, 3, ... in a store
    rpc: str
    began_ms: int
    outcome: CallOutcome
    ended_ms: int = 0
    key: str = ""  # the access key; empty where there are none
    address: str = ""
    topic: str = ""
    group: str = ""
    what: str = ""  # the rest of the request, without bodies
    why: str = ""
    error: str = ""


def encode_activity(activity: Activity) -> bytes:
    """Encode the row of an activity."""
    return _VERSION + text_of(activity).encode()


def decode_activity(number: int, value: bytes) -> Activity:
    """Undo ``encode_activity``; ``StoreCorrupt`` if it cannot be one."""
    try:
        if value[:1] != _VERSION:
            raise ValueError("unknown version")
        plain = json.loads(value[1:])
        texts = {
            name: str(plain.get(name, "")) for name in ("key", "address", "topic", "group", "what", "why", "error")
        }
        return Activity(
            number,
            str(plain["rpc"]),
            int(plain["began_ms"]),
            CallOutcome(plain["outcome"]),
            int(plain.get("ended_ms", 0)),
            **texts,
        )
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise StoreCorrupt(f"activity {number} cannot be read: {error}") from error


def text_of(activity: Activity) -> str:
    """Return an activity as JSON on one line, without its number."""
    plain = activity._asdict()
    del plain["number"]
    return json.dumps({name: value for name, value in plain.items() if value}, separators=(",", ":"))
