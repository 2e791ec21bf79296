"""Dead letters: their groups, their reasons and errors, one letter, and its redrive."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple
from urllib.parse import urlencode

from dmq.admin import admin_v1 as wire
from dmq.admin.client import AdminClient, CallRefused, NotAllowed, NotFound
from dmq.console.views.screens import (
    PAGE,
    Form,
    Query,
    Screen,
    Values,
    body_in,
    command,
    is_unmasked,
    number_in,
    word_of,
)

COUNTED_MAX: Final = 10_000  # dead letters that one page groups by reason and error, or searches for an error
LETTERS_PER_CALL: Final = 1_000
JOBS_SHOWN: Final = 10


class Choice(NamedTuple):
    """Dead letters of a group that a page is about. ``error`` is a type of error, and narrows a list only."""

    group: str
    reason: str
    topic: str
    error: str | None

    @property
    def filter(self) -> wire.DeadFilter:
        """The filter of a call."""
        reasons = [_reason(self.reason)] if self.reason else []
        return wire.DeadFilter(reasons=reasons, topics=[self.topic] if self.topic else [])

    @property
    def options(self) -> list[str]:
        """The options of ``dmq dead``."""
        reason = ["--reason", self.reason] if self.reason else []
        return [*reason, *(["--topic", self.topic] if self.topic else [])]

    @property
    def query(self) -> dict[str, str]:
        """The parameters of an address."""
        named = {"group": self.group, "reason": self.reason, "topic": self.topic}
        error = {} if self.error is None else {"error": self.error or "none"}
        return {name: value for name, value in named.items() if value} | error


class Cause(NamedTuple):
    """Dead letters with one reason and one type of error."""

    reason: str
    error: str
    letters: int
    first_dead_at_ms: int
    last_dead_at_ms: int
    example: wire.DeadLetter  # the newest


class LetterPage(NamedTuple):
    """Letters, and the offset of the next page; -1 at the end."""

    letters: list[wire.DeadLetter]
    next_offset: int


def choice_in(query: Query) -> Choice:
    """Return the choice of an address. The error ``none`` is that of letters without one."""
    error: str | None = query.get("error", "") or None
    return Choice(
        query.get("group", ""), query.get("reason", ""), query.get("topic", ""), "" if error == "none" else error
    )


def dead_groups(client: AdminClient, query: Query) -> Values:
    """Groups with dead letters, or the dead letters of one group by reason and error."""
    chosen, offset = choice_in(query), number_in(query, "offset")
    values: Values = {"group": chosen.group, "choice": chosen, "jobs": jobs_of(client, chosen.group)}
    if not chosen.group:
        found = [each for each in client.groups(with_removed=True) if each.dead]
        groups = sorted(found, key=lambda each: -each.dead)
        return {**values, "groups": groups, "now_ms": client.now_ms(), "command": command("dead", "groups")}
    page = page_of(client, chosen, offset)
    causes, is_whole = _causes(client, chosen.group) if not offset else ([], True)
    return {
        **values,
        "letters": [(each, word_of(each, "reason")) for each in page.letters],
        "next_offset": page.next_offset,
        "causes": causes,
        "is_whole": is_whole,
        "now_ms": client.now_ms(),
        "command": command("dead", "ls", chosen.group, *chosen.options),
    }


def letter(client: AdminClient, query: Query) -> Values:
    """One dead letter, each of its deaths, and the redrive that was started."""
    group, message_id = query.get("group", ""), query.get("id", "")
    chosen = wire.DeadFilter(message_ids=[message_id])
    found, is_hidden = _deaths(client, group, chosen, unmasked=is_unmasked(query))
    if not found:
        raise NotFound(f"message {message_id} is not a dead letter of group {group}")
    job_id = number_in(query, "job")
    jobs = [each for each in client.jobs(group) if each.job_id == job_id] if job_id else []
    return {
        "group": group,
        "message_id": message_id,
        "deaths": [
            (each, word_of(each, "reason"), body_in(each.content, query) if each.content.HasField("body") else None)
            for each in found
        ],
        "is_hidden": is_hidden,
        "is_dead": any(not each.outcome for each in found),
        "job": jobs[0] if jobs else None,
        "job_state": word_of(jobs[0], "state") if jobs else "",
        "query": query,
        "now_ms": client.now_ms(),
        "command": command("dead", "redrive", group, message_id),
    }


def redrive(client: AdminClient, fields: Query) -> str:
    """Start the redrive of one dead letter; the page of the letter shows its result."""
    group, message_id = fields.get("group", ""), fields.get("id", "")
    if not group or not message_id:
        raise CallRefused("a redrive needs a group and a message id")
    job = client.start_job(wire.REDRIVE, group, wire.DeadFilter(message_ids=[message_id]))
    return "/letter?" + urlencode({"group": group, "id": message_id, "job": job.job_id})


def page_of(client: AdminClient, chosen: Choice, offset: int, limit: int = PAGE) -> LetterPage:
    """Return the next page of a choice that is full, or the rest; at most ``COUNTED_MAX`` letters are searched."""
    found, looked = list[wire.DeadLetter](), 0
    while True:
        size = limit - len(found) if chosen.error is None else LETTERS_PER_CALL
        page = client.dead_letters(chosen.group, chosen.filter, offset=offset, limit=size)
        for each in page.letters:
            if chosen.error is not None and each.failure.error_type != chosen.error:
                continue
            if len(found) == limit:
                return LetterPage(found, each.offset)
            found.append(each)
        looked, offset = looked + max(1, len(page.letters)), page.next_offset
        if offset < 0 or looked >= COUNTED_MAX or (len(found) >= limit and chosen.error is None):
            return LetterPage(found, offset)


def jobs_of(client: AdminClient, group: str) -> list[tuple[wire.Job, str, str]]:
    """Return the newest jobs of a group, or of all, with their kinds and states."""
    try:
        found = client.jobs(group)
    except NotAllowed:
        return []
    return [(each, word_of(each, "kind"), word_of(each, "state")) for each in found[:JOBS_SHOWN]]


def _deaths(
    client: AdminClient, group: str, chosen: wire.DeadFilter, *, unmasked: bool
) -> tuple[list[wire.DeadLetter], bool]:
    """Return the deaths of a message, and whether the key may not read its body."""
    found, offset, with_body = list[wire.DeadLetter](), 0, True
    while offset >= 0:
        try:
            page = client.dead_letters(
                group, chosen, offset=offset, with_outcome=True, with_body=with_body, unmasked=unmasked
            )
        except NotAllowed:
            if not with_body:
                raise
            with_body = unmasked = False
            continue
        found += page.letters
        offset = page.next_offset
    return found, not with_body


def _causes(client: AdminClient, group: str) -> tuple[list[Cause], bool]:
    """Return the causes of the dead letters of a group, the most frequent first, and whether all were counted."""
    causes: dict[tuple[str, str], Cause] = {}
    offset = counted = 0
    while offset >= 0 and counted < COUNTED_MAX:
        page = client.dead_letters(group, wire.DeadFilter(), offset=offset, limit=LETTERS_PER_CALL)
        for each in page.letters:
            key = (word_of(each, "reason"), each.failure.error_type)
            before = causes.get(key)
            first_ms, number = (before.first_dead_at_ms, before.letters) if before else (each.dead_at_ms, 0)
            causes[key] = Cause(*key, number + 1, first_ms, each.dead_at_ms, each)
        counted += max(1, len(page.letters))
        offset = page.next_offset
    return sorted(causes.values(), key=lambda each: -each.letters), offset < 0


def ids_of(client: AdminClient, chosen: Choice, limit: int) -> Iterator[str]:
    """Yield the ids of the first letters of a choice."""
    return (each.message_id for each in page_of(client, chosen, 0, limit).letters)


def _reason(word: str) -> str:
    names = [name.lower() for name in wire.Reason.keys()]  # noqa: SIM118 - an enum of the protocol is no dictionary
    if word not in names:
        raise CallRefused(f"unknown reason {word!r:.40}; expected one of {', '.join(names)}")
    return word.upper()


SCREENS: Final = (
    Screen("/dead", "dead", dead_groups, menu="Dead letters"),
    Screen("/letter", "letter", letter, parent="/dead"),
)
FORMS: Final = (Form("/redrive", redrive, "redriven in the console"),)
