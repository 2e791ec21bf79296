"""Messages of a topic, and one message."""

from __future__ import annotations

from typing import Final

from dmq.admin import admin_v1 as wire
from dmq.admin.client.client import AdminClient, CallRefused, NotAllowed
from dmq.console.views.screens import (
    CALLS_PER_PAGE_MAX,
    PAGE,
    Query,
    Screen,
    Values,
    body_in,
    command,
    epoch_ms_in,
    topic_names,
    word_of,
)


def messages(client: AdminClient, query: Query) -> Values:
    """A page of the messages of a topic."""
    topic, state = query.get("topic", ""), query.get("state", "")
    values: Values = {"topics": topic_names(client), "query": query, "messages": [], "token": "", "now_ms": 0}
    if not topic:
        return {**values, "command": command("topic", "ls")}
    due_after_ms, due_before_ms = epoch_ms_in(query, "due_after"), epoch_ms_in(query, "due_before")
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
    for _ in range(CALLS_PER_PAGE_MAX):
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
        "messages": [(each, "held" if each.is_held else word_of(each, "state")) for each in found],
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
    groups = [(each, word_of(each, "state")) for each in found.groups]
    return {
        "message": found,
        "state": "held" if found.is_held else word_of(found, "state"),
        "groups": groups,
        "body": body_in(found.content, query) if found.HasField("content") and not is_hidden else None,
        "is_hidden": is_hidden,
        "query": query,
        "now_ms": client.now_ms(),
        "command": command("msg", "get", topic, message_id),
    }


def _state(word: str) -> wire.MessageState:
    states = {"": wire.MESSAGE_STATE_UNSPECIFIED, "waiting": wire.WAITING, "queued": wire.QUEUED}
    if word not in states:
        raise CallRefused(f"unknown state {word!r}; expected waiting or queued")
    return states[word]


SCREENS: Final = (
    Screen("/messages", "messages", messages, menu="Messages"),
    Screen("/message", "message", message, parent="/messages"),
)
