"""Screens of the console: the calls for each page, and the changes that its forms make. By section of the menu:

Messages
    ``overview``      state of the daemon, due times
    ``messages``      messages of a topic, one message
    ``message_jobs``  bulk changes of pending messages
    ``story``         events of a message
    ``retries``       pending retries
    ``letters``       dead letters by reason and error, one letter
    ``jobs``          bulk redrives and purges
Broker
    ``topics``, ``groups``, ``schedules``, ``clients``
Daemon
    ``daemon``        scheduler, store
    ``audit``         audits: the newest report, a new one; the ledger
    ``operators``     activity log, settings, quotas

``screens`` has the values that each module uses. A module of screens has ``SCREENS``, in the order of the menu, and
``FORMS`` if it has any.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import ModuleType
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

_SECTIONS: Final = (
    ("Messages", (overview, messages, message_jobs, story, retries, letters, jobs)),
    ("Broker", (topics, groups, schedules, clients)),
    ("Daemon", (daemon, audit, operators)),
)
_MODULES: Final = tuple(module for _, modules in _SECTIONS for module in modules)
SCREENS: Final[tuple[Screen, ...]] = tuple(screen for module in _MODULES for screen in module.SCREENS)
FORMS: Final[tuple[Form, ...]] = tuple(form for module in _MODULES for form in getattr(module, "FORMS", ()))


class MenuEntry(NamedTuple):
    """A screen in the menu, and the paths on which it is marked."""

    name: str
    path: str
    marked: frozenset[str]


def _menu(modules: Iterable[ModuleType]) -> tuple[MenuEntry, ...]:
    screens = [screen for module in modules for screen in module.SCREENS]
    below = {each.path: frozenset(other.path for other in screens if other.parent == each.path) for each in screens}
    return tuple(MenuEntry(each.menu, each.path, below[each.path] | {each.path}) for each in screens if each.menu)


MENU: Final = tuple((name, _menu(modules)) for name, modules in _SECTIONS)
