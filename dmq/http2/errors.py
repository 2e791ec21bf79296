"""Errors of this package, and the codes that are sent to the peer.

Http2Error
├── ConnectionFault      the peer violated a rule for the whole connection: GOAWAY and close
│   └── HpackFault       a header block that cannot be decoded
├── StreamFault          the peer violated a rule for one stream: RST_STREAM
└── CallEnded            a handler, or the server on its behalf, ends a call with a gRPC status
"""

from __future__ import annotations

from enum import IntEnum


class Code(IntEnum):
    """Error codes of HTTP/2 (RFC 9113, section 7)."""

    NO_ERROR = 0
    PROTOCOL_ERROR = 1
    INTERNAL_ERROR = 2
    FLOW_CONTROL_ERROR = 3
    SETTINGS_TIMEOUT = 4
    STREAM_CLOSED = 5
    FRAME_SIZE_ERROR = 6
    REFUSED_STREAM = 7
    CANCEL = 8
    COMPRESSION_ERROR = 9
    CONNECT_ERROR = 10
    ENHANCE_YOUR_CALM = 11
    INADEQUATE_SECURITY = 12
    HTTP_1_1_REQUIRED = 13


class Status(IntEnum):
    """Status codes of gRPC."""

    OK = 0
    CANCELLED = 1
    UNKNOWN = 2
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    ABORTED = 10
    OUT_OF_RANGE = 11
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    DATA_LOSS = 15
    UNAUTHENTICATED = 16


class Http2Error(Exception):
    """The root of this package's errors."""


class ConnectionFault(Http2Error):
    """The connection cannot continue; ``text`` is for our logs and for the peer's."""

    def __init__(self, code: Code, text: str) -> None:
        super().__init__(code, text)
        self.code = code
        self.text = text


class HpackFault(ConnectionFault):
    """A header block violates HPACK: both tables may now differ, so no later block can be decoded."""

    def __init__(self, text: str) -> None:
        super().__init__(Code.COMPRESSION_ERROR, text)


class StreamFault(Http2Error):
    """One stream cannot continue; the others are unaffected."""

    def __init__(self, stream_id: int, code: Code, text: str) -> None:
        super().__init__(stream_id, code, text)
        self.stream_id = stream_id
        self.code = code
        self.text = text


class CallEnded(Http2Error):
    """A call ends with a status other than OK: raise it in a handler. The client receives the text."""

    def __init__(self, status: Status, text: str = "") -> None:
        super().__init__(status, text)
        self.status = status
        self.text = text
