"""``dmq quota``: what access keys and client addresses may have."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from dmq.cli import output as out
from dmq.cli.options import AddressOption, OutputOption, Session, TimeoutOption, session_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dmq.admin import admin_v1 as wire


class Kind(StrEnum):
    """Whose limit it is."""

    KEY = "key"
    ADDRESS = "address"


KindArgument = Annotated[Kind, typer.Argument(metavar="KIND", help="key or address.")]
NameArgument = Annotated[
    str, typer.Argument(metavar="NAME", help="The access key; or an IP address, or loopback for clients on its host.")
]
QuotaArgument = Annotated[
    str,
    typer.Argument(metavar="QUOTA", help="topics, groups, new_per_min, streams, watches, polls, sends_per_s or bytes."),
]


def ls(
    ctx: typer.Context,
    address: AddressOption = None,
    output: OutputOption = None,
    timeout: TimeoutOption = None,
) -> None:
    """List what each key and each address has in use or was given a limit for.

    Topics and groups are those it made since the daemon started; new_per_min counts both.
    """
    session = session_of(ctx, address, output, timeout)
    with session.connect() as client:
        _show(session, client.quotas())


def set_(
    ctx: typer.Context,
    *,
    kind: KindArgument,
    name: NameArgument,
    quota: QuotaArgument,
    limit: Annotated[int, typer.Argument(metavar="LIMIT", min=0, help="The most it may have; 0: nothing.")],
    address: AddressOption = None,
    output: OutputOption = None,
    timeout: TimeoutOption = None,
) -> None:
    """Limit a key or an address. It counts at once and after restarts; what is in use already stays."""
    session = session_of(ctx, address, output, timeout)
    with session.connect() as client:
        _show(session, [client.set_quota(kind.value, name, quota, limit)])


def unset(
    ctx: typer.Context,
    *,
    kind: KindArgument,
    name: NameArgument,
    quota: QuotaArgument,
    address: AddressOption = None,
    output: OutputOption = None,
    timeout: TimeoutOption = None,
) -> None:
    """Go back to the default of a quota."""
    session = session_of(ctx, address, output, timeout)
    with session.connect() as client:
        _show(session, [client.set_quota(kind.value, name, quota, None)])


def _show(session: Session, quotas: Iterable[wire.Quota]) -> None:
    if session.as_json:
        out.show_json([out.to_plain(each) for each in quotas])
        return
    out.show_table(
        ("KIND", "NAME", "QUOTA", "USED", "LIMIT", "SET"),
        [
            (
                *(each.kind, each.name, each.quota, f"{each.used:,}"),
                *(f"{each.limit:,}" if each.HasField("limit") else "none", "yes" if each.is_set else "default"),
            )
            for each in quotas
        ],
        numbers=("USED", "LIMIT"),
    )
