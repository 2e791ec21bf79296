"""``dmq quota``: quotas of access keys and client addresses."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from dmq.cli.nouns import noun
from dmq.cli.output.errors import refusing
from dmq.cli.session.options import Session, with_reason, with_session, with_watch
from dmq.config.units import format_size, parse_size

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dmq.admin import admin_v1 as wire

app = noun("quota")


class QuotaOwnerKind(StrEnum):
    """Kind of quota owner."""

    KEY = "key"
    ADDRESS = "address"


KindArgument = Annotated[QuotaOwnerKind, typer.Argument(metavar="KIND", help="key or address.")]
NameArgument = Annotated[
    str, typer.Argument(metavar="NAME", help="Access key, IP address, or loopback (clients on the daemon's host).")
]
QuotaArgument = Annotated[
    str,
    typer.Argument(
        metavar="QUOTA",
        help="topics, groups, schedules, subscriptions, new_per_min, streams, watches, polls, sends_per_s or bytes.",
    ),
]


@app.command()
@with_watch
@with_session
def ls(session: Session) -> None:
    """List the quotas that are in use or were set, by key and address.

    Topics, groups, schedules and subscriptions count the objects that the key or address created since the daemon
    started. Each topic that a group reads is one subscription. new_per_min counts new topics and groups.
    """
    with session.connect() as client:
        _show(session, client.quotas())


@app.command("set")
@with_reason
def set_(
    session: Session,
    *,
    kind: KindArgument,
    name: NameArgument,
    quota: QuotaArgument,
    limit: Annotated[str, typer.Argument(metavar="LIMIT", help="Maximum; bytes also as 64MiB; 0: nothing allowed.")],
) -> None:
    """Set a quota of an access key or a client address.

    The quota applies at once and survives restarts. Objects in use are not removed.
    """
    with session.connect() as client:
        _show(session, [client.set_quota(kind.value, name, quota, _limit(limit))])


@app.command()
@with_reason
def unset(
    session: Session,
    *,
    kind: KindArgument,
    name: NameArgument,
    quota: QuotaArgument,
) -> None:
    """Reset a quota to its default."""
    with session.connect() as client:
        _show(session, [client.set_quota(kind.value, name, quota, None)])


def _limit(text: str) -> int:
    if text.isascii() and text.isdigit():
        return int(text)
    with refusing("LIMIT", text):
        return parse_size(text)


def _figure(quota: wire.Quota, value: int) -> str:
    return format_size(value) if quota.quota.endswith("bytes") else f"{value:,}"


def _show(session: Session, quotas: Iterable[wire.Quota]) -> None:
    session.show_table(
        quotas,
        ("KIND", "NAME", "QUOTA", "USED", "LIMIT", "SET"),
        [
            (
                *(each.kind, each.name, each.quota, _figure(each, each.used)),
                *(_figure(each, each.limit) if each.HasField("limit") else "none", "yes" if each.is_set else "default"),
            )
            for each in quotas
        ],
        numbers=("USED", "LIMIT"),
    )
