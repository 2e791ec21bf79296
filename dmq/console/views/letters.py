"""Dead letters: their groups, their reasons, one letter, and its redrive."""

from __future__ import annotations

from collections import Counter
from typing import Final
from urllib.parse import urlencode

from dmq.admin import admin_v1 as wire
from dmq.admin.client.client import AdminClient, CallRefused, NotAllowed, NotFound
from dmq.console.views.screens import (
    CALLS_PER_PAGE_MAX,
    PAGE,
    Form,
    Query,
    Screen,
    Values,
    body_in,
    command,
    number_in,
    word_of,
)

COUNTED_MAX: Final = 10_000  # dead letters that one page groups by reason
_LETTERS_PER_CALL: Final = 1_000


def dead_groups(client: AdminClient, query: Query) -> Values:
    """Groups with dead letters, or the dead letters of one group by reason and error."""
    group = query.get("group", "")
    groups = sorted((each for each in client.groups(with_removed=True) if each.dead), key=lambda each: -each.dead)
    if not group:
        return {"groups": groups, "group": "", "command": command("dead", "groups")}
    reason, offset = query.get("reason", ""), number_in(query, "offset")
    chosen = wire.DeadFilter(reasons=[_reason(reason)] if reason else [])
    page = _letters(client, group, chosen, offset)
    counted, is_whole = _by_reason(client, group) if not offset else (Counter[tuple[str, str]](), True)
    return {
        "groups": groups,
        "group": group,
        "letters": [(each, word_of(each, "reason")) for each in page.letters],
        "next_offset": page.next_offset,
        "reasons": counted.most_common(),
        "is_whole": is_whole,
        "reason": reason,
        "now_ms": client.now_ms(),
        "command": command("dead", "ls", group, *(["--reason", reason] if reason else [])),
    }


def letter(client: AdminClient, query: Query) -> Values:
    """One dead letter, each of its deaths, and the redrive that was started."""
    group, message_id = query.get("group", ""), query.get("id", "")
    chosen = wire.DeadFilter(message_ids=[message_id])
    found, is_hidden = _deaths(client, group, chosen)
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


def _letters(client: AdminClient, group: str, chosen: wire.DeadFilter, offset: int) -> wire.ListDeadLettersResponse:
    """Return the next page that is full, or the rest."""
    found = client.dead_letters(group, chosen, offset=offset, limit=PAGE, with_outcome=True)
    for _ in range(CALLS_PER_PAGE_MAX):
        if found.next_offset < 0 or len(found.letters) >= PAGE:
            break
        left = PAGE - len(found.letters)
        page = client.dead_letters(group, chosen, offset=found.next_offset, limit=left, with_outcome=True)
        found.letters.extend(page.letters)
        found.next_offset = page.next_offset
    return found


def _deaths(client: AdminClient, group: str, chosen: wire.DeadFilter) -> tuple[list[wire.DeadLetter], bool]:
    """Return the deaths of a message, and whether the key may not read its body."""
    found, offset, with_body = list[wire.DeadLetter](), 0, True
    while offset >= 0:
        try:
            page = client.dead_letters(group, chosen, offset=offset, with_outcome=True, with_body=with_body)
        except NotAllowed:
            if not with_body:
                raise
            with_body = False
            continue
        found += page.letters
        offset = page.next_offset
    return found, not with_body


def _by_reason(client: AdminClient, group: str) -> tuple[Counter[tuple[str, str]], bool]:
    """Return the numbers of dead letters by reason and error, and whether all of them were counted."""
    counted, offset = Counter[tuple[str, str]](), 0
    while offset >= 0 and counted.total() < COUNTED_MAX:
        page = client.dead_letters(group, wire.DeadFilter(), offset=offset, limit=_LETTERS_PER_CALL)
        counted.update((word_of(each, "reason"), each.failure.error_type) for each in page.letters)
        offset = page.next_offset
    return counted, offset < 0


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
