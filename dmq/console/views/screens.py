"""Values that each module of screens uses: screens and forms, the parameters of an address, the equivalent command."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from dmq.admin import admin_v1 as wire
from dmq.admin.client import AdminClient, CallRefused
from dmq.console.shown import Body, body_of

PAGE: Final = 50
CALLS_PER_PAGE_MAX: Final = 20  # a call looks at a bounded number of messages, and may find none of those wanted
_EPOCH_MS_MAX: Final = 2**53

Values = dict[str, Any]
Query = Mapping[str, str]
View = Callable[[AdminClient, Query], Values]
Act = Callable[[AdminClient, Query], str]


class Screen(NamedTuple):
    """A page: its address, its template and its figures.

    ``menu`` is its name in the menu. A page without one is below the page ``parent``, which is marked instead. Of a
    live page the block ``part`` is sent once a second.
    """

    path: str
    template: str
    view: View
    menu: str = ""
    parent: str = ""
    is_live: bool = False


class Form(NamedTuple):
    """A change: the address of its form, the calls, and the reason that is recorded unless the person gives another.

    ``act`` returns the address of the page that shows the result.
    """

    path: str
    act: Act
    why: str


def command(*words: str) -> str:
    """Return the command line with the same answer."""
    return shlex.join(["dmq", *words])


def topic_names(client: AdminClient) -> list[str]:
    """Return the names of the topics that the key may read."""
    return [each.name for each in client.topics()]


def body_in(content: wire.Content, query: Query) -> Body | None:
    """Return the body in the form that the parameter ``body`` names, or None if the answer has no body."""
    if not content.HasField("body"):
        return None
    return body_of(content.body, query.get("body", ""), is_plain=content.body_encoding in {"", "IDENTITY"})


def is_unmasked(query: Query) -> bool:
    """Return True if the page shows contents without the masks of the daemon."""
    return query.get("unmasked", "") == "1"


def word_of(found: Any, field: str) -> str:  # noqa: ANN401 - a message of the protocol
    """Return the word of an enum field, such as ``waiting``."""
    number = getattr(found, field)
    name: str = found.DESCRIPTOR.fields_by_name[field].enum_type.values_by_number[number].name
    return name.lower()


def number_in(query: Query, name: str) -> int:
    """Return a whole number of the address, 0 if it has none. Raise ``CallRefused`` for any other text."""
    text = query.get(name, "")
    if not text:
        return 0
    if not (text.isascii() and text.isdigit() and len(text) <= 18):
        raise CallRefused(f"{name}={text!r:.40} is not a whole number")
    return int(text)


def epoch_ms_in(query: Query, name: str) -> int:
    """Return a time of the address in epoch milliseconds, 0 if it has none."""
    return min(number_in(query, name), _EPOCH_MS_MAX)
