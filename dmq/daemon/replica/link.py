"""Port and connections of the direct link: addresses, certificates, authority."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Callable

from broker_adapter.runtime.clock import Clock
from dmq.config.settings import DaemonConfig
from dmq.config.units import Address, parse_address
from dmq.daemon.server import certificate_files
from dmq.errors import DmqError
from dmq.replication.link import LinkBroken, LinkChannel, LinkListener, dial
from dmq.rocketmq_server.transport.tls import Certificates


class LinkPort:
    """Port on which a standby receives batches."""

    def __init__(self, address: Address, context: Callable[[], ssl.SSLContext | None]) -> None:
        self._address = address
        self._context = context
        self._listener: LinkListener | None = None

    def start(self, serve: Callable[[LinkChannel], None]) -> str:
        """Listen, and return the address for the primary."""
        self._listener = LinkListener(self._address.host, self._address.port, self._context)
        return public_address(Address(self._address.host, self._listener.start(serve)))

    def close(self) -> None:
        """Close the port and all connections."""
        if self._listener is not None:
            self._listener.close()


def server_context(config: DaemonConfig, clock: Clock) -> Callable[[], ssl.SSLContext | None]:
    """Return the source of the TLS context of the port, which reloads changed files; it returns None for plain TCP."""
    files, authority = certificate_files(config), config.replica_link_ca
    if authority is None or files is None:
        return lambda: None
    return Certificates(*files, clock, authority, tells_expiry=False).context


def dial_standby(config: DaemonConfig, address: str) -> LinkChannel:
    """Connect to a standby; raise ``LinkBroken``. The address is from its registration."""
    try:
        host, port = parse_address(address)
        return dial(host, port, client_context(config))
    except (DmqError, ValueError) as error:
        raise LinkBroken(str(error)) from error


def client_context(config: DaemonConfig) -> ssl.SSLContext | None:
    """Return the TLS context of a connection to a standby, None for plain TCP. Raise ``DmqError``."""
    files, authority = certificate_files(config), config.replica_link_ca
    if authority is None or files is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(*files, password="")
        context.load_verify_locations(authority)
    except (OSError, ssl.SSLError) as error:
        why = getattr(error, "reason", None) or getattr(error, "strerror", None) or str(error)
        raise DmqError(f"the certificate {files[0]} or replica_link_ca {authority} cannot be used: {why}") from error
    return context


def public_address(listen: Address) -> str:
    """Return the address for other hosts: with the name of this host if ``listen`` is all of its addresses."""
    return str(Address(socket.gethostname(), listen.port)) if listen.host in ("0.0.0.0", "::") else str(listen)  # noqa: S104
