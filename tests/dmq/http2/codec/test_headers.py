"""A request's headers: which sets of names are legal, and what a handler reads from them."""

from __future__ import annotations

import pytest

from dmq.http2.admission.bounds import Account
from dmq.http2.codec.headers import RequestHeaders, shape_of
from dmq.http2.codec.status import percent_encoded, timeout_s
from dmq.http2.connection.methods import Methods, NotGrpc, Unary, Unserved
from dmq.http2.connection.stream import Stream
from dmq.http2.errors import CallEnded, Status
from dmq.http2.testing.peer import REQUEST, Fields, text

PATH = "/test.Test/Echo"


async def _echo(message: bytes, headers: RequestHeaders) -> bytes:
    return message


METHODS = Methods({PATH: Unary(_echo)})


def headers_of(fields: Fields, *, is_huffman: bool = True) -> RequestHeaders:
    names = [name for name, _ in fields]
    return RequestHeaders(names, [text(value.encode(), is_huffman=is_huffman) for _, value in fields], "unix:")


def stream_of(fields: Fields, *, is_huffman: bool = True) -> Stream:
    headers = headers_of(fields, is_huffman=is_huffman)
    return Stream(1, headers, shape_of(tuple(headers.names)), Account.alone(1000), 0)


def replaced(name: str, value: str | None) -> Fields:
    rest = [field for field in REQUEST if field[0] != name]
    return rest if value is None else [*rest, (name, value)]


@pytest.mark.parametrize(
    ("names", "why"),
    [
        ([":method", ":scheme"], "missing"),
        ([":method", ":method", ":scheme", ":path"], "twice"),
        ([":method", ":scheme", "a", ":path"], "after a header"),
        ([":method", ":scheme", ":path", ":status"], "unknown"),
        ([":method", ":scheme", ":path", "Upper"], "characters"),
        ([":method", ":scheme", ":path", ""], "characters"),
        ([":method", ":scheme", ":path", "a b"], "characters"),
        ([":method", ":scheme", ":path", "connection"], "HTTP/1.1"),
        ([":method", ":scheme", ":path", "transfer-encoding"], "HTTP/1.1"),
    ],
)
def test_illegal_names(names: list[str], why: str) -> None:
    """What RFC 9113, section 8.2 and 8.3 forbid is a fault of the stream."""
    assert why in shape_of(tuple(names)).fault


def test_a_shape_is_reversible_in_its_values_and_kept() -> None:
    """Fields that we read are found by place, and the second look costs a lookup."""
    names = tuple(name for name, _ in REQUEST)
    shape = shape_of(names)
    assert (shape.fault, shape.method, shape.path, shape.te, shape.content_type) == ("", 0, 2, 4, 5)
    assert shape_of(tuple(name for name, _ in REQUEST)) is shape


def test_values_many_and_binary() -> None:
    """Repeated names keep their order; binary values come padded, bare and joined by commas."""
    headers = headers_of([("a", "1"), ("a", "2"), ("b-bin", "AP8="), ("b-bin", "AP8,AAE"), ("c-bin", "?")])
    assert headers.get("a") == "1"
    assert headers.all("a") == ["1", "2"]
    assert headers.get("none") is None
    assert headers.binary("b-bin") == b"\x00\xff"
    assert headers.binary("c-bin") is None
    assert list(headers) == list(headers)
    assert list(headers.items()) == [
        ("a", "1"),
        ("a", "2"),
        ("b-bin", b"\x00\xff"),
        ("b-bin", b"\x00\xff"),
        ("b-bin", b"\x00\x01"),
    ]


def test_items_leave_out_headers_of_the_transport() -> None:
    """A handler sees metadata, not the framing of the call."""
    fields = [*REQUEST, ("grpc-timeout", "1S"), ("user-agent", "x"), ("x-mq-client-id", "me")]
    assert dict(headers_of(fields).items()) == {"user-agent": "x", "x-mq-client-id": "me"}


def test_undecodable_value_counts_as_absent() -> None:
    """Found out late, it must not surprise a handler."""
    headers = RequestHeaders(["a", "b"], [b"\x81\x18", b"\x011"], "unix:")
    assert headers.get("a") is None
    assert list(headers.items()) == [("b", "1")]


@pytest.mark.parametrize("is_huffman", [True, False])
def test_method_is_found_by_any_spelling_of_its_path(is_huffman: bool) -> None:
    """Huffman or not, twice: decoded the first time, looked up as it came the second."""
    for _ in range(2):
        method, _, encoding = METHODS.admit(stream_of(REQUEST, is_huffman=is_huffman))
        assert isinstance(method, Unary)
        assert encoding == ""


def test_deadline_is_read() -> None:
    """The handler sees what was left when the call came in."""
    stream = stream_of([*REQUEST, ("grpc-timeout", "1500m")])
    METHODS.admit(stream)
    assert stream.headers.deadline_s == 1.5


@pytest.mark.parametrize(
    ("name", "value", "status"),
    [
        ("te", None, Status.INTERNAL),
        ("grpc-timeout", "5", Status.INTERNAL),
        ("grpc-timeout", "123456789S", Status.INTERNAL),
        ("grpc-encoding", "snappy", Status.UNIMPLEMENTED),
        (":path", "/test.Test/Other", Status.UNIMPLEMENTED),
    ],
)
def test_refused_with_a_status(name: str, value: str | None, status: Status) -> None:
    """Each fault of a request has the status that gRPC gives it."""
    fields = replaced(name, value)
    stream = stream_of(sorted(fields, key=lambda field: not field[0].startswith(":")))
    with pytest.raises(CallEnded) as caught:
        METHODS.admit(stream)
    assert caught.value.status is status


def test_unknown_compression_is_answered_with_the_known_ones() -> None:
    """The client can send again without."""
    with pytest.raises(Unserved) as caught:
        METHODS.admit(stream_of([*REQUEST, ("grpc-encoding", "br")]))
    assert b"identity,gzip" in caught.value.extra


@pytest.mark.parametrize(
    ("name", "value", "code"),
    [
        (":method", "GET", b"405"),
        ("content-type", "text/html", b"415"),
        ("content-type", "application/grpcx", b"415"),
        ("content-type", None, b"415"),
    ],
)
def test_not_grpc_is_answered_as_http(name: str, value: str | None, code: bytes) -> None:
    """A browser or a probe gets an answer it understands."""
    fields = sorted(replaced(name, value), key=lambda field: not field[0].startswith(":"))
    with pytest.raises(NotGrpc) as caught:
        METHODS.admit(stream_of(fields))
    assert code in caught.value.block
    assert caught.value.body


@pytest.mark.parametrize("content_type", ["application/grpc", "application/grpc+proto", "application/grpc;v=1"])
def test_content_types_of_grpc(content_type: str) -> None:
    """The message format behind the plus is the handler's matter."""
    METHODS.admit(stream_of(replaced("content-type", content_type)))


@pytest.mark.parametrize(
    ("given", "expected_s"),
    [("1H", 3600), ("2M", 120), ("3S", 3), ("4m", 0.004), ("5u", 5e-6), ("6n", 6e-9), ("99999999H", 99999999 * 3600)],
)
def test_timeouts(given: str, expected_s: float) -> None:
    """All units; Java sends sixty years for a stream that has no end."""
    assert timeout_s(given) == pytest.approx(expected_s)


@pytest.mark.parametrize("given", ["", "S", "1", "1s", "-1S", "1.5S", "123456789S", "1S ", "\u0661S"])
def test_timeouts_that_are_none(given: str) -> None:
    """Eight digits and a unit, nothing else."""
    assert timeout_s(given) is None


def test_status_text_is_percent_encoded() -> None:
    """Printable ASCII stays; the percent sign, line breaks and all else are bytes of UTF-8 in hex."""
    assert percent_encoded("ok 100%\nä") == b"ok 100%25%0A%C3%A4"
    assert percent_encoded("\ud800") == b"?"
