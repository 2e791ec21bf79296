"""Which dead letters a command means: its options, the filter they make, and the pages behind it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from dmq.cli.times import After, parse_when
from dmq.units import parse_duration
from retry.policy import Reason

if TYPE_CHECKING:
    from dmq.admin import admin_v1 as wire
    from dmq.admin.client import AdminClient

PAGE = 1_000


class ReasonName(StrEnum):
    """Reasons as operators write them."""

    EXHAUSTED = "exhausted"
    TOO_OLD = "too_old"
    FORWARDED = "forwarded"
    SENT_BACK = "sent_back"
    OPERATOR = "operator"


assert [name.name for name in ReasonName] == [reason.name for reason in Reason]

_TIME = "RFC 3339, epoch milliseconds, or -1h for an hour ago"
ReasonOption = Annotated[
    list[ReasonName] | None,
    typer.Option(
        "--reason",
        metavar="REASON",
        case_sensitive=False,
        help="Dead because of this: exhausted, too_old, forwarded, sent_back or operator; may be repeated.",
    ),
]
TopicOption = Annotated[
    list[str] | None, typer.Option("--topic", metavar="TOPIC", help="Sent to this topic; may be repeated.")
]
KeyOption = Annotated[list[str] | None, typer.Option("--key", metavar="KEY", help="With this key; may be repeated.")]
SinceOption = Annotated[
    str | None, typer.Option("--since", metavar="TIME", help=f"Failed last at this time or later: {_TIME}.")
]
UntilOption = Annotated[str | None, typer.Option("--until", metavar="TIME", help="Failed last before this time.")]
IdsOption = Annotated[
    list[str] | None, typer.Option("--id", metavar="MESSAGE_ID", help="With this message id; may be repeated.")
]


def filter_of(
    client: AdminClient,
    *,
    reason: Sequence[ReasonName] | None = None,
    topic: Sequence[str] | None = None,
    key: Sequence[str] | None = None,
    since: str | None = None,
    until: str | None = None,
    ids: Sequence[str] | None = None,
) -> wire.DeadFilter:
    """Return what the options mean; a usage error for times that are none. ``client`` knows the daemon's clock."""
    from dmq.admin import admin_v1 as wire

    chosen = wire.DeadFilter(
        reasons=[name.name for name in reason or ()],
        topics=topic,
        keys=key,
        message_ids=ids,
        since_ms=_instant_ms(client, since, "--since"),
        until_ms=_instant_ms(client, until, "--until"),
    )
    if chosen.until_ms and chosen.until_ms <= chosen.since_ms:
        raise typer.BadParameter("the span of time ends before it starts", param_hint="--since, --until")
    return chosen


def means_all(chosen: wire.DeadFilter) -> bool:
    """Say whether nothing was chosen."""
    return chosen.ByteSize() == 0


def letters_of(
    client: AdminClient,
    group: str,
    chosen: wire.DeadFilter,
    *,
    limit: int | None = None,
    with_outcome: bool = False,
    with_body: bool = False,
) -> Iterator[wire.DeadLetter]:
    """Give the dead letters that are meant, at most ``limit``, page by page as they are read."""
    offset, left = 0, limit
    while offset >= 0 and left != 0:
        page = client.dead_letters(
            group,
            chosen,
            offset=offset,
            limit=PAGE if left is None else min(PAGE, left),
            with_outcome=with_outcome,
            with_body=with_body,
        )
        yield from page.letters
        offset = page.next_offset
        left = None if left is None else left - len(page.letters)


def _instant_ms(client: AdminClient, text: str | None, option: str) -> int:
    if text is None:
        return 0
    try:
        if text.startswith("-"):
            return max(1, client.status().now_ms - parse_duration(text[1:]))
        instant = parse_when(text)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=option) from error
    if isinstance(instant, After):
        raise typer.BadParameter(f"{text} lies ahead; -{text[1:]} is so long ago", param_hint=option)
    return instant.epoch_ms
