"""Options of ``dmq topic`` that say how long a topic keeps its messages, and how that is shown."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from dmq.units import format_duration, format_size, format_time, parse_duration, parse_size

if TYPE_CHECKING:
    from dmq.admin import admin_v1 as wire

_AS_CONFIGURED = -1


class Unread(StrEnum):
    """What becomes of messages past the bounds that a known group has not read."""

    YES = "yes"
    NO = "no"
    DEFAULT = "default"


KeepTimeOption = Annotated[
    str | None, typer.Option("--keep-time", help="How long it keeps messages: 72h, none, or default (as configured).")
]
KeepBytesOption = Annotated[
    str | None, typer.Option("--keep-bytes", help="How many bytes of them: 10GiB, none, or default (as configured).")
]
KeepUnreadOption = Annotated[
    Unread | None,
    typer.Option("--keep-unread", help="Whether what a group has not read stays for all that; no: it is lost."),
]


def keep_change(time: str | None, size: str | None, unread: Unread | None) -> wire.KeepChange | None:
    """Return what was asked for, ``None`` if nothing was; a usage error for what cannot be read."""
    from dmq.admin import admin_v1 as wire

    if time is None and size is None and unread is None:
        return None
    return wire.KeepChange(
        time_ms=_number(time, parse_duration, "--keep-time"),
        size_bytes=_number(size, parse_size, "--keep-bytes"),
        unread=unread.value if unread is not None else "",
    )


def _number(text: str | None, parse: Callable[[str], int], option: str) -> int | None:
    if text is None:
        return None
    if text in {"none", "default"}:
        return 0 if text == "none" else _AS_CONFIGURED
    try:
        number = parse(text)
    except ValueError as error:
        raise typer.BadParameter(f"none, default, or: {error}", param_hint=option) from error
    if not number:
        raise typer.BadParameter("nothing would be kept; none is no bound", param_hint=option)
    return number


def keep_facts(topic: wire.Topic) -> list[tuple[str, str]]:
    """Return what is shown of a topic's retention, and of what it has kept."""
    facts = [
        ("keep time", format_duration(topic.keep_time_ms) if topic.keep_time_ms else "no bound", "time"),
        ("keep bytes", format_size(topic.keep_bytes) if topic.keep_bytes else "no bound", "bytes"),
        ("keep unread", "yes" if topic.keep_unread else "no", "unread"),
    ]
    return [
        ("oldest", format_time(topic.oldest_at_ms) if topic.oldest_at_ms else "-"),
        *((name, value if key in topic.keep_own else f"{value} (default)") for name, value, key in facts),
    ]
