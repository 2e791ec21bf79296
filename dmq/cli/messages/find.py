"""``dmq find``: a message by its id, a key or an indexed user property, in all topics."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from dmq.cli.bulk.progress import Progress
from dmq.cli.messages.msg import state_word
from dmq.cli.nouns import single
from dmq.cli.output import output as out
from dmq.cli.output.errors import CommandFailed, ExitCode, refused
from dmq.cli.session.options import AfterOption, LimitOption, Session, with_session

if TYPE_CHECKING:
    from dmq.admin import admin_v1 as wire
    from dmq.admin.client import AdminClient

app = single()

_PAGE = 100
_CALLS_MAX = 500  # of one command; each call reads a bounded number of rows
_KINDS = ("property", "topic", "retries", "dead")
_PROPERTY, _TOPIC, _RETRIES, _DEAD = range(4)


class Match(NamedTuple):
    """Message at one place. ``at_ms`` is its due time, storage time or death, by its state."""

    state: str
    topic: str
    group: str
    message_id: str
    at_ms: int
    keys: Sequence[str] = ()


class _Place(NamedTuple):
    """Places that are searched by property or key, in the order of these fields; ``token`` continues a search."""

    kind: int  # in _KINDS
    name: str
    token: str = ""

    def __str__(self) -> str:
        return f"{_KINDS[self.kind]}:{self.name}:{self.token}"


class _Page(NamedTuple):
    matches: list[Match]
    next_token: str
    is_building: bool = False


@app.command()
@with_session
def find(
    session: Session,
    *,
    wanted: Annotated[
        str,
        typer.Argument(
            metavar="ID|KEY|NAME=VALUE", help="Message id, own key, message key, or value of an indexed user property."
        ),
    ],
    scan: Annotated[
        bool, typer.Option("--scan", help="Search the message keys even if an index contains the argument.")
    ] = False,
    limit: LimitOption = 50,
    after: AfterOption = "",
) -> None:
    """Find messages in all topics by id, key or indexed property.

    Each topic has an index of ids and own keys, and of the properties that 'dmq topic set --index-property' chose.
    If no index contains the argument, the command searches the message keys: queued and delayed messages, waiting
    retries, then dead letters. A long search ends after 500 calls, and prints the --after option that continues it.
    The exit code is 3 if nothing was found.
    """
    start = _place_of(after) if after else None
    found: list[Match] = []
    following = ""
    with session.connect() as client, Progress("find", quiet=session.as_json) as progress:
        known = sorted((each for each in client.topics() if not each.name.startswith("%")), key=lambda each: each.name)
        topics = [each.name for each in known]
        if start is None:
            for number, topic in enumerate(topics):
                found += _by_index(client, topic, wanted)
                progress.show(topic, done=number, of=len(topics))
        name, equals, _ = wanted.partition("=")
        indexed = [each.name for each in known if equals and name in each.index_properties]
        search = _Search(client, wanted, limit, found, progress)
        if indexed and (start is None or start.kind == _PROPERTY):
            following = search.run((_Place(_PROPERTY, each) for each in indexed), start)
        is_known = bool(found) or (start is not None and start.kind == _PROPERTY)
        start = start if start is not None and start.kind != _PROPERTY else None
        if not following and (scan or not is_known):
            following = search.run(_places(client, topics), start)
        now_ms = client.now_ms()
    if session.as_json:
        out.show_json({"matches": [each._asdict() for each in found], "next": following or None})
    elif found:
        rows = [
            (each.state, each.topic, each.group, each.message_id, out.distance(each.at_ms, now_ms), " ".join(each.keys))
            for each in found
        ]
        out.show_table(("STATE", "TOPIC", "GROUP", "MESSAGE ID", "WHEN", "KEYS"), rows, details=("WHEN", "KEYS"))
        if is_known and not scan:
            out.note("found by an index; --scan searches message keys as well")
    if search.is_building:
        out.note("the index is being built, so older messages may be missing; repeat the command later")
    if following:
        out.note(f"there may be more: --after {following}")
    if not found:
        where = "in what was searched so far" if following else "in any topic, retry or dead letter"
        raise CommandFailed(f"{wanted} was not found {where}", ExitCode.NOT_FOUND)


def _by_index(client: AdminClient, topic: str, wanted: str) -> Iterator[Match]:
    """Yield the message of a topic by its id or own key, with its state for each group."""
    from dmq.admin.client import CallRefused

    for message_id, own_key in ((wanted, ""), ("", wanted)):
        with suppress(CallRefused):  # the text is not a valid id or own key
            message = client.message(topic, message_id, own_key=own_key)
            word = state_word(message)
            if word == "unknown":
                continue
            keys = list(message.content.keys) if message.HasField("content") else []
            at_ms = message.ended_at_ms or message.deliver_at_ms or message.stored_at_ms
            yield Match(word, topic, "", message.message_id, at_ms, keys)
            for each in message.groups:
                yield Match(state_word(each), topic, each.group, message.message_id, each.at_ms, keys)
            return


class _Search:
    """Search of places page by page. It adds matches to ``found``, with at most ``_CALLS_MAX`` calls in all."""

    def __init__(self, client: AdminClient, wanted: str, limit: int, found: list[Match], progress: Progress) -> None:
        self._client = client
        self._wanted = wanted
        self._limit = limit
        self._found = found
        self._progress = progress
        self._calls = 0
        self.is_building = False  # whether an index may lack messages

    def run(self, places: Iterator[_Place], start: _Place | None) -> str:
        """Search the places from ``start`` on, and return where the next command continues; empty at the end."""
        for first in places:
            place = first
            if start is not None and start[:2] > place[:2]:
                continue
            if start is not None and start[:2] == place[:2]:
                place = start
            while True:
                if self._calls == _CALLS_MAX or len(self._found) >= self._limit:
                    return str(place)
                page = _search(self._client, place, self._wanted, min(_PAGE, self._limit - len(self._found)))
                self._calls += 1
                self.is_building |= page.is_building
                self._found += page.matches
                self._progress.show(f"{place.name}, {len(self._found):,} found")
                if not page.next_token:
                    break
                place = place._replace(token=page.next_token)
        return ""


def _places(client: AdminClient, topics: Sequence[str]) -> Iterator[_Place]:
    from dmq.admin.client import NotAllowed

    yield from (_Place(_TOPIC, each) for each in topics)
    with suppress(NotAllowed):  # the access key has rights on topics only
        groups = client.groups(with_removed=True)
        yield from (_Place(_RETRIES, each.name) for each in groups if each.waiting)
        yield from (_Place(_DEAD, each.name) for each in groups)


def _search(client: AdminClient, place: _Place, wanted: str, limit: int) -> _Page:
    from dmq.admin import admin_v1 as wire

    match _KINDS[place.kind]:
        case "property":
            name, _, value = wanted.partition("=")
            answer = client.find_messages(place.name, name, value, place.token, limit)
            matches = [_of_property(place.name, each) for each in answer.messages]
            return _Page(matches, answer.next_token, answer.is_building)
        case "topic":
            request = wire.ListMessagesRequest(topic=place.name, key=wanted, token=place.token, limit=limit)
            messages = client.messages(request)
            return _Page([_of_topic(place.name, each) for each in messages.messages], messages.next_token)
        case "retries":
            waiting = client.retries(place.name, token=place.token, limit=limit)
            retries = [each for each in waiting.retries if wanted in {each.message_id, *each.content.keys}]
            return _Page([_of_retry(each) for each in retries], waiting.next_token)
        case _:
            chosen, offset = wire.DeadFilter(keys=[wanted]), int(place.token or 0)
            letters = client.dead_letters(place.name, chosen, offset=offset, limit=limit)
            following = str(letters.next_offset) if letters.next_offset >= 0 else ""
            return _Page([_of_letter(place.name, each) for each in letters.letters], following)


def _of_property(topic: str, message: wire.FoundMessage) -> Match:
    state = "half" if message.is_half else "held" if message.is_held else state_word(message)
    state = f"{state}, {message.outcome}" if message.outcome else state
    return Match(state, topic, message.group, message.message_id, message.at_ms, list(message.content.keys))


def _of_topic(topic: str, message: wire.ListedMessage) -> Match:
    state = "held" if message.is_held else state_word(message)
    at_ms = message.deliver_at_ms or message.stored_at_ms
    return Match(state, topic, "", message.message_id, at_ms, list(message.content.keys))


def _of_retry(retry: wire.WaitingRetry) -> Match:
    return Match("retrying", retry.topic, retry.group, retry.message_id, retry.due_at_ms, list(retry.content.keys))


def _of_letter(group: str, letter: wire.DeadLetter) -> Match:
    return Match("dead", letter.origin_topic, group, letter.message_id, letter.dead_at_ms, list(letter.keys))


def _place_of(cursor: str) -> _Place:
    kind, _, rest = cursor.partition(":")
    name, colon, token = rest.partition(":")
    if kind not in _KINDS or not name or not colon or (kind == "dead" and token and not token.isdigit()):
        raise refused("a token printed by an earlier 'dmq find' is expected", "--after", given=cursor)
    return _Place(_KINDS.index(kind), name, token)
