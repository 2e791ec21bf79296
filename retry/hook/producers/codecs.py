"""Codecs between the arguments of a producer's ``send`` and bytes.

The stored form of ``PlainCodec``, a JSON object:

    {"v": 1, "a": [positional], "k": {keyword}}      bytes as {"$b": base64}, a dict with a key "$..." as {"$d": {...}}

The stored form of messages of supported clients is written by ``join``: a JSON head with its length, and the body:

    length of the head (4, big-endian) | head: {"v": ..., "topic": ..., ...} | body
"""

from __future__ import annotations

import base64
import binascii
import json
import math
import struct
from dataclasses import dataclass, field
from typing import Any, Protocol

from retry.hook.verdicts import Unreadable

_VERSION = 1
_HEAD = struct.Struct(">I")
DEPTH_MAX = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """Arguments of a repeated call."""

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoded:
    """Stored form of a call; messages of one ``key`` keep their order.

    ``first``: the arguments of the first attempt, if they differ from the caller's.
    """

    payload: bytes
    key: str = ""
    first: Arguments | None = None


class Codec(Protocol):
    """Converts the arguments of a send to bytes and back. Later versions of a codec must be able to read its bytes."""

    def encode(self, uid: bytes, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Encoded:
        """Return the stored form; raise ``TypeError`` or ``ValueError`` if the call cannot be kept.

        It may write ``uid`` into the message, so that receivers detect duplicates.
        """
        ...

    def decode(self, uid: bytes, payload: bytes) -> Arguments:
        """Return the arguments; raise ``Unreadable`` if the bytes cannot be decoded."""
        ...


class PlainCodec:
    """Codec for None, bool, int, float, str, bytes, list and dict; a tuple is decoded as a list."""

    def encode(self, uid: bytes, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Encoded:  # noqa: ARG002 - signature of Codec
        plain = {
            "v": _VERSION,
            "a": [_to_json(one, f"argument {number}", 0) for number, one in enumerate(args, start=1)],
            "k": {name: _to_json(one, f"argument {name!r}", 0) for name, one in kwargs.items()},
        }
        return Encoded(payload=json.dumps(plain, separators=(",", ":"), allow_nan=False).encode())

    def decode(self, uid: bytes, payload: bytes) -> Arguments:  # noqa: ARG002 - signature of Codec
        try:
            plain = json.loads(payload)
            if plain["v"] != _VERSION:
                raise Unreadable(f"the call has version {plain['v']!r:.20}, known is {_VERSION}")
            args, kwargs = plain["a"], plain["k"]
            if not isinstance(args, list) or not isinstance(kwargs, dict):
                raise TypeError("not a stored call")
            return Arguments(
                args=tuple(_from_json(one) for one in args),
                kwargs={name: _from_json(one) for name, one in kwargs.items()},
            )
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            if isinstance(error, Unreadable):
                raise
            raise Unreadable(f"a kept call cannot be read: {error!r:.200}") from error


def join(head: dict[str, Any], body: bytes) -> bytes:
    """Return head and body as one value; ``v`` in the head is its version."""
    packed = json.dumps(head, separators=(",", ":"), ensure_ascii=False).encode()
    return b"".join((_HEAD.pack(len(packed)), packed, body))


def split(payload: bytes, version: int) -> tuple[dict[str, Any], bytes]:
    """Return the head and body of a joined value; raise ``Unreadable`` if it is damaged or has another version."""
    try:
        (length,) = _HEAD.unpack_from(payload)
        head = json.loads(payload[_HEAD.size : _HEAD.size + length])
        found = head["v"]
    except (struct.error, ValueError, TypeError, KeyError) as error:
        raise Unreadable(f"a kept message cannot be read: {error!r:.200}") from error
    if found != version:
        raise Unreadable(f"the message has version {found!r:.20}, known is {version}")
    return head, payload[_HEAD.size + length :]


def _to_json(value: Any, where: str, depth: int) -> Any:  # noqa: ANN401 - any value of a user
    if depth > DEPTH_MAX:
        raise ValueError(f"{where} is nested deeper than {DEPTH_MAX}")
    kind = type(value)
    if value is None or kind is bool or kind is int:
        return value
    if kind is str:
        value.encode()  # fail early: a lone surrogate would fail much later, at the broker
        return value
    if kind is float:
        if not math.isfinite(value):
            raise ValueError(f"{where} holds {value}, which JSON does not support")
        return value
    if kind in {bytes, bytearray, memoryview}:
        return {"$b": base64.b64encode(value).decode()}
    if kind is list or kind is tuple:
        return [_to_json(one, where, depth + 1) for one in value]
    if kind is dict:
        for name in value:
            if type(name) is not str:
                raise TypeError(f"{where} holds a dict with the key {name!r:.40}; only text can be kept")
        plain = {name: _to_json(one, where, depth + 1) for name, one in value.items()}
        return {"$d": plain} if any(name.startswith("$") for name in plain) else plain
    raise TypeError(
        f"{where} holds a {kind.__module__}.{kind.__qualname__}, which cannot be kept: pass a codec to durable()"
    )


def _from_json(value: Any) -> Any:  # noqa: ANN401 - any value of a user
    if isinstance(value, list):
        return [_from_json(one) for one in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {"$b"}:
        try:
            return base64.b64decode(value["$b"], validate=True)
        except binascii.Error as error:
            raise Unreadable(f"bytes of a kept call cannot be read: {error}") from error
    if value.keys() == {"$d"}:
        value = value["$d"]
    return {name: _from_json(one) for name, one in value.items()}
