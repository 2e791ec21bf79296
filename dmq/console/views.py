"""Figures of the screens: each function makes the calls for one screen and returns the values of its template."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from dmq.admin import admin_v1 as wire
from dmq.admin.client.client import AdminClient, CallRefused, NotAllowed, NotFound
from dmq.console.shown import Body, body_of

PAGE: Final = 50
COUNTED_MAX: Final = 10_000  # dead letters that one page groups by reason
_LETTERS_PER_CALL: Final = 1_000
_CALLS_PER_PAGE_MAX: Final = 20  # a call looks at a bounded number of messages, and may find none of those wanted
_NOW_MS_MAX: Final = 2**53

Values = dict[str, Any]
Query = Mapping[str, str]
View = Callable[[AdminClient, Query], Values]


class Screen(NamedTuple):
    """A page: its address, its template and its figures."""

    path: str
    template: str
    view: View


class Bar(NamedTuple):
    """A bar of a histogram: its time, its number, and its height in percent."""

    until_ms: int
    entries: int
    height: float


def overview(client: AdminClient, query: Query) -> Values:
    """State of the daemon, its rates, and when entries are due."""
    return {**status_of(client), **due_of(client, "", query.get("span", "hour")), "command": command("status")}


def status_of(client: AdminClient) -> Values:
    """State and figures of the daemon, and the problems that need a person."""
    status = client.status()
    return {"status": status, "state": _word(status, "state"), "problems": problems(status), "now_ms": status.now_ms}


def dead_of(client: AdminClient) -> int:
    """Number of dead letters of all groups."""
    return sum(group.dead for group in client.groups(with_removed=True))


def problems(status: wire.GetStatusResponse) -> list[str]:
    """Return the states that need a person, the worst first."""
    found = [status.state_reason]
    if status.disk.refuses_sends:
        found.append("Sends are refused: the disk is almost full.")
    if status.outbox.lost_rows:
        found.append(f"{status.outbox.lost_rows:,} audit events were lost.")
    if status.outbox.export_error:
        found.append(f"The audit trail is not written: {status.outbox.export_error}")
    if status.HasField("backups") and status.backups.error:
        found.append(f"The last backup failed: {status.backups.error}")
    return [each for each in found if each]


def due_of(client: AdminClient, topic: str, span: str) -> Values:
    """Entries by due time: bars of a minute for the next hour, or of an hour for the next day."""
    try:
        found = client.due_histogram(topic)
    except NotAllowed:
        return {"due": None, "bars": [], "span": span, "topic": topic, "most": 0}
    buckets = found.hours if span == "day" else found.minutes
    later = found.later + sum(each.count for each in found.hours) - sum(each.count for each in buckets)
    most = max([found.overdue, *(each.count for each in buckets)])
    bars = [Bar(each.until_ms, each.count, _height(each.count, most)) for each in buckets]
    overdue = Bar(found.now_ms, found.overdue, _height(found.overdue, most))
    return {
        "due": found,
        "bars": bars,
        "overdue": overdue,
        "later": later,
        "span": "day" if span == "day" else "hour",
        "width_ms": 3_600_000 if span == "day" else 60_000,
        "most": most,
        "topic": topic,
        "now_ms": found.now_ms,
    }


def due(client: AdminClient, query: Query) -> Values:
    """When the entries of one topic, or of all, are due."""
    topic = query.get("topic", "")
    named = [topic] if topic else []
    values = due_of(client, topic, query.get("span", "hour"))
    return {**values, "topics": _topic_names(client), "command": command("ledger", *named)}


def messages(client: AdminClient, query: Query) -> Values:
    """A page of the messages of a topic."""
    topic, state = query.get("topic", ""), query.get("state", "")
    values: Values = {"topics": _topic_names(client), "query": query, "messages": [], "token": "", "now_ms": 0}
    if not topic:
        return {**values, "command": command("topic", "ls")}
    due_after_ms, due_before_ms = _epoch_ms(query, "due_after"), _epoch_ms(query, "due_before")
    request = wire.ListMessagesRequest(
        topic=topic,
        state=_state(state),
        due_after_ms=due_after_ms,
        due_before_ms=due_before_ms,
        key=query.get("key", ""),
        tag=query.get("tag", ""),
        newest_first=query.get("newest") == "1",
        token=query.get("token", ""),
    )
    found = list[wire.ListedMessage]()
    for _ in range(_CALLS_PER_PAGE_MAX):
        request.limit = PAGE - len(found)
        page = client.messages(request)
        found += page.messages
        request.token = page.next_token
        if len(found) == PAGE or not page.next_token:
            break
    options = {"--state": state, "--key": query.get("key", ""), "--tag": query.get("tag", "")}
    options |= {"--due-after": str(due_after_ms or ""), "--due-before": str(due_before_ms or "")}
    given = [part for name, value in options.items() if value for part in (name, value)]
    newest = ["--newest"] if request.newest_first else []
    return {
        **values,
        "messages": [(each, "held" if each.is_held else _word(each, "state")) for each in found],
        "token": request.token,
        "now_ms": client.now_ms(),
        "command": command("msg", "ls", topic, *given, *newest),
    }


def message(client: AdminClient, query: Query) -> Values:
    """One message: its state, that of each group, and its body."""
    topic, message_id = query.get("topic", ""), query.get("id", "")
    try:
        found, is_hidden = client.message(topic, message_id, True), False
    except NotAllowed:  # a key without the right to read bodies may still read the state
        found, is_hidden = client.message(topic, message_id, False), True
    groups = [(each, _word(each, "state")) for each in found.groups]
    return {
        "message": found,
        "state": "held" if found.is_held else _word(found, "state"),
        "groups": groups,
        "body": _body(found.content, query) if found.HasField("content") and not is_hidden else None,
        "is_hidden": is_hidden,
        "query": query,
        "now_ms": client.now_ms(),
        "command": command("msg", "get", topic, message_id),
    }


def dead_groups(client: AdminClient, query: Query) -> Values:
    """Groups with dead letters, or the dead letters of one group by reason and error."""
    group = query.get("group", "")
    groups = sorted((each for each in client.groups(with_removed=True) if each.dead), key=lambda each: -each.dead)
    if not group:
        return {"groups": groups, "group": "", "command": command("dead", "groups")}
    reason, offset = query.get("reason", ""), _number(query, "offset")
    chosen = wire.DeadFilter(reasons=[_reason(reason)] if reason else [])
    page = _letters(client, group, chosen, offset)
    counted, is_whole = _by_reason(client, group) if not offset else (Counter[tuple[str, str]](), True)
    return {
        "groups": groups,
        "group": group,
        "letters": [(each, _word(each, "reason")) for each in page.letters],
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
    job_id = _number(query, "job")
    jobs = [each for each in client.jobs(group) if each.job_id == job_id] if job_id else []
    return {
        "group": group,
        "message_id": message_id,
        "deaths": [
            (each, _word(each, "reason"), _body(each.content, query) if each.content.HasField("body") else None)
            for each in found
        ],
        "is_hidden": is_hidden,
        "is_dead": any(not each.outcome for each in found),
        "job": jobs[0] if jobs else None,
        "job_state": _word(jobs[0], "state") if jobs else "",
        "query": query,
        "now_ms": client.now_ms(),
        "command": command("dead", "redrive", group, message_id),
    }


def topics(client: AdminClient, query: Query) -> Values:  # noqa: ARG001 - the signature of a view
    """All topics."""
    return {"topics": client.topics(), "now_ms": client.now_ms(), "command": command("topic", "ls")}


def topic(client: AdminClient, query: Query) -> Values:
    """One topic: its queues, its readers, and when its messages are due."""
    name = query.get("name", "")
    found = client.topic(name)
    values = due_of(client, "" if name.startswith("%") else name, query.get("span", "hour"))
    return {**values, "found": found, "now_ms": client.now_ms(), "command": command("topic", "show", name)}


def groups(client: AdminClient, query: Query) -> Values:  # noqa: ARG001 - the signature of a view
    """All consumer groups."""
    return {"groups": client.groups(), "now_ms": client.now_ms(), "command": command("group", "ls")}


def group(client: AdminClient, query: Query) -> Values:
    """One consumer group: its lag in each topic and its retry policy."""
    name = query.get("name", "")
    found = client.group(name, True)
    return {"found": found, "now_ms": client.now_ms(), "command": command("group", "show", name)}


SCREENS: Final = (
    Screen("/", "overview", overview),
    Screen("/due", "due", due),
    Screen("/messages", "messages", messages),
    Screen("/message", "message", message),
    Screen("/dead", "dead", dead_groups),
    Screen("/letter", "letter", letter),
    Screen("/topics", "topics", topics),
    Screen("/topic", "topic", topic),
    Screen("/groups", "groups", groups),
    Screen("/group", "group", group),
)


def command(*words: str) -> str:
    """Return the command line with the same answer."""
    return shlex.join(["dmq", *words])


def _letters(client: AdminClient, group: str, chosen: wire.DeadFilter, offset: int) -> wire.ListDeadLettersResponse:
    """Return the next page that is full, or the rest."""
    found = client.dead_letters(group, chosen, offset=offset, limit=PAGE, with_outcome=True)
    for _ in range(_CALLS_PER_PAGE_MAX):
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
        counted.update((_word(each, "reason"), each.failure.error_type) for each in page.letters)
        offset = page.next_offset
    return counted, offset < 0


def _body(content: wire.Content, query: Query) -> Body | None:
    if not content.HasField("body"):
        return None
    return body_of(content.body, query.get("body", ""), is_plain=content.body_encoding in {"", "IDENTITY"})


def _topic_names(client: AdminClient) -> list[str]:
    return [each.name for each in client.topics()]


def _height(count: int, most: int) -> float:
    """Return the height of a bar in percent; a number that is not 0 is always visible."""
    return max(1.5, 100 * count / most) if count else 0


def _word(found: Any, field: str) -> str:  # noqa: ANN401 - a message of the protocol
    number = getattr(found, field)
    name: str = found.DESCRIPTOR.fields_by_name[field].enum_type.values_by_number[number].name
    return name.lower()


def _state(word: str) -> wire.MessageState:
    states = {"": wire.MESSAGE_STATE_UNSPECIFIED, "waiting": wire.WAITING, "queued": wire.QUEUED}
    if word not in states:
        raise CallRefused(f"unknown state {word!r}; expected waiting or queued")
    return states[word]


def _reason(word: str) -> str:
    names = [name.lower() for name in wire.Reason.keys()]  # noqa: SIM118 - an enum of the protocol is no dictionary
    if word not in names:
        raise CallRefused(f"unknown reason {word!r:.40}; expected one of {', '.join(names)}")
    return word.upper()


def _number(query: Query, name: str) -> int:
    text = query.get(name, "")
    if not text:
        return 0
    if not (text.isascii() and text.isdigit() and len(text) <= 18):
        raise CallRefused(f"{name}={text!r:.40} is not a whole number")
    return int(text)


def _epoch_ms(query: Query, name: str) -> int:
    return min(_number(query, name), _NOW_MS_MAX)
