"""Frames of the classic protocol, as bytes. Pure.

    length 4 | header encoding 1 | header length 3 | header | body

``length`` counts the bytes after itself. A header is JSON (0) or RocketMQ's binary form (1):

    code 2 | language 1 | version 2 | opaque 4 | flag 4 | remark length 4 | remark | fields length 4 | fields
    of each field: name length 2 | name | value length 4 | value

``opaque`` is a number chosen by the sender of a request; the answer repeats it. Invalid bytes raise ``FrameBroken``:
the rest of the stream is then unusable.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from broker_adapter.contracts.errors import BrokerUnavailable

LENGTH_BYTES = 4
FRAME_BYTES_MAX = 16 * 1024 * 1024  # RocketMQ's own bound (com.rocketmq.remoting.frameMaxLength)
VERSION = 513  # of RocketMQ 5.5.0; from 401 on a name server answers proper JSON
_HEADER_BYTES_MAX = 1024 * 1024  # our limit; a send has up to 32 KiB of properties in its header
_LENGTH = struct.Struct(">I")
_JSON, _BINARY = 0, 1
_ANSWER, _ONE_WAY = 1, 2  # bits of flag
_BINARY_HEAD = struct.Struct(">hBhii")
_LANGUAGE, _LANGUAGE_NUMBER = "PYTHON", 3
_SHOWN_CHARS = 60


class FrameBroken(BrokerUnavailable):
    """Invalid or damaged bytes of the classic protocol; it is unknown whether the call took effect."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RemotingFrame:
    """Request or answer. ``code`` is the operation of a request and the result of an answer."""

    code: int
    opaque: int = 0
    is_answer: bool = False
    is_one_way: bool = False  # a request without an answer
    remark: str = ""
    fields: Mapping[str, str] = field(default_factory=dict)
    body: bytes = field(default=b"", repr=False)
    version: int = VERSION  # of the sender


def encode_frame(frame: RemotingFrame, *, is_binary: bool = False) -> bytes:
    """Return the bytes of a frame, including its length."""
    header = _binary_header(frame) if is_binary else _json_header(frame)
    form = _BINARY if is_binary else _JSON
    length = LENGTH_BYTES + len(header) + len(frame.body)
    return _LENGTH.pack(length) + _LENGTH.pack(form << 24 | len(header)) + header + frame.body


def frame_bytes(head: bytes) -> int:
    """Return the number of bytes after the length field, given its four bytes."""
    (length,) = _LENGTH.unpack(head)
    if not LENGTH_BYTES <= length <= FRAME_BYTES_MAX:
        raise FrameBroken(f"a frame of {length} bytes: {LENGTH_BYTES} to {FRAME_BYTES_MAX} are allowed")
    return int(length)


def decode_frame(content: bytes) -> RemotingFrame:
    """Return the frame in the bytes after a length field."""
    if len(content) < LENGTH_BYTES:
        raise FrameBroken(f"a frame of {len(content)} bytes has no header")
    (head,) = _LENGTH.unpack_from(content)
    form, size = head >> 24, head & 0xFFFFFF
    end = LENGTH_BYTES + size
    if size > _HEADER_BYTES_MAX or end > len(content):
        raise FrameBroken(f"a header of {size} bytes in a frame of {len(content)}")
    header, body = content[LENGTH_BYTES:end], content[end:]
    if form == _JSON:
        return _of_json(header, body)
    if form == _BINARY:
        return _of_binary(header, body)
    raise FrameBroken(f"the header is written in form {form}: 0 (JSON) and 1 (binary) are known")


def number_of(answer: RemotingFrame, name: str, address: str) -> int:
    """Return a numeric field of an answer; raise ``FrameBroken`` if it is not a number."""
    text = answer.fields.get(name, "")
    try:
        return int(text)
    except ValueError:
        raise FrameBroken(f"{address} answers {text[:40]!r} for {name}, which is not a number") from None


def _flag(frame: RemotingFrame) -> int:
    return _ANSWER * frame.is_answer | _ONE_WAY * frame.is_one_way


def _json_header(frame: RemotingFrame) -> bytes:
    header = {
        "code": frame.code,
        "language": _LANGUAGE,
        "version": frame.version,
        "opaque": frame.opaque,
        "flag": _flag(frame),
        "extFields": dict(frame.fields),
        "serializeTypeCurrentRPC": "JSON",
    }
    if frame.remark:
        header["remark"] = frame.remark
    return json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()


def _of_json(header: bytes, body: bytes) -> RemotingFrame:
    try:
        found = json.loads(header)
    except (ValueError, RecursionError) as error:
        raise FrameBroken(f"the header is not JSON: {str(error)[:_SHOWN_CHARS]}") from None
    if not isinstance(found, dict):
        raise FrameBroken("the header is not a JSON object")
    numbers = [found.get(name, 0) for name in ("code", "opaque", "flag", "version")]
    fields, remark = found.get("extFields") or {}, found.get("remark") or ""
    if not all(type(each) is int for each in numbers) or not isinstance(fields, dict) or not isinstance(remark, str):
        raise FrameBroken("a header field has the wrong type")
    texts = {name: value if isinstance(value, str) else json.dumps(value) for name, value in fields.items()}
    code, opaque, flag, version = numbers
    return _frame(code, opaque, flag, version, remark, texts, body)


def _frame(  # noqa: PLR0917 - the parts of a header
    code: int, opaque: int, flag: int, version: int, remark: str, fields: dict[str, str], body: bytes
) -> RemotingFrame:
    return RemotingFrame(
        code=code,
        opaque=opaque,
        is_answer=bool(flag & _ANSWER),
        is_one_way=bool(flag & _ONE_WAY),
        remark=remark,
        fields=fields,
        body=body,
        version=version,
    )


def _binary_header(frame: RemotingFrame) -> bytes:
    remark = frame.remark.encode()
    fields = b"".join(
        struct.pack(">h", len(name.encode())) + name.encode() + _LENGTH.pack(len(value.encode())) + value.encode()
        for name, value in frame.fields.items()
    )
    head = _BINARY_HEAD.pack(frame.code, _LANGUAGE_NUMBER, frame.version, frame.opaque, _flag(frame))
    return head + _LENGTH.pack(len(remark)) + remark + _LENGTH.pack(len(fields)) + fields


def _of_binary(header: bytes, body: bytes) -> RemotingFrame:
    try:
        code, _, version, opaque, flag = _BINARY_HEAD.unpack_from(header)
        remark, at = _text(header, _BINARY_HEAD.size, ">I")
        (size,) = _LENGTH.unpack_from(header, at)
        if at + LENGTH_BYTES + size != len(header):
            raise FrameBroken(f"{size} bytes of fields in a header of {len(header)}")
        fields = dict(_fields(header, at + LENGTH_BYTES))
    except (struct.error, UnicodeDecodeError) as error:
        raise FrameBroken(f"the header cannot be read: {error}") from None
    return _frame(code, opaque, flag, version, remark, fields, body)


def _fields(header: bytes, at: int) -> Iterator[tuple[str, str]]:
    while at < len(header):
        name, at = _text(header, at, ">H")
        value, at = _text(header, at, ">I")
        yield name, value


def _text(header: bytes, at: int, length: str) -> tuple[str, int]:
    (size,) = struct.unpack_from(length, header, at)
    begin = at + struct.calcsize(length)
    if begin + size > len(header):
        raise FrameBroken(f"a text of {size} bytes does not fit into a header of {len(header)}")
    return header[begin : begin + size].decode(), begin + size
