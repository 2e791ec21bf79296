"""Operator activities: rows of the meta family, and the JSON text of their audit events.

activity   version 1 | JSON: the fields of ``Activity`` by name, without its number; empty fields are left out
"""

from __future__ import annotations

import json
from enum import StrEnum
from typing import NamedTuple

from dmq.errors import StoreCorrupt

VERSION = 1
_VERSION = bytes((VERSION,))


class CallOutcome(StrEnum):
    """Outcome of an operator's call."""

    BEGUN = "begun"  # it has not ended yet
    DONE = "done"
    REFUSED = "refused"  # nothing was changed
    FAILED = "failed"  # it may have been done partly
    UNKNOWN = "unknown"  # its caller or the daemon vanished before its end: it was done fully, partly or not at all


class Activity(NamedTuple):
    """Call of an operator that changes state: caller, target, reason and outcome. Times are epoch ms."""

    number: int  # 1, 2, 3, ... in a store
    rpc: str
    began_ms: int
    outcome: CallOutcome
    ended_ms: int = 0
    key: str = ""  # access key; empty without access control
    address: str = ""
    topic: str = ""
    group: str = ""
    what: str = ""  # the rest of the request, without bodies
    why: str = ""
    error: str = ""


def encode_activity(activity: Activity) -> bytes:
    """Return the value of an activity's row."""
    return _VERSION + text_of(activity).encode()


def decode_activity(number: int, value: bytes) -> Activity:
    """Decode the value of an activity's row; raise ``StoreCorrupt`` if it is invalid."""
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
    """Return an activity as one line of JSON, without its number."""
    plain = activity._asdict()
    del plain["number"]
    return json.dumps({name: value for name, value in plain.items() if value}, separators=(",", ":"))
