"""TLS without a socket: ciphertext in and out, so that one port serves TLS and plain text.

The event loop's own TLS has to be chosen before the first byte. This implementation starts after that byte, with any
loop.
"""

from __future__ import annotations

import math
import ssl
from collections.abc import Callable
from typing import Final

from dmq.http2.errors import Http2Error

HANDSHAKE: Final = 0x16  # the first byte of every TLS connection; plain text begins with the P of HTTP/2's preface
_READ_BYTES: Final = 256 * 1024
_SLICE_BYTES: Final = 64 * 1024
_HANDSHAKE_SLICE_BYTES: Final = 16 * 1024
_SLICE_RECORDS: Final = 256


# Returns the reason why a connection has to end; empty if it may continue. Arguments: the context that accepted the
# client, and the expiry of the client's certificate in epoch seconds.
CertificateFault = Callable[[ssl.SSLContext, float], str]


def no_certificate_fault(_context: ssl.SSLContext, _until_s: float) -> str:
    """Accept every certificate for the duration of its connection."""
    return ""


class TlsFault(Http2Error):
    """TLS with the peer failed. ``take`` still returns the alert to be sent."""


class TlsPipe:
    """The server's side of one TLS connection; ALPN must select h2."""

    def __init__(self, context: ssl.SSLContext) -> None:
        self._incoming = ssl.MemoryBIO()
        self._outgoing = ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=True)
        self.context = context
        self.until_s = math.inf  # expiry of the client's certificate, in epoch seconds
        self.is_open = False
        self.is_ended = False  # the peer has sent close_notify
        self._ahead = b""  # ciphertext for the next slice
        self._has_more = False  # records that are not decrypted yet

    @property
    def is_behind(self) -> bool:
        """True if ciphertext waits for the next ``receive``."""
        return self._has_more or bool(self._ahead)

    def put(self, data: bytes) -> None:
        """Buffer ciphertext for the next ``receive``."""
        self._ahead += data

    def receive(self, data: bytes) -> bytes:
        """Accept ciphertext and return the plain text of one slice; ``is_behind`` if there is more. Raises TlsFault.

        The cost of a slice is bounded by its bytes and by its number of records, because records may be tiny.
        """
        if self._ahead:
            data = self._ahead + data
        slice_bytes = _SLICE_BYTES if self.is_open else _HANDSHAKE_SLICE_BYTES
        self._ahead = data[slice_bytes:]
        self._has_more = False
        self._incoming.write(data[:slice_bytes] if self._ahead else data)
        text = []
        try:
            if not self.is_open:
                self._tls.do_handshake()
                self._check_protocol()
            for _ in range(_SLICE_RECORDS):
                piece = self._tls.read(_READ_BYTES)
                if not piece:
                    self.is_ended = True
                    break
                text.append(piece)
            else:
                self._has_more = True
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLZeroReturnError:
            self.is_ended = True
        except ssl.SSLError as error:
            raise TlsFault(error.reason or "TLS failed") from error
        return text[0] if len(text) == 1 else b"".join(text)

    def send(self, text: bytes) -> None:
        """Encrypt; ``take`` returns the ciphertext. Raises TlsFault."""
        try:
            self._tls.write(text)
        except ssl.SSLError as error:
            raise TlsFault(error.reason or "TLS failed") from error

    def take(self) -> bytes:
        """Return the ciphertext to be written: application data, handshake or alert."""
        return self._outgoing.read() if self._outgoing.pending else b""

    def _check_protocol(self) -> None:
        self.is_open = True
        if shown := self._tls.getpeercert():  # empty unless the certificate is verified
            self.until_s = float(ssl.cert_time_to_seconds(str(shown["notAfter"])))
        if self._tls.selected_alpn_protocol() != "h2":
            raise TlsFault("the peer does not offer h2 by ALPN")


def make_context(certificate: str, key: str, client_ca: str = "") -> ssl.SSLContext:
    """Return a context for PEM files; with ``client_ca`` clients must present a certificate that it signed.

    Raises OSError or ssl.SSLError, also for a key with a passphrase.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_COMPRESSION
    context.load_cert_chain(certificate, key, password="")  # otherwise OpenSSL prompts at a terminal
    context.set_alpn_protocols(["h2"])
    if client_ca:
        context.load_verify_locations(client_ca)
        context.verify_mode = ssl.CERT_REQUIRED
    return context
