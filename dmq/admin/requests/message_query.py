r"""Query of the messages of a topic: one line of terms, for the console, ``dmq msg ls --query`` and the HTTP API.

    state:waiting tag:created due-before:+1h key:"order 4711"

A term is ``NAME:VALUE``; a message has to match all of them. A value with spaces is in double quotes, with ``\"`` for a
quote and ``\\`` for a backslash. An error names the position of its character, from 1, and the valid words.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Final, NamedTuple

from broker_adapter.contracts.errors import Refused, Rule
from broker_adapter.contracts.limits import PROPERTIES_BYTES_MAX
from broker_adapter.contracts.own_keys import check_own_key
from dmq.admin import admin_v1 as wire
from dmq.admin.requests.validate import check_message_id, check_times
from dmq.config.units import After, parse_around
from dmq.store.schema.operators.message_jobs import MessageFilter

QUERY_CHARS_MAX: Final = 2_000
_TIMES: Final = ("+5m", "+1h", "+1d", "-5m", "-1h")

# The values of a name, as far as they can be listed. Times are examples: RFC 3339 and epoch milliseconds are valid too.
_VALUES: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "state": ("waiting", "queued", "held"),
        "id": (),
        "key": (),
        "own-key": (),
        "property": (),
        "tag": (),
        "due-after": _TIMES,
        "due-before": _TIMES,
        "order": ("oldest", "newest"),
    }
)
_NAMES: Final = ", ".join(_VALUES)
_TERM: Final = re.compile(r'(?P<name>[^\s:"]+):(?:"(?P<quoted>(?:[^"\\]|\\["\\])*)"|(?P<plain>[^\s"]*))(?=\s|$)')
_NAME: Final = re.compile(r"[^\s:]*")
_ESCAPED: Final = re.compile(r'\\(["\\])')
_TO_ESCAPE: Final = re.compile(r'["\\]')


class QueryRefused(Refused):
    """A query that is invalid at ``position``, counted from 1."""

    def __init__(self, position: int, why: str) -> None:
        super().__init__(Rule.REQUEST, f"query, position {position}: {why}")
        self.position = position


class _Term(NamedTuple):
    name: str
    value: str
    position: int  # of the value


def resolve(request: wire.ListMessagesRequest, now_ms: int) -> wire.ListMessagesRequest:
    """Return the request with the terms of its query as fields. Raise ``QueryRefused`` if the query is invalid."""
    made = wire.ListMessagesRequest()
    made.CopyFrom(request)
    made.query = ""
    if len(request.query) > QUERY_CHARS_MAX:
        raise QueryRefused(QUERY_CHARS_MAX + 1, f"a query has up to {QUERY_CHARS_MAX} characters")
    fields = {each.name for each, _ in request.ListFields()}
    for term in _terms(request.query):
        for field, value in _SETTERS[term.name](term, now_ms).items():
            if field in fields:
                raise QueryRefused(term.position, f"{term.name} is given twice")
            setattr(made, field, value)
            fields.add(field)
    return made


def check_filter(request: wire.ListMessagesRequest) -> None:
    """Raise ``Refused`` if a field of a resolved request is invalid."""
    if request.state not in {0, wire.WAITING, wire.QUEUED}:
        raise Refused(Rule.REQUEST, "unknown message state", value=int(request.state), limit="WAITING, QUEUED")
    check_times(request.due_after_ms, request.due_before_ms)
    for text in (request.key, request.tag):
        if len(text.encode()) > PROPERTIES_BYTES_MAX:
            raise Refused(Rule.REQUEST, "a key or a tag is too long", limit=f"{PROPERTIES_BYTES_MAX} bytes")
    if request.only_held and request.state == wire.QUEUED:
        raise Refused(Rule.REQUEST, "a queued message is not held", value="only_held", limit="WAITING")
    if request.own_key:
        check_own_key(request.own_key)
    if request.property and "=" not in request.property:
        raise Refused(Rule.REQUEST, "a property is NAME=VALUE", value=request.property[:80])


def filter_of(topic: str, query: str, now_ms: int) -> MessageFilter:
    """Return the filter of pending messages of a query. Raise ``Refused`` for queued messages, which stay unchanged."""
    made = resolve(wire.ListMessagesRequest(topic=topic, query=query), now_ms)
    if made.state == wire.QUEUED:
        raise Refused(Rule.REQUEST, "only pending messages can be changed", value="state:queued", limit="state:waiting")
    check_filter(made)
    if made.message_id:
        check_message_id(made.message_id)
    names = MessageFilter.__dataclass_fields__
    return MessageFilter(**{name: getattr(made, name) for name in names})


def term(name: str, value: str) -> str:
    """Return a term of a query, with quotes if the value needs them."""
    if re.fullmatch(r'[^\s"]+', value):
        return f"{name}:{value}"
    escaped = _TO_ESCAPE.sub(lambda found: "\\" + found[0], value)
    return f'{name}:"{escaped}"'


def completions(text: str) -> list[str]:
    """Return queries that begin with ``text`` and have one more name, or one more value that can be listed."""
    start = max(text.rfind(" "), text.rfind("\t")) + 1
    if text.count('"') % 2:  # inside of a quoted value
        return []
    before, word = text[:start], text[start:]
    name, colon, value = word.partition(":")
    if colon:
        return [f"{before}{name}:{each}" for each in _VALUES.get(name, ()) if each.startswith(value) and each != value]
    used = {each.partition(":")[0] for each in before.split()}
    return [f"{before}{each}:" for each in _VALUES if each.startswith(word) and each not in used]


def _terms(text: str) -> Iterator[_Term]:
    at = 0
    while at < len(text):
        if text[at].isspace():
            at += 1
            continue
        found = _TERM.match(text, at)
        name = found["name"] if found else _NAME.findall(text, at)[0]
        if name not in _VALUES:
            raise QueryRefused(
                at + 1, f"unknown word {name!r:.80}; expected a term NAME:VALUE, with a name of {_NAMES}"
            )
        position = at + len(name) + 2
        if found is None:
            raise QueryRefused(*_unfinished(text, at, name))
        quoted = found["quoted"]
        value = found["plain"] if quoted is None else _ESCAPED.sub(r"\1", quoted)
        if not value:
            raise QueryRefused(position, f"{name} has no value; {_expected(name)}")
        yield _Term(name, value, position)
        at = found.end()


def _unfinished(text: str, at: int, name: str) -> tuple[int, str]:
    """Return the position and the reason of a term that does not match the grammar."""
    rest = text[at + len(name) :]
    if not rest.startswith(":"):
        return at + len(name) + 1, f"a colon is expected after {name}; {_expected(name)}"
    position = at + len(name) + 2
    if rest[1:2] == '"':
        return position, r"the quoted value has no end; \" is a quote in it, and a space follows its end"
    return position + rest[1:].find('"'), "a quote inside of a value; begin the value with it"


def _expected(name: str) -> str:
    if name in _TIME_FIELDS:
        return "expected a time: RFC 3339, epoch milliseconds, +5m or -1h from now"
    values = _VALUES[name]
    return (
        f"expected {', '.join(values[:-1])} or {values[-1]}" if values else f'expected {name}:VALUE or {name}:"A VALUE"'
    )


_Setter = Callable[[_Term, int], Mapping[str, object]]
_TIME_FIELDS: Final = MappingProxyType({"due-after": "due_after_ms", "due-before": "due_before_ms"})


def _word(term: _Term, _: int) -> Mapping[str, object]:
    if term.value not in _VALUES[term.name]:
        raise QueryRefused(term.position, f"unknown {term.name} {term.value!r:.80}; {_expected(term.name)}")
    if term.name == "order":
        return {"newest_first": term.value == "newest"}
    is_held = term.value == "held"
    return {"state": wire.QUEUED if term.value == "queued" else wire.WAITING} | ({"only_held": True} if is_held else {})


def _time(term: _Term, now_ms: int) -> Mapping[str, object]:
    try:
        when = parse_around(term.value)
    except ValueError as error:
        raise QueryRefused(term.position, f"{term.value!r:.80} is not a time: {error}") from None
    at_ms = now_ms + when.delay_ms if isinstance(when, After) else when.epoch_ms
    return {_TIME_FIELDS[term.name]: max(1, at_ms)}


def _text(field: str) -> _Setter:
    return lambda term, _: {field: term.value}


_SETTERS: Final[Mapping[str, _Setter]] = MappingProxyType(
    {
        "state": _word,
        "id": _text("message_id"),
        "key": _text("key"),
        "own-key": _text("own_key"),
        "property": _text("property"),
        "tag": _text("tag"),
        "due-after": _time,
        "due-before": _time,
        "order": _word,
    }
)
