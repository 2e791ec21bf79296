"""Pages of names, which ``ListTopics`` and ``ListGroups`` share."""

from __future__ import annotations

from collections.abc import Iterable
from heapq import nsmallest
from typing import NamedTuple

from dmq.admin.requests import validate


class NamePage(NamedTuple):
    """Names in order, and the token of the next page; empty at the end."""

    names: list[str]
    next_token: str


def page_of(names: Iterable[str], token: str, limit: int) -> NamePage:
    """Return up to ``limit`` distinct names after ``token``; 0 is the largest page."""
    validate.check_token(token)
    limit = validate.check_limit(limit or validate.PAGE_MAX)
    found = nsmallest(limit + 1, {name for name in names if name > token})
    return NamePage(found[:limit], found[limit - 1] if len(found) > limit else "")
