"""One client's socket on the event loop: passes bytes to and from the connection, and applies the time limits."""

from __future__ import annotations

import asyncio
import math
import ssl
from collections.abc import Callable
from typing import Final, Literal, Protocol

import structlog

from dmq.http2.admission.admission import Admission, Admit
from dmq.http2.admission.backpressure import Backpressure
from dmq.http2.admission.bounds import LOOPBACK, Account, Accounts, Shares, address_of
from dmq.http2.admission.connection_admission import AdmissionPlace, ConnectionUse
from dmq.http2.admission.limits import Limits
from dmq.http2.admission.slices import InputSlices
from dmq.http2.codec.headers import RequestHeaders
from dmq.http2.connection.connection import Connection
from dmq.http2.connection.methods import Methods
from dmq.http2.errors import CallEnded, Code, ConnectionFault, Status
from dmq.http2.server.calls import Calls
from dmq.http2.server.tls import HANDSHAKE, CertificateFault, TlsFault, TlsPipe

PlainServedTo = Literal["all", "loopback", "none"]

_STALLED_LOOKS: Final = 8  # checks for stalled calls per request_s
_LINGER_S: Final = 5.0  # to send the last bytes to a peer that may not read them
_LEAVE_S: Final = 0.5  # for the peer to end its halves of streams
_USEFUL_BYTES: Final = 16 * 1024  # plain text per slice of ciphertext below which there is a pause
_READ_BYTES: Final = 64 * 1024  # after a read of this size the client waits for its turn: the loop would keep reading
_MUCH_BYTES: Final = 1024 * 1024  # in such reads, before a pause for others
_MUCH_PAUSE_S: Final = 0.001
_PAUSE_S: Final = 0.002  # after frames that start no call, which are not urgent
_STREAMS_LOOKED_AT: Final = 8  # to decide whether a connection is busy

log = structlog.get_logger("dmq.http2")


class ProtocolHost(Protocol):
    """The shared state of a server's connections."""

    limits: Limits
    accounts: Accounts
    admit: Admit
    lists: Shares
    methods: Methods
    slices: InputSlices
    turns: Backpressure
    monotonic_s: Callable[[], float]
    tls: Callable[[], ssl.SSLContext] | None
    plain_served_to: PlainServedTo
    certificate_fault: CertificateFault

    def joined(self, client: ClientProtocol) -> AdmissionPlace:
        """Register a client; return the decision about its admission."""
        ...

    def left(self, client: ClientProtocol) -> None:
        """Remove a disconnected client."""
        ...

    def watch(self, at_s: float) -> None:
        """Register the deadline of a call."""
        ...


class ClientProtocol(asyncio.Protocol):
    """One connection: the event loop's side of ``Connection``.

    Writes are combined: one for the output of a read, and one per loop iteration for finished handlers.
    """

    def __init__(self, host: ProtocolHost, peer: object) -> None:
        """``peer`` is the address from which the connection was accepted.

        The socket cannot report it after a reset by the peer, although it still returns the received bytes.
        """
        self._host = host
        self.peer = _peer(peer)
        self.address = address_of(peer)
        self.is_local = self.address == LOOPBACK
        self._pipe: TlsPipe | None = None
        self._is_first = True
        self._is_flush_due = False
        self._is_write_due = False  # a write is scheduled for the next loop iteration
        self._unsent_held = 0  # unsent bytes in the write buffer, as counted in the account
        self._is_reading = True
        self._is_closing = False
        self._is_waiting = False  # see ``Backpressure``
        self._much = 0  # bytes of large reads since the last pause for others
        self._is_behind = False  # input waits in the connection, or in the pipe
        self._due_s = math.inf  # no call has an earlier deadline
        self._lingering: asyncio.TimerHandle | None = None
        self._leaving: asyncio.TimerHandle | None = None
        self._place = AdmissionPlace.NOWHERE
        self.is_operators = False

    # -- called by the loop --------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport) or hasattr(transport, "write")
        self._transport: asyncio.Transport = transport  # type: ignore[assignment]  # uvloop's is a class of its own
        self._loop = asyncio.get_running_loop()
        host = self._host
        now_s = host.monotonic_s()
        self._accounts: dict[tuple[str, bool], Account] = {}
        self._lists = host.lists.join(self.address)
        account = self._account_of("", False)
        self.connection = Connection(host.limits, account, self.peer, now_s, self._lists)
        self._out = self.connection.out
        self.calls = Calls(
            self.connection,
            host.methods,
            address=self.address,
            admit=host.admit,
            account_of=self._account_of,
            monotonic_s=host.monotonic_s,
            watch=self._watch,
            flush=self.flush,
            flush_soon=self.flush_soon,
        )
        self._made_s = self._heard_s = self._busy_s = now_s
        self._probed_s = self._drained_s = 0.0
        self._stalled_s = now_s  # time of the last check for stalled calls
        self._unsent = 0  # unsent bytes at that time
        self._unsent_s = now_s  # the last time when that number decreased
        self._place = host.joined(self)
        if self._place is AdmissionPlace.NOWHERE:
            self._transport.abort()
            return
        if self._place is AdmissionPlace.RESERVE:
            self.calls.admit = self._admit_operator
        self._transport.set_write_buffer_limits(high=host.limits.unsent_high)

    def data_received(self, data: bytes) -> None:
        self._heard_s = now_s = self._host.monotonic_s()
        if self._is_first:
            self._is_first = False
            if not self._choose(data[0]):
                return
        if self._pipe is not None:
            if not self._pipe.is_open or self._pipe.is_behind:  # a handshake costs a slice: one per loop iteration
                self._pipe.put(data)
                self._fall_behind()
                return
            text = self._decrypt(self._pipe, data)
            if self.is_behind:
                self._fall_behind()
            if not text:
                return
            data = text
        connection = self.connection
        connection.receive(data, now_s)
        pause_s = self.calls.advance() if self._out.changed else 0.0
        if len(data) >= _READ_BYTES:
            self._much += len(data)
            if self._much >= _MUCH_BYTES:
                self._much, pause_s = 0, max(pause_s, _MUCH_PAUSE_S)
        if connection.is_behind or pause_s or self.calls.is_behind or len(data) >= _READ_BYTES:
            self._fall_behind(pause_s)
        self.flush()
        self._host.turns.heard(self, len(connection.streams))

    def read_on(self) -> None:
        """Read the next slice of the buffered input; then wait for another turn, or for the socket.

        The next slice follows without a pause if this one started calls or delivered much data, and no call was slow.
        """
        self._is_behind = False
        if self._is_closing:
            self._advance_last()
            return
        now_s = self._host.monotonic_s()
        connection, pipe = self.connection, self._pipe
        self.calls.has_begun, pause_s = False, 0.0
        if self.calls.is_behind:
            pass  # advance before reading more
        elif connection.is_behind:
            pause_s = _PAUSE_S
            connection.read_on(now_s)
        elif pipe is not None and pipe.is_behind:
            text = self._decrypt(pipe, b"")
            pause_s = _PAUSE_S if len(text) < _USEFUL_BYTES else 0.0
            if text:
                connection.receive(text, now_s)
        if self._out.changed:
            slow_s = self.calls.advance()
            pause_s = slow_s if self.calls.has_begun else max(slow_s, pause_s)
        if pause_s or self.is_behind:
            self._fall_behind(pause_s)
        self.flush()
        if not self._is_behind:
            self._resume_reading()
        self._host.turns.heard(self, len(connection.streams))

    @property
    def is_behind(self) -> bool:
        """True if input waits in the calls, in the connection or in TLS."""
        return self.calls.is_behind or self.connection.is_behind or (self._pipe is not None and self._pipe.is_behind)

    def _fall_behind(self, pause_s: float = 0.0) -> None:
        if not self._is_behind:
            self._is_behind = True
            if not self._is_closing:
                self._transport.pause_reading()
            self._host.slices.wait(self, pause_s)

    def _advance_last(self) -> None:
        """Cancel the calls of a disconnected client, a limited number per loop iteration."""
        pause_s = self.calls.advance()
        if self.calls.is_behind:
            self._fall_behind(pause_s)

    def _resume_reading(self) -> None:
        if self._is_reading and not (self._is_behind or self._is_waiting or self._is_closing):
            self._transport.resume_reading()

    def use(self) -> tuple[ConnectionUse, float]:
        """Return the use of the connection, and the monotonic time of its start."""
        connection = self.connection
        if self._is_closing or connection.is_over:
            return ConnectionUse.LEAVING, self._made_s
        if not connection.is_ready:
            return ConnectionUse.SILENT, self._made_s
        for number, stream in enumerate(connection.streams.values()):
            if stream.is_ended or stream.task is not None or number >= _STREAMS_LOOKED_AT:
                return ConnectionUse.BUSY, self._heard_s
        return (ConnectionUse.UNFINISHED if connection.streams else ConnectionUse.IDLE), self._heard_s

    def pause_writing(self) -> None:
        self._out.is_paused = True
        self._hold_unsent(self._transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        self._out.is_paused = False
        self._hold_unsent(0)
        self._write_more()

    def _hold_unsent(self, size: int) -> None:
        self._out.hold_input(size - self._unsent_held)
        self._unsent_held = size

    def _write_more(self) -> None:
        """Queue pending data of streams that the windows allow, and write it."""
        self._is_write_due = False
        if self._is_closing:
            return
        self._out.pump()
        pause_s = self.calls.advance()
        if self.calls.is_behind:
            self._fall_behind(pause_s)
        self.flush()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        self._is_closing = True
        self.connection.lose()
        self._advance_last()
        self._out.parts.clear()
        self._hold_unsent(0)
        for account in self._accounts.values():
            self._host.accounts.close(account)
        for timer in (self._leaving, self._lingering):
            if timer is not None:
                timer.cancel()
        self._pipe = None
        self._host.lists.leave(self.address)
        if self._place is not AdmissionPlace.NOWHERE:
            self._host.left(self)

    # -- called by the server ------------------------------------------------------------------------------------------

    def check(self, now_s: float) -> None:
        """Apply the time limits: probe silent clients, and close idle, stalled and old connections."""
        limits = self._host.limits
        connection, control = self.connection, self.connection.control
        if self._ends_for_certificate() or not self._is_prefaced(now_s):
            return
        if self._place is AdmissionPlace.RESERVE and not self.is_operators and now_s - self._made_s > limits.operator_s:
            self.abort("reserved_for_operators")
            return
        connection.check(now_s)
        if self._is_waiting or self._is_behind:
            self._heard_s = now_s  # unread input may be waiting
        if self._heard_s > self._probed_s:
            control.is_probing = False  # any frame proves that it is alive
        if control.is_probing:
            if now_s - self._probed_s > limits.ping_answer_s:
                self.abort("peer_vanished")
                return
        elif now_s - self._heard_s > limits.ping_after_s:
            self._probed_s = now_s
            control.probe()
        if connection.streams:
            self._busy_s = now_s
        self._look_for_stalled(now_s)
        is_idle = limits.idle_s is not None and now_s - self._busy_s > limits.idle_s
        is_old = limits.age_s is not None and now_s - self._made_s > limits.age_s
        if (is_idle or is_old) and not control.is_draining:
            self.drain(now_s)
        if control.is_draining and now_s - self._drained_s > limits.age_grace_s:
            self.finish()
        self.flush()

    def _is_prefaced(self, now_s: float) -> bool:
        if not self.connection.is_ready and now_s - self._made_s > self._host.limits.preface_s:
            self.abort("preface_timeout")
        return self.connection.is_ready

    def _look_for_stalled(self, now_s: float) -> None:
        if now_s - self._stalled_s <= self._host.limits.request_s / _STALLED_LOOKS:
            return
        self._stalled_s = now_s
        self.calls.end_stalled(now_s, is_read=self._is_reading and not self._is_waiting)
        if self._is_deaf(now_s):
            self.abort("answers_not_taken")

    def _is_deaf(self, now_s: float) -> bool:
        """Return True if the peer has read none of the written bytes for longer than the time limit of a request."""
        unsent = self._transport.get_write_buffer_size()
        if not unsent or unsent < self._unsent or not self._out.is_paused:
            self._unsent_s = now_s
        self._unsent = unsent
        return now_s - self._unsent_s > self._host.limits.request_s

    def _account_of(self, key: str, is_operator: bool) -> Account:
        account = self._accounts.get((key, is_operator))
        if account is None:
            account = self._host.accounts.open(self.address, key, self._let_go, is_operator=is_operator)
            self._accounts[key, is_operator] = account
        return account

    def _let_go(self, account: Account) -> None:
        self.calls.let_go(account)

    def _admit_operator(self, path: str, headers: RequestHeaders, address: str) -> Admission:
        """Admit a call on a connection in the reserve, as ``Admit``; refuse callers other than operators."""
        admission = self._host.admit(path, headers, address)
        if not admission.is_operator:
            text = "all connections are taken; the last ones of this host are kept for operators and health checks"
            raise CallEnded(Status.RESOURCE_EXHAUSTED, text)
        self.is_operators = True
        return admission

    def drain(self, now_s: float) -> None:
        """Send the first GOAWAY, and close when the calls have ended."""
        if not self.connection.is_ready:
            self.abort("drained")
            return
        self._drained_s = now_s
        self.connection.control.drain()
        self.flush()

    def finish(self) -> None:
        """End the remaining calls, and close."""
        if self._is_closing:
            return
        self.connection.control.finish(self.connection.last_id)
        self.calls.abandon(Status.UNAVAILABLE, "the server is going away")
        self.flush()

    def turn_away(self, text: str) -> None:
        """Refuse the open calls as not processed, and close: gRPC clients repeat them on another connection."""
        if self._is_closing:
            return
        self.connection.control.turn_away(text)
        self.calls.refuse()
        self.flush()

    def expire(self, now_s: float) -> float | None:
        """End calls whose deadline has passed; return the next deadline."""
        if now_s < self._due_s:  # no deadline has passed
            return None if self._due_s == math.inf else self._due_s
        next_s = self.calls.expire(now_s)
        self._due_s = math.inf if next_s is None else next_s
        self.flush()
        return next_s

    def _watch(self, at_s: float) -> None:
        if at_s < self._due_s:
            self._due_s = at_s
            self._host.watch(at_s)

    def pause(self) -> None:
        """Stop reading, as ``Reader.pause``."""
        self._is_waiting = True
        self._transport.pause_reading()

    def resume(self) -> None:
        """Resume reading, as ``Reader.resume``."""
        self._is_waiting = False
        self._resume_reading()

    def make_room(self) -> None:
        """Close for a new connection: at once, with a GOAWAY if the peer has completed its preface."""
        if self.connection.is_ready:
            self.finish()
            self._leave()
        else:
            self.abort("room_for_another")

    def abort(self, why: str) -> None:
        """Close without a GOAWAY."""
        log.debug("connection_aborted", peer=self.peer, why=why)
        self._is_closing = True
        self._transport.abort()

    # -- writing -------------------------------------------------------------------------------------------------------

    def flush_soon(self) -> None:
        """Write queued bytes at the end of the loop iteration."""
        if not self._is_flush_due:
            self._is_flush_due = True
            self._loop.call_soon(self.flush)

    def flush(self) -> None:
        """Write queued bytes, and close if the connection is over."""
        self._is_flush_due = False
        if self._is_closing:
            self._out.parts.clear()
            return
        is_over = self.connection.is_over
        if self._out.is_paused and not is_over:
            # Only answers to PINGs and similar frames are queued now: read no more from a peer that does not read them.
            if self._is_reading and self._out.part_bytes > self._host.limits.control_unsent_max:
                self._is_reading = False
                self._transport.pause_reading()
            return
        if self._out.parts and not self._is_first and (self._pipe is None or self._pipe.is_open):
            self._write(self._out.take())
        if self._out.blocked and self._out.may_queue and not self._is_write_due:
            self._is_write_due = True  # one write per loop iteration, so that others have their turn
            self._loop.call_soon(self._write_more)
        if not self._is_reading and not self._out.is_paused:
            self._is_reading = True
            self._resume_reading()
        if is_over:
            self._close()
        elif self._leaving is None and self.connection.is_leaving:
            self._leaving = self._loop.call_later(_LEAVE_S, self._leave)

    def _leave(self) -> None:
        """Close without waiting for the peer's half-open streams."""
        self.connection.leave()
        self.flush()

    def _write(self, data: bytes) -> None:
        if self._pipe is not None:
            try:
                self._pipe.send(data)
            except TlsFault as fault:
                self.abort(str(fault))
                return
            data = self._pipe.take()
        try:
            self._transport.write(data)
        except RuntimeError:  # uvloop raises it for a reset connection; connection_lost is called in the next iteration
            log.debug("connection_already_closed", peer=self.peer)

    def _close(self) -> None:
        fault = self.connection.fault
        if fault is not None:
            log.debug("connection_ended", peer=self.peer, code=fault.code.name, why=fault.text)
        self.calls.advance()
        self._is_closing = True
        self._transport.close()  # after the written bytes
        self._lingering = self._loop.call_later(_LINGER_S, self._transport.abort)

    # -- TLS -----------------------------------------------------------------------------------------------------------

    def _choose(self, first: int) -> bool:
        """Distinguish TLS from plain text by the first byte; return False if the connection is refused."""
        tls = self._host.tls
        if tls is not None and first == HANDSHAKE:
            try:
                self._pipe = TlsPipe(tls())
            except (OSError, ValueError):  # ssl.SSLError is an OSError
                log.exception("certificate_unreadable")
                self.abort("no certificate")
                return False
        elif not self._may_speak_plain():
            self.abort("plain text where TLS is required")
            return False
        return True

    def _may_speak_plain(self) -> bool:
        to = self._host.plain_served_to
        return to == "all" or (to == "loopback" and self.is_local)

    def _ends_for_certificate(self) -> bool:
        """End the connection if its client's certificate is no longer accepted; return True if so."""
        pipe = self._pipe
        if pipe is None or not pipe.is_open or self._is_closing:
            return False
        if not (fault := self._host.certificate_fault(pipe.context, pipe.until_s)):
            return False
        log.warning("client_certificate_refused", peer=self.peer, reason=fault)
        self.make_room()
        return True

    def _decrypt(self, pipe: TlsPipe, data: bytes) -> bytes:
        was_open = pipe.is_open
        try:
            text = pipe.receive(data)
        except TlsFault as fault:
            self._transport.write(pipe.take())
            self.connection.fault = ConnectionFault(Code.INADEQUATE_SECURITY, str(fault))
            self._out.parts.clear()
            self._close()
            return b""
        if answer := pipe.take():
            self._transport.write(answer)
        if not was_open and self._ends_for_certificate():  # TLS does not verify a resumed session again
            return b""
        if pipe.is_ended:
            self._transport.close()
        elif pipe.is_open and not text:
            self.flush()  # the handshake is complete: send the greeting
        return text


def _peer(address: object) -> str:
    if isinstance(address, tuple) and len(address) >= 2:
        host, port = address[:2]
        return f"ipv6:[{host}]:{port}" if ":" in str(host) else f"ipv4:{host}:{port}"
    return "unix:"
