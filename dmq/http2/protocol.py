"""One client's socket on the event loop: bytes to the machine, bytes from it, and the clock's say in it."""

from __future__ import annotations

import asyncio
import math
import ssl
from collections.abc import Callable
from typing import Final, Literal, Protocol

import structlog

from dmq.http2.admission import Admission, Admit
from dmq.http2.backpressure import Backpressure
from dmq.http2.bounds import LOOPBACK, Account, Accounts, Shares, address_of
from dmq.http2.calls import Calls
from dmq.http2.connection import Connection
from dmq.http2.doors import Place, Use
from dmq.http2.errors import CallEnded, Code, ConnectionFault, Status
from dmq.http2.headers import RequestHeaders
from dmq.http2.limits import Limits
from dmq.http2.methods import Methods
from dmq.http2.slices import Slices
from dmq.http2.tls import HANDSHAKE, CertificateFault, TlsFault, TlsPipe

PlainServedTo = Literal["all", "loopback", "none"]

_STALLED_LOOKS: Final = 8  # as often it is looked for stalled calls in the time that they have
_LINGER_S: Final = 5.0  # for the last words, to a peer that may not read them
_LEAVE_S: Final = 0.5  # for the peer to end its halves of streams
_USEFUL_BYTES: Final = 16 * 1024  # of text in a slice of ciphertext
_READ_BYTES: Final = 64 * 1024  # who sent so much at once is read on in its turn: the loop would read on at length
_MUCH_BYTES: Final = 1024 * 1024  # in such reads, before others have
_MUCH_PAUSE_S: Final = 0.001
_PAUSE_S: Final = 0.002  # behind frames that begin no call: they are in no hurry
_STREAMS_LOOKED_AT: Final = 8  # to find out whether a connection serves any

log = structlog.get_logger("dmq.http2")


class Host(Protocol):
    """What the connections of a server share."""

    limits: Limits
    accounts: Accounts
    admit: Admit
    lists: Shares
    methods: Methods
    slices: Slices
    turns: Backpressure
    monotonic_s: Callable[[], float]
    tls: Callable[[], ssl.SSLContext] | None
    plain_served_to: PlainServedTo
    certificate_fault: CertificateFault

    def joined(self, client: ClientProtocol) -> Place:
        """A client is there: say where it is let in."""
        ...

    def left(self, client: ClientProtocol) -> None:
        """A client is gone."""
        ...

    def watch(self, at_s: float) -> None:
        """A call has a deadline."""
        ...


class ClientProtocol(asyncio.Protocol):
    """One connection: the loop's side of ``Connection``.

    Writes are collected: one for what a read brought about, one per turn of the loop for what handlers finished.
    """

    def __init__(self, host: Host, peer: object) -> None:
        """``peer`` is the address that the connection was accepted from.

        The socket does not know it any more if its peer has reset it meanwhile, though it still gives what was sent.
        """
        self._host = host
        self.peer = _peer(peer)
        self.address = address_of(peer)
        self.is_local = self.address == LOOPBACK
        self._pipe: TlsPipe | None = None
        self._is_first = True
        self._is_flush_due = False
        self._is_write_due = False  # more is to be written in the loop's next turn
        self._unsent_held = 0  # bytes that the socket has not taken, as the account counts them
        self._is_reading = True
        self._is_closing = False
        self._is_waiting = False  # see ``Backpressure``
        self._much = 0  # bytes of large reads since others last had a pause
        self._is_behind = False  # input waits in the connection, or in the pipe
        self._due_s = math.inf  # no call has a deadline before
        self._lingering: asyncio.TimerHandle | None = None
        self._leaving: asyncio.TimerHandle | None = None
        self._place = Place.NOWHERE
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
        self._stalled_s = now_s  # when it was last looked for stalled calls
        self._unsent = 0  # bytes that the socket did not take until then
        self._unsent_s = now_s  # when that last was less than before
        self._place = host.joined(self)
        if self._place is Place.NOWHERE:
            self._transport.abort()
            return
        if self._place is Place.RESERVE:
            self.calls.admit = self._admit_operator
        self._transport.set_write_buffer_limits(high=host.limits.unsent_high)

    def data_received(self, data: bytes) -> None:
        self._heard_s = now_s = self._host.monotonic_s()
        if self._is_first:
            self._is_first = False
            if not self._choose(data[0]):
                return
        if self._pipe is not None:
            if not self._pipe.is_open or self._pipe.is_behind:  # a handshake costs a slice: one in a turn of the loop
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
        """Read the next slice of the input that waits; then wait for another turn, or for the socket.

        There is a pause before the next one unless this one began a call or brought much, and no calls that take long.
        """
        self._is_behind = False
        if self._is_closing:
            self._advance_last()
            return
        now_s = self._host.monotonic_s()
        connection, pipe = self.connection, self._pipe
        self.calls.has_begun, pause_s = False, 0.0
        if self.calls.is_behind:
            pass  # before more is read
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
        """Input waits, in the calls, in the connection or in TLS."""
        return self.calls.is_behind or self.connection.is_behind or (self._pipe is not None and self._pipe.is_behind)

    def _fall_behind(self, pause_s: float = 0.0) -> None:
        if not self._is_behind:
            self._is_behind = True
            if not self._is_closing:
                self._transport.pause_reading()
            self._host.slices.wait(self, pause_s)

    def _advance_last(self) -> None:
        """See to the calls of a client that is gone, some in each turn of the loop: they are cancelled."""
        pause_s = self.calls.advance()
        if self.calls.is_behind:
            self._fall_behind(pause_s)

    def _resume_reading(self) -> None:
        if self._is_reading and not (self._is_behind or self._is_waiting or self._is_closing):
            self._transport.resume_reading()

    def use(self) -> tuple[Use, float]:
        """Return what the connection is used for, and since when."""
        connection = self.connection
        if self._is_closing or connection.is_over:
            return Use.LEAVING, self._made_s
        if not connection.is_ready:
            return Use.SILENT, self._made_s
        for number, stream in enumerate(connection.streams.values()):
            if stream.is_ended or stream.task is not None or number >= _STREAMS_LOOKED_AT:
                return Use.BUSY, self._heard_s
        return (Use.UNFINISHED if connection.streams else Use.IDLE), self._heard_s

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
        """Queue what waits in streams and may go now, and write it."""
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
        if self._place is not Place.NOWHERE:
            self._host.left(self)

    # -- called by the server ------------------------------------------------------------------------------------------

    def check(self, now_s: float) -> None:
        """Do what time asks for: see to clients that say nothing, that are idle, and that are here too long."""
        limits = self._host.limits
        connection, control = self.connection, self.connection.control
        if self._ends_for_certificate() or not self._is_prefaced(now_s):
            return
        if self._place is Place.RESERVE and not self.is_operators and now_s - self._made_s > limits.operator_s:
            self.abort("reserved_for_operators")
            return
        connection.check(now_s)
        if self._is_waiting or self._is_behind:
            self._heard_s = now_s  # it may have spoken
        if self._heard_s > self._probed_s:
            control.is_probing = False  # whatever it says, it is alive
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
        """Say whether the peer has taken nothing of what was written for as long as a request may take."""
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
        """As ``Admit``, of a connection in the reserve."""
        admission = self._host.admit(path, headers, address)
        if not admission.is_operator:
            text = "all connections are taken; the last ones of this host are kept for operators and health checks"
            raise CallEnded(Status.RESOURCE_EXHAUSTED, text)
        self.is_operators = True
        return admission

    def drain(self, now_s: float) -> None:
        """Ask the client to go elsewhere, and close when its calls are over."""
        if not self.connection.is_ready:
            self.abort("drained")
            return
        self._drained_s = now_s
        self.connection.control.drain()
        self.flush()

    def finish(self) -> None:
        """End what is left of the calls, and close."""
        if self._is_closing:
            return
        self.connection.control.finish(self.connection.last_id)
        self.calls.abandon(Status.UNAVAILABLE, "the server is going away")
        self.flush()

    def expire(self, now_s: float) -> float | None:
        """End calls whose deadline is over; return the next deadline."""
        if now_s < self._due_s:  # its streams need not be looked at
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
        """As ``Reader.pause``."""
        self._is_waiting = True
        self._transport.pause_reading()

    def resume(self) -> None:
        """As ``Reader.resume``."""
        self._is_waiting = False
        self._resume_reading()

    def make_room(self) -> None:
        """Close for the sake of another: at once, but not without a word to one that understands it."""
        if self.connection.is_ready:
            self.finish()
            self._leave()
        else:
            self.abort("room_for_another")

    def abort(self, why: str) -> None:
        """Close without a word."""
        log.debug("connection_aborted", peer=self.peer, why=why)
        self._is_closing = True
        self._transport.abort()

    # -- writing -------------------------------------------------------------------------------------------------------

    def flush_soon(self) -> None:
        """Write what is queued at the end of the loop's turn."""
        if not self._is_flush_due:
            self._is_flush_due = True
            self._loop.call_soon(self.flush)

    def flush(self) -> None:
        """Write what is queued, and close if that was all."""
        self._is_flush_due = False
        if self._is_closing:
            self._out.parts.clear()
            return
        is_over = self.connection.is_over
        if self._out.is_paused and not is_over:
            # What is queued now are answers to PINGs and the like: read no more of them from one who does not read.
            if self._is_reading and self._out.part_bytes > self._host.limits.control_unsent_max:
                self._is_reading = False
                self._transport.pause_reading()
            return
        if self._out.parts and not self._is_first and (self._pipe is None or self._pipe.is_open):
            self._write(self._out.take())
        if self._out.blocked and self._out.may_queue and not self._is_write_due:
            self._is_write_due = True  # a turn of the loop for each write: others have theirs meanwhile
            self._loop.call_soon(self._write_more)
        if not self._is_reading and not self._out.is_paused:
            self._is_reading = True
            self._resume_reading()
        if is_over:
            self._close()
        elif self._leaving is None and self.connection.is_leaving:
            self._leaving = self._loop.call_later(_LEAVE_S, self._leave)

    def _leave(self) -> None:
        """Close, whatever the peer has not ended."""
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
        except RuntimeError:  # uvloop's, of a connection that was reset; its end is heard of in the next turn
            log.debug("connection_closed_already", peer=self.peer)

    def _close(self) -> None:
        fault = self.connection.fault
        if fault is not None:
            log.debug("connection_ended", peer=self.peer, code=fault.code.name, why=fault.text)
        self.calls.advance()
        self._is_closing = True
        self._transport.close()  # behind what is written
        self._lingering = self._loop.call_later(_LINGER_S, self._transport.abort)

    # -- TLS -----------------------------------------------------------------------------------------------------------

    def _choose(self, first: int) -> bool:
        """Tell TLS from plain text by the first byte."""
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
        """End the connection if its client would not be accepted any more; return True if so."""
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
        if not was_open and self._ends_for_certificate():  # a session that is resumed is not verified again
            return b""
        if pipe.is_ended:
            self._transport.close()
        elif pipe.is_open and not text:
            self.flush()  # the handshake is done: greet
        return text


def _peer(address: object) -> str:
    if isinstance(address, tuple) and len(address) >= 2:
        host, port = address[:2]
        return f"ipv6:[{host}]:{port}" if ":" in str(host) else f"ipv4:{host}:{port}"
    return "unix:"
