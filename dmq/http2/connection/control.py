"""Connection-level frames: SETTINGS, PING and GOAWAY; and protection against floods of them."""

from __future__ import annotations

from typing import Final

from dmq.http2.admission.bounds import Allowance
from dmq.http2.admission.limits import Limits
from dmq.http2.codec import frames
from dmq.http2.connection.outbound import Outbound
from dmq.http2.errors import Code, ConnectionFault, StreamFault

# Payloads of our own PINGs, to distinguish their answers.
_PROBE: Final = b"dmq-live"
_DRAIN: Final = b"dmq-away"
PRIORITY_BYTES: Final = 5
_SMALL_FRAMES_PER_CALL: Final = 32


class Control:
    """The settings of both sides, the shutdown of the connection, and the rate limits on control frames.

    Draining has two steps, so that calls sent before the client learns of it are not lost. The first GOAWAY promises to
    serve all streams and has a PING after it. When the PING is answered, the second GOAWAY names the last stream.
    """

    def __init__(self, limits: Limits, out: Outbound, now_s: float) -> None:
        self._limits = limits
        self._out = out
        self.has_settings = False
        self.is_draining = False
        self.is_final = False  # streams above the last one are not served
        self.is_probing = False  # our PING is not answered yet
        self.resets = Allowance("resets", limits.resets, now_s)
        self.idle_frames = Allowance("frames without use", limits.idle_frames, now_s)
        self._pings = Allowance("PINGs", limits.pings, now_s)
        self._settings = Allowance("SETTINGS", limits.settings, now_s)

    def greet(self) -> None:
        """Send our settings, and widen the connection's window to its configured size."""
        limits = self._limits
        self._out.put(
            frames.settings(
                {
                    frames.MAX_CONCURRENT_STREAMS: limits.streams,
                    frames.INITIAL_WINDOW_SIZE: limits.stream_window,
                    frames.MAX_HEADER_LIST_SIZE: limits.header_list_told,
                }
            )
        )
        self._out.put(frames.window_update(0, limits.connection_window - frames.WINDOW_DEFAULT))

    def probe(self) -> None:
        """Send a PING to check whether the peer is alive."""
        self.is_probing = True
        self._out.put(frames.ping(_PROBE))

    def drain(self) -> None:
        """Start the shutdown: the client should open its next streams on another connection."""
        if not self.is_draining:
            self.is_draining = True
            self._out.put(frames.goaway(frames.STREAM_MAX, Code.NO_ERROR, "going away") + frames.ping(_DRAIN))

    def finish(self, last_id: int) -> None:
        """Stop serving streams above the last one."""
        self.is_draining = True
        if not self.is_final:
            self.is_final = True
            self._out.put(frames.goaway(last_id, Code.NO_ERROR, "going away"))

    def turn_away(self, text: str) -> None:
        """Serve no stream, not even those that are open: the client may repeat their calls elsewhere."""
        self.is_draining = self.is_final = True
        self._out.put(frames.goaway(0, Code.NO_ERROR, text))

    def on_frame(self, kind: int, payload: bytes, flags: int, stream_id: int, *, now_s: float, last_id: int) -> None:
        """Process a frame that concerns no stream. Raises ConnectionFault or StreamFault."""
        if kind == frames.SETTINGS:
            self._on_settings(payload, flags, stream_id, now_s)
        elif kind == frames.PING:
            self._on_ping(payload, flags, stream_id, now_s=now_s, last_id=last_id)
        else:
            self.idle_frames.spend(now_s)
            if kind == frames.GOAWAY and (stream_id or len(payload) < 8):
                raise ConnectionFault(Code.PROTOCOL_ERROR, "an invalid GOAWAY")  # a valid one has no effect
            if kind == frames.PRIORITY:
                _check_priority_frame(payload, stream_id)

    def _on_settings(self, payload: bytes, flags: int, stream_id: int, now_s: float) -> None:
        if stream_id:
            raise ConnectionFault(Code.PROTOCOL_ERROR, "SETTINGS on a stream")
        self._settings.spend(now_s)
        if flags & frames.ACK:
            if payload:
                raise ConnectionFault(Code.FRAME_SIZE_ERROR, "SETTINGS acknowledgement with content")
            if not self.has_settings:
                raise ConnectionFault(Code.PROTOCOL_ERROR, "no SETTINGS after the preface")
            return
        if len(payload) % frames.SETTING.size:
            raise ConnectionFault(Code.FRAME_SIZE_ERROR, "SETTINGS of a wrong size")
        self.has_settings = True
        out = self._out
        window = out.window
        for name, value in frames.SETTING.iter_unpack(payload):
            if name == frames.INITIAL_WINDOW_SIZE:
                if value > frames.WINDOW_MAX:
                    raise ConnectionFault(Code.FLOW_CONTROL_ERROR, "initial window above the maximum")
                window = value  # the last one in a frame is effective
            elif name == frames.MAX_FRAME_SIZE:
                if not frames.FRAME_BYTES <= value <= frames.FRAME_BYTES_LEGAL:
                    raise ConnectionFault(Code.PROTOCOL_ERROR, "frame size outside the allowed range")
                # With larger frames one stream could delay the others.
                out.frame_bytes = min(value, 4 * frames.FRAME_BYTES)
            elif name == frames.ENABLE_PUSH and value > 1:
                raise ConnectionFault(Code.PROTOCOL_ERROR, "ENABLE_PUSH must be 0 or 1")
        out.rewindow(window)
        out.put(frames.SETTINGS_ACK)  # before the DATA that a wider window allows
        out.pump()

    def _on_ping(self, payload: bytes, flags: int, stream_id: int, *, now_s: float, last_id: int) -> None:
        if stream_id:
            raise ConnectionFault(Code.PROTOCOL_ERROR, "PING on a stream")
        if len(payload) != 8:
            raise ConnectionFault(Code.FRAME_SIZE_ERROR, "PING of a wrong size")
        if not flags & frames.ACK:
            self._pings.spend(now_s)
            self._out.put(frames.ping(payload, is_answer=True))
        elif payload == _PROBE and self.is_probing:
            self.is_probing = False
        elif payload == _DRAIN and self.is_draining and not self.is_final:
            self.finish(last_id)
        else:
            self._pings.spend(now_s)

    def served(self) -> None:
        """Refill the allowance of PINGs and extend that of small frames: around a call they are no flood."""
        self._pings.refill()
        self._out.small_frames.earn(_SMALL_FRAMES_PER_CALL)


def number_of(payload: bytes) -> int:
    """Return the number that is the whole payload. Raises ConnectionFault."""
    if len(payload) != 4:
        raise ConnectionFault(Code.FRAME_SIZE_ERROR, "frame of a wrong size")
    return int.from_bytes(payload, "big")


def without_padding(data: bytes, start: int, stop: int) -> tuple[int, int]:
    """Return the start and end of the payload without its padding. Raises ConnectionFault."""
    if start >= stop or (padding := data[start]) >= stop - start:
        raise ConnectionFault(Code.PROTOCOL_ERROR, "padding longer than the frame")
    return start + 1, stop - padding


def check_priority(payload: bytes, stream_id: int) -> None:
    """Check the priority at the start of a payload; its value is ignored. Raises ConnectionFault or StreamFault."""
    if len(payload) < PRIORITY_BYTES:
        raise ConnectionFault(Code.FRAME_SIZE_ERROR, "frame too short for its priority")
    if int.from_bytes(payload[:4], "big") & frames.STREAM_MAX == stream_id:
        raise StreamFault(stream_id, Code.PROTOCOL_ERROR, "stream that depends on itself")


def _check_priority_frame(payload: bytes, stream_id: int) -> None:
    if stream_id == 0:
        raise ConnectionFault(Code.PROTOCOL_ERROR, "PRIORITY on stream 0")
    if len(payload) != PRIORITY_BYTES:
        raise StreamFault(stream_id, Code.FRAME_SIZE_ERROR, "PRIORITY of a wrong size")
    check_priority(payload, stream_id)
