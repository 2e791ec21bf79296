"""One HTTP POST to a configured URL, for any behaviour of its receiver: one deadline, no redirect, no body read.

The addresses of the name are checked, and the connection goes to a checked address. So an answer of the name server
that changes between the check and the connection has no effect. ``http.client`` accepts a connection made by its
caller. HTTP libraries with clients of their own resolve the name themselves, and bound only the time of each read.
"""

from __future__ import annotations

import ipaddress
import socket
import ssl
import threading
from collections.abc import Mapping
from contextlib import suppress
from http.client import HTTPConnection, HTTPException
from typing import Final, NamedTuple

from broker_adapter.runtime.clock import Clock
from dmq.config.destinations import WebhookUrl
from dmq.errors import DmqError

DEADLINE_S: Final = 10.0  # from the first connection attempt to the status of the answer
_ADDRESSES_MAX: Final = 4
_WITH_IPV4 = tuple(ipaddress.IPv6Network(each) for each in ("64:ff9b::/96", "::/96"))  # NAT64, IPv4-compatible
_IpAddress = ipaddress.IPv4Address | ipaddress.IPv6Address


class NotDelivered(DmqError):
    """The notification was not delivered, or its receiver did not confirm it."""

    retriable = True


class ReceiverAddress(NamedTuple):
    """Checked address of a receiver."""

    family: socket.AddressFamily
    address: tuple[str | int, ...]


def is_public(text: str) -> bool:
    """Return True for an address of the Internet, False for a private, local or reserved one.

    An IPv4 address within an IPv6 address counts as that IPv4 address.
    """
    address: _IpAddress = ipaddress.ip_address(text.partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address):
        inner = address.ipv4_mapped or address.sixtofour or (address.teredo or (None, None))[1]
        if inner is None and any(address in each for each in _WITH_IPV4):
            inner = ipaddress.IPv4Address(int(address) & 0xFFFF_FFFF)
        address = inner or address
    return address.is_global and not address.is_multicast


def resolve(url: WebhookUrl, *, allows_private: bool) -> list[ReceiverAddress]:
    """Return the addresses of a receiver. Raise ``NotDelivered`` if the name has none, or one that is not allowed."""
    try:
        found = socket.getaddrinfo(url.host, url.port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise NotDelivered(f"{url}: the host name is not known: {_reason(error)}") from error
    places = [ReceiverAddress(family, address) for family, _, _, _, address in found if isinstance(address[0], str)]
    refused = [str(each.address[0]) for each in places if not allows_private and not is_public(str(each.address[0]))]
    if refused:
        why = "an address of a private network or of this host is not allowed; see webhook_private_addresses"
        raise NotDelivered(f"{url}: {refused[0]}: {why}")
    return places[:_ADDRESSES_MAX]


def post(
    url: WebhookUrl, headers: Mapping[str, str], body: bytes, *, clock: Clock, allows_private: bool, deadline_s: float
) -> None:
    """Send ``body``, and return if the answer has a status of 200 to 299; raise ``NotDelivered`` otherwise.

    The call blocks for ``deadline_s`` at most, after the name server has answered.
    """
    places = resolve(url, allows_private=allows_private)
    connection = _Connection(url, places, clock, clock.monotonic_s() + deadline_s)
    timer = threading.Timer(deadline_s, connection.cut)
    timer.daemon = True
    timer.start()
    try:
        connection.request("POST", url.target, body, dict(headers))
        status = connection.getresponse().status
        connection.check_cut()  # the library takes the end of the connection for that of the headers
    except (OSError, HTTPException, ValueError) as error:
        is_late = connection.is_cut or isinstance(error, TimeoutError)
        reason = f"no answer within {deadline_s:g} s" if is_late else _reason(error)
        raise NotDelivered(f"{url}: {reason}") from error
    finally:
        timer.cancel()
        connection.close()  # the answer has a body of any length; it is not read
    if not 200 <= status <= 299:
        hint = ": a redirect is not followed" if 300 <= status <= 399 else ""
        raise NotDelivered(f"{url}: answered with status {status}{hint}")


class _Connection(HTTPConnection):
    """Connection to a checked address. ``cut`` ends it from another thread, at any point of its work."""

    def __init__(self, url: WebhookUrl, places: list[ReceiverAddress], clock: Clock, ends_at_s: float) -> None:
        super().__init__(url.host, url.port)
        self.default_port = 443 if url.is_tls else 80
        self.is_cut = False
        self._url = url
        self._places = places
        self._clock = clock
        self._ends_at_s = ends_at_s

    def connect(self) -> None:
        """Connect to the first address that answers. The deadline includes the handshake of TLS."""
        self.sock = self._connected()
        if self._url.is_tls:
            context = ssl.create_default_context()
            wrapped = context.wrap_socket(self.sock, server_hostname=self._url.host, do_handshake_on_connect=False)
            self.sock = wrapped
            self.check_cut()
            wrapped.do_handshake()
        self.check_cut()

    def _connected(self) -> socket.socket:
        error: OSError = TimeoutError("timed out")
        for family, address in self._places:
            left_s = self._ends_at_s - self._clock.monotonic_s()
            if left_s <= 0:
                break
            made = socket.socket(family, socket.SOCK_STREAM)
            made.settimeout(left_s)
            try:
                made.connect(address)
            except OSError as failure:
                made.close()
                error = failure
            else:
                return made
        raise error

    def check_cut(self) -> None:
        """Raise ``TimeoutError`` if the connection was cut."""
        if self.is_cut:
            raise TimeoutError("timed out")

    def cut(self) -> None:
        """End the connection."""
        self.is_cut = True
        made = self.sock
        if made is not None:
            with suppress(OSError, ValueError):
                socket.socket.shutdown(made, socket.SHUT_RDWR)  # not that of TLS, which changes what the reader uses


def _reason(error: Exception) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"the certificate is not valid: {error.verify_message}"
    return str(getattr(error, "strerror", None) or str(error) or type(error).__name__)
