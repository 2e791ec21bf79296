"""Frames of the classic protocol: both forms, and everything that is none."""

from __future__ import annotations

import struct
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker_adapter.remoting.protocol.frames import (
    FRAME_BYTES_MAX,
    FrameBroken,
    RemotingFrame,
    decode_frame,
    encode_frame,
    frame_bytes,
)

CAPTURED = Path(__file__).parents[3] / "golden" / "remoting"
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
frames = st.builds(
    RemotingFrame,
    code=st.integers(-(2**15), 2**15 - 1),
    opaque=st.integers(-(2**31), 2**31 - 1),
    is_answer=st.booleans(),
    is_one_way=st.booleans(),
    remark=texts,
    fields=st.dictionaries(texts, texts, max_size=5),
    body=st.binary(max_size=100),
)


@given(frames, st.booleans())
def test_a_frame_comes_back_as_it_was_made(frame: RemotingFrame, is_binary: bool) -> None:
    """In both forms of its header."""
    content = encode_frame(frame, is_binary=is_binary)
    assert frame_bytes(content[:4]) == len(content) - 4
    assert decode_frame(content[4:]) == frame


@given(
    st.binary(max_size=200)
    | st.builds(lambda head, rest: struct.pack(">I", head) + rest, st.integers(0, 2**32 - 1), st.binary(max_size=200))
)
def test_any_bytes_are_a_frame_or_broken(content: bytes) -> None:
    """No other error comes of what a peer sends."""
    with suppress(FrameBroken):
        decode_frame(content)


@given(frames, st.booleans(), st.data())
def test_a_damaged_frame_is_a_frame_or_broken(frame: RemotingFrame, is_binary: bool, data: st.DataObject) -> None:
    """One byte that is another one reaches the depths of both forms."""
    content = bytearray(encode_frame(frame, is_binary=is_binary)[4:])
    content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    with suppress(FrameBroken):
        decode_frame(bytes(content))


@pytest.mark.parametrize("length", [0, 3, FRAME_BYTES_MAX + 1, 2**32 - 1])
def test_a_length_that_no_frame_has_is_refused(length: int) -> None:
    """Before a byte of it is read: HTTP is one of these."""
    with pytest.raises(FrameBroken, match="are allowed"):
        frame_bytes(struct.pack(">I", length))


@pytest.mark.parametrize(
    ("header", "why"),
    [
        (b"[]", "not a JSON object"),
        (b"{", "not JSON"),
        (b'{"code":"0"}', "wrong type"),
        (b'{"code":0,"extFields":[1]}', "wrong type"),
        (b'{"code":true}', "wrong type"),
        (b"[" * 100_000, "not JSON"),
    ],
)
def test_a_header_that_is_none_is_refused(header: bytes, why: str) -> None:
    """With what is wrong about it."""
    with pytest.raises(FrameBroken, match=why):
        decode_frame(struct.pack(">I", len(header)) + header)


def test_a_header_longer_than_its_frame_is_refused() -> None:
    """So is one in a form nobody knows."""
    with pytest.raises(FrameBroken, match="a header of 9 bytes"):
        decode_frame(struct.pack(">I", 9) + b"{}")
    with pytest.raises(FrameBroken, match="form 7"):
        decode_frame(struct.pack(">I", 7 << 24))


def test_frames_of_a_real_broker_are_read() -> None:
    """Answers of Apache RocketMQ 5.5.0 as they came: a route, an offset, a pull, a refusal."""
    answers = {path.stem: decode_frame(path.read_bytes()) for path in sorted(CAPTURED.glob("answer-*.bin"))}
    assert {name: (each.code, each.is_answer) for name, each in answers.items()} == {
        "answer-offset": (0, True),
        "answer-pull": (0, True),
        "answer-pull-batch": (0, True),
        "answer-pull-end": (19, True),
        "answer-pull-moved": (21, True),
        "answer-route": (0, True),
        "answer-route-unknown": (17, True),
    }
    assert answers["answer-offset"].fields == {"offset": "1"}
    assert "No topic route info" in answers["answer-route-unknown"].remark
