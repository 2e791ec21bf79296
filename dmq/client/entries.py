"""Conversion between the hook's entries and the daemon's messages. Pure.

The body is the payload. The other fields of an entry are user properties with the prefix ``DMQ_``. The message id is
derived from the uid, so that a repeated put is stored once. The *turn* counts how often an entry was put again. Each
turn is a message of its own, with its own id.
"""

from __future__ import annotations

from dataclasses import replace
from hashlib import blake2b
from typing import NamedTuple
from urllib.parse import quote, unquote

from broker_adapter.contracts.limits import TOPIC_CHARS_MAX
from broker_adapter.wire import rocketmq_v2 as wire
from broker_adapter.wire.mapping import set_timestamp
from retry.dead_letter import PARENT_MESSAGE_ID
from retry.sink import ERROR_CHARS_MAX, UID_BYTES, Death, Entry

TOPIC_PREFIX = "redelivery_"
GROUP = "redelivery"

UID, KEY, CREATED_AT, DUE_AT = "DMQ_UID", "DMQ_KEY", "DMQ_CREATED_AT", "DMQ_DUE_AT"
ATTEMPTS, UNCERTAIN, ERROR, TURN, EMPTY = "DMQ_ATTEMPTS", "DMQ_UNCERTAIN", "DMQ_ERROR", "DMQ_TURN", "DMQ_EMPTY"
DEATH = "DMQ_DEATH"

_NOTHING = b"\0"  # a message has at least one byte
_DIGEST_BYTES = 16


class Stored(NamedTuple):
    """An entry as it was put, decoded from its message, and the number of earlier puts."""

    entry: Entry
    turn: int


class EntryFacts(NamedTuple):
    """Facts about an entry that arose after its put and that the daemon cannot store."""

    error: str
    is_uncertain: bool
    due_at_ms: int


def topic_of(type_name: str) -> str:
    """Return the topic of a type; a name too long for the prefix is cut and gets its digest as a suffix."""
    topic = TOPIC_PREFIX + type_name
    if len(topic) <= TOPIC_CHARS_MAX:
        return topic
    digest = _digest(type_name.encode())
    return f"{topic[: TOPIC_CHARS_MAX - len(digest) - 1]}_{digest}"


def message_id_of(uid: bytes, turn: int) -> str:
    """Return the protocol's message id of an entry in its ``turn``, from 0."""
    if turn:
        uid = blake2b(uid + turn.to_bytes(8, "big"), digest_size=UID_BYTES).digest()
    return f"01{uid.hex().upper()}"


def note_id_of(topic: str, message_id: str) -> str:
    """Return the id of the note on a dead message; message ids are unique only within their topic."""
    return f"01{blake2b(f'{topic} {message_id}'.encode(), digest_size=UID_BYTES).hexdigest().upper()}"


def encode(entry: Entry, turn: int) -> wire.Message:
    """Return the message of an entry.

    An entry without a key is delayed until it is due. An entry with a key is visible at once, in the order of
    acceptance of its key. The first consumer that receives it hides it until it is due, and later entries of the key
    wait.
    """
    message = wire.Message(body=entry.payload or _NOTHING)
    message.topic.name = topic_of(entry.type_name)
    system, properties = message.system_properties, message.user_properties
    system.message_id = message_id_of(entry.uid, turn)
    system.body_encoding = wire.IDENTITY
    set_timestamp(system.born_timestamp, max(0, entry.created_at_ms))
    if entry.key:
        system.message_type = wire.FIFO
        system.message_group = _digest(entry.key.encode(errors="surrogatepass"))  # its limit is lower than a key's
        properties[KEY] = _escaped(entry.key)
    else:
        system.message_type = wire.DELAY
        set_timestamp(system.delivery_timestamp, max(0, entry.due_at_ms))
    properties[UID] = entry.uid.hex()
    properties[CREATED_AT] = str(entry.created_at_ms)
    properties[DUE_AT] = str(entry.due_at_ms)
    properties[ATTEMPTS] = str(entry.attempts)
    properties[TURN] = str(turn)
    if entry.is_uncertain:
        properties[UNCERTAIN] = "1"
    if entry.error:
        properties[ERROR] = _escaped(entry.error[:ERROR_CHARS_MAX])
    if not entry.payload:
        properties[EMPTY] = "1"
    return message


def decode(type_name: str, properties: dict[str, str], body: bytes, *, stored_at_ms: int) -> Stored:
    """Return the entry of a message. A redriven one has 0 attempts, and is due since the time it was stored.

    Raises ValueError or KeyError for a message without an entry.
    """
    uid = bytes.fromhex(properties[UID])
    if len(uid) != UID_BYTES:
        raise ValueError(f"a uid has {UID_BYTES} bytes, not {len(uid)}")
    is_redriven = PARENT_MESSAGE_ID in properties
    entry = Entry(
        type_name=type_name,
        uid=uid,
        payload=b"" if EMPTY in properties else body,
        key=_plain(properties.get(KEY, "")),
        created_at_ms=int(properties[CREATED_AT]),
        due_at_ms=stored_at_ms if is_redriven else int(properties[DUE_AT]),
        attempts=0 if is_redriven else int(properties[ATTEMPTS]),
        is_uncertain=UNCERTAIN in properties,
        error=_plain(properties.get(ERROR, "")),
    )
    return Stored(entry, int(properties[TURN]))


def encode_note(topic: str, message_id: str, entry: Entry, death: Death) -> wire.Message:
    """Return the note, for ``topic``, on the dead message ``message_id``, with the current state of its entry."""
    note = wire.Message(body=_NOTHING)
    note.topic.name = topic
    note.system_properties.message_id = note_id_of(topic_of(entry.type_name), message_id)
    note.system_properties.body_encoding = wire.IDENTITY
    note.system_properties.keys.append(message_id)
    properties = note.user_properties
    properties[UID], properties[DEATH] = entry.uid.hex(), death.name
    properties[ATTEMPTS], properties[DUE_AT] = str(entry.attempts), str(entry.due_at_ms)
    properties[UNCERTAIN] = str(int(entry.is_uncertain))
    properties[ERROR] = _escaped(entry.error[:ERROR_CHARS_MAX])
    return note


def decode_note(properties: dict[str, str], entry: Entry) -> tuple[Entry, Death]:
    """Return a dead entry with the facts of its note; unchanged if the note cannot be read."""
    try:
        noted = replace(
            entry,
            attempts=int(properties[ATTEMPTS]),
            due_at_ms=int(properties[DUE_AT]),
            is_uncertain=properties[UNCERTAIN] == "1",
            error=_plain(properties[ERROR]),
        )
        return noted, Death[properties[DEATH]]
    except (KeyError, ValueError):
        return entry, Death.EXHAUSTED


def unreadable(type_name: str, message_id: str, body: bytes, at_ms: int) -> Entry:
    """Return a substitute entry for a message without one; its uid is derived from the message id."""
    uid = blake2b(message_id.encode(), digest_size=UID_BYTES).digest()
    return Entry(type_name=type_name, uid=uid, payload=body, created_at_ms=at_ms, due_at_ms=at_ms)


def death_of(reason: str) -> Death:
    """Return the hook's cause of death for a dead letter's reason, for a letter without a note."""
    return {"TOO_OLD": Death.TOO_OLD, "OPERATOR": Death.OPERATOR}.get(reason, Death.EXHAUSTED)


def _digest(value: bytes) -> str:
    return blake2b(value, digest_size=_DIGEST_BYTES).hexdigest()


def _escaped(text: str) -> str:
    """Return a text for a property, which must not contain control characters."""
    if text.isprintable() and "%" not in text:
        return text
    return "".join(
        each if each.isprintable() and each != "%" else quote(each, safe="", errors="surrogatepass") for each in text
    )


def _plain(text: str) -> str:
    return unquote(text, errors="surrogatepass")
