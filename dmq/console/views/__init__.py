"""Screens of the console: the calls for each page, and the changes that its forms make.

``screens``   values that each module uses
``overview``  state of the daemon, due times
``messages``  messages of a topic, one message
``story``     events of a message
``retries``   pending retries
``letters``   dead letters by reason and error, one letter
``jobs``      bulk redrives and purges
``message_jobs``  bulk changes of pending messages
``topics``    topics
``groups``    consumer groups
``schedules`` recurring messages
``clients``   clients of the public protocol
``daemon``    scheduler, store
``audit``     audits: the newest report, a new one; the ledger
``operators`` activity log, settings, quotas

A module of screens has ``SCREENS``, in the order of the menu, and ``FORMS`` if it has any. ``SECTIONS`` joins the
modules to the menu.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from dmq.console.views import (
    audit,
    clients,
    daemon,
    groups,
    jobs,
    letters,
    message_jobs,
    messages,
    operators,
    overview,
    retries,
    schedules,
    story,
    topics,
)
from dmq.console.views.overview import dead_of, due_of, status_of
from dmq.console.views.screens import Form, Query, Screen, Values

__all__ = [
    "FORMS",
    "MENU",
    "SCREENS",
    "Form",
    "MenuEntry",
    "Query",
    "Screen",
    "Values",
    "dead_of",
    "due_of",
    "status_of",
]

SECTIONS: Final = (
    (
        "Messages",
        (
            *(*overview.SCREENS, *messages.SCREENS, *message_jobs.SCREENS, *story.SCREENS),
            *(*retries.SCREENS, *letters.SCREENS, *jobs.SCREENS),
        ),
    ),
    ("Broker", (*topics.SCREENS, *groups.SCREENS, *schedules.SCREENS, *clients.SCREENS)),
    ("Daemon", (*daemon.SCREENS, *audit.SCREENS, *operators.SCREENS)),
)
SCREENS: Final = tuple(screen for _, screens in SECTIONS for screen in screens)
FORMS: Final = (
    *messages.FORMS,
    *message_jobs.FORMS,
    *retries.FORMS,
    *letters.FORMS,
    *jobs.FORMS,
    *schedules.FORMS,
    *audit.FORMS,
    *operators.FORMS,
)


class MenuEntry(NamedTuple):
    """A screen in the menu, and the paths on which it is marked."""

    name: str
    path: str
    marked: frozenset[str]


def _menu(screens: tuple[Screen, ...]) -> tuple[MenuEntry, ...]:
    below = {each.path: frozenset(other.path for other in screens if other.parent == each.path) for each in screens}
    return tuple(MenuEntry(each.menu, each.path, below[each.path] | {each.path}) for each in screens if each.menu)


MENU: Final = tuple((name, _menu(screens)) for name, screens in SECTIONS)
