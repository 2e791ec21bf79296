"""Shell completion of names: topics and groups of the daemon, and contexts of this user.

The shell waits for the result, so the daemon has one second to answer. Any failure returns no suggestions, because a
prompt cannot show errors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from dmq.admin.client import AdminClient

_TIMEOUT = "1s"


def topics(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return the topics that start with ``incomplete``, without internal topics of the broker."""
    return _named(ctx, incomplete, lambda client: (each.name for each in client.topics() if each.name[0] != "%"))


def groups(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return the consumer groups that start with ``incomplete``."""
    return _named(ctx, incomplete, lambda client: (each.name for each in client.groups()))


def contexts(incomplete: str) -> list[str]:
    """Return the contexts that start with ``incomplete``."""
    from dmq.config.contexts import load

    try:
        return [each for each in sorted(load().by_name) if each.startswith(incomplete)]
    except Exception:  # noqa: BLE001 - as above
        return []


def _named(ctx: typer.Context, incomplete: str, names: Callable[[AdminClient], Iterable[str]]) -> list[str]:
    from dmq.cli.session.options import Session

    given = {**ctx.find_root().params, **{name: value for name, value in ctx.params.items() if value}}
    try:
        session = Session().but(given.get("address"), None, _TIMEOUT, given.get("context"))
        with session.connect() as client:
            return [each for each in names(client) if each.startswith(incomplete)]
    except Exception:  # noqa: BLE001 - as above
        return []
