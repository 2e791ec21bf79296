"""Headers of a request: a shape, checked once for each set of names, and values, decoded on demand."""

from __future__ import annotations

import binascii
import string
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from dmq.http2.codec.hpack import value_of
from dmq.http2.errors import HpackFault

if TYPE_CHECKING:
    from dmq.http2.admission.admission import Admission
    from dmq.http2.admission.bounds import Account

_NAME_CHARS: Final = frozenset("!#$%&'*+-.^_`|~" + string.digits + string.ascii_lowercase)
# Connection-specific headers, which HTTP/2 forbids.
_CONNECTION_NAMES: Final = frozenset({"connection", "keep-alive", "proxy-connection", "transfer-encoding", "upgrade"})
_PSEUDO_NAMES: Final = frozenset({":method", ":path", ":scheme", ":authority"})
_KEPT_SHAPES: Final = 256
_KEPT_NAMES: Final = 64
_KEPT_CHARS: Final = 4096
# The transport's own headers, hidden from handlers.
_OWN_NAMES: Final = frozenset(
    {"te", "content-type", "content-length", "grpc-timeout", "grpc-encoding", "grpc-accept-encoding"}
)


class HeaderShape(NamedTuple):
    """The result of checking the names of a block: a fault (empty: none), and the indices of the used fields (-1:
    absent).
    """

    fault: str
    method: int = -1
    path: int = -1
    te: int = -1
    content_type: int = -1
    content_length: int = -1
    timeout: int = -1
    encoding: int = -1


_shapes: dict[tuple[str, ...], HeaderShape] = {}


def shape_of(names: tuple[str, ...]) -> HeaderShape:
    """Return the checked shape of a block's names, cached: a client sends only one or two sets of names."""
    shape = _shapes.get(names)
    if shape is None:
        shape = _examine(names)
        if len(names) <= _KEPT_NAMES and sum(map(len, names)) <= _KEPT_CHARS:
            if len(_shapes) >= _KEPT_SHAPES:
                _shapes.clear()
            _shapes[names] = shape
    return shape


def _examine(names: tuple[str, ...]) -> HeaderShape:
    at: dict[str, int] = {}
    has_regular = False
    for index, name in enumerate(names):
        if name.startswith(":"):
            if has_regular:
                return HeaderShape("pseudo-header after a header")
            if name not in _PSEUDO_NAMES:
                return HeaderShape("an unknown pseudo-header")
            if name in at:
                return HeaderShape("a pseudo-header that comes twice")
        else:
            has_regular = True
            if fault := regular_fault(name):
                return HeaderShape(fault)
        at.setdefault(name, index)
    if not {":method", ":path", ":scheme"} <= at.keys():
        return HeaderShape("a pseudo-header is missing")
    return HeaderShape(
        "",
        method=at[":method"],
        path=at[":path"],
        te=at.get("te", -1),
        content_type=at.get("content-type", -1),
        content_length=at.get("content-length", -1),
        timeout=at.get("grpc-timeout", -1),
        encoding=at.get("grpc-encoding", -1),
    )


def regular_fault(name: str) -> str:
    """Return the fault in the name of a header that is no pseudo-header; empty if it is valid."""
    if name in _CONNECTION_NAMES:
        return "a header of HTTP/1.1 connections"
    if not name or not _NAME_CHARS.issuperset(name):
        return "characters that no header name may have"
    return ""


class RequestHeaders:
    """The headers of one call. Names are in lower case.

    ``deadline_s`` is the time that was left until the deadline when the call arrived (``None`` without one). ``peer``
    is the client's address, such as ``ipv4:127.0.0.1:5000``. ``admission`` is the decision about the call. Values that
    cannot be decoded count as absent.
    """

    __slots__ = ("account", "admission", "deadline_s", "names", "packed_bytes", "peer", "values")

    def __init__(self, names: Sequence[str], values: Sequence[bytes], peer: str) -> None:
        self.names = names
        self.values = values
        self.peer = peer
        self.deadline_s: float | None = None
        self.packed_bytes = 0  # compressed size of the newest message; 0 if it was not compressed
        self.admission: Admission | None = None
        self.account: Account | None = None  # for bytes that a handler keeps until the peer reads its answer

    def get(self, name: str) -> str | None:
        """Return the first value of a header, or None."""
        try:
            return value_of(self.values[self.names.index(name)])
        except (ValueError, HpackFault):
            return None

    def all(self, name: str) -> list[str]:
        """Return every value of a header, in the order received."""
        return [value for key, value in self._pairs() if key == name]

    def binary(self, name: str) -> bytes | None:
        """Return the first value of a header whose name ends in ``-bin``, or None."""
        text = self.get(name)
        return None if text is None else next(iter(_binaries(text)), None)

    def items(self) -> Iterator[tuple[str, str | bytes]]:
        """Yield the call's metadata: all headers except the transport's; values of ``-bin`` headers as bytes."""
        for name, value in self._pairs():
            if name in _OWN_NAMES or name.startswith(":"):
                continue
            if name.endswith("-bin"):
                for part in _binaries(value):
                    yield name, part
            else:
                yield name, value

    def __iter__(self) -> Iterator[tuple[str, str | bytes]]:
        """Yield ``items``; repeatable, so that the headers can serve as an iterable of metadata."""
        return self.items()

    def _pairs(self) -> Iterator[tuple[str, str]]:
        for name, wire in zip(self.names, self.values, strict=True):
            try:
                yield name, value_of(wire)
            except HpackFault:
                continue


def _binaries(text: str) -> Iterator[bytes]:
    """Yield decoded base64 values, padded or not; a sender may join several with commas."""
    for part in text.split(","):
        bare = part.strip().rstrip("=")
        try:
            yield binascii.a2b_base64(bare + "=" * (-len(bare) % 4), strict_mode=bool(bare))
        except (binascii.Error, ValueError):
            continue
