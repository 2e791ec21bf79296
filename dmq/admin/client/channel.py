"""gRPC channel to a daemon, with or without TLS, with error texts that name the remedy."""

from __future__ import annotations

import ssl
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc

from dmq.config.contexts import ClientTls, ContextError

# A restarted daemon is reconnected within a second; gRPC's default is up to two minutes. A host that
# does not answer at all is given up after five seconds instead of twenty.
_RECONNECT = (
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.min_reconnect_backoff_ms", 5_000),
)


def open_channel(address: str, tls: ClientTls | None, options: Sequence[tuple[str, object]]) -> grpc.Channel:
    """Return a channel, which connects at its first call. Raise ``ContextError`` if a file of ``tls`` cannot be
    used.
    """
    if tls is None:
        return grpc.insecure_channel(address, options=(*options, *_RECONNECT))
    return grpc.secure_channel(address, _credentials(tls), options=(*options, *_RECONNECT, *_server_name(tls)))


def open_async_channel(address: str, tls: ClientTls | None, options: Sequence[tuple[str, Any]]) -> grpc.aio.Channel:
    """Return the same channel for an event loop."""
    if tls is None:
        return grpc.aio.insecure_channel(address, options=(*options, *_RECONNECT))
    return grpc.aio.secure_channel(address, _credentials(tls), options=(*options, *_RECONNECT, *_server_name(tls)))


def _credentials(tls: ClientTls) -> grpc.ChannelCredentials:
    credentials = grpc.ssl_channel_credentials(
        root_certificates=_read(tls.ca, "the authority's certificate"),
        private_key=_read(tls.key, "the key of the client certificate"),
        certificate_chain=_read(tls.certificate, "the client certificate"),
    )
    _check(tls)
    return credentials


def _server_name(tls: ClientTls) -> tuple[tuple[str, str], ...]:
    return (("grpc.ssl_target_name_override", tls.server_name),) if tls.server_name else ()


def told_of_tls(address: str, tls: ClientTls | None, details: str) -> str:
    """Return the TLS error of a failed call, derived from the details of gRPC; empty if the cause is another one."""
    if tls is None:
        if "Connection reset" in details or "Socket closed" in details:
            return f"{address} ended the connection at once; if it requires TLS, set --tls-ca"
        return ""
    trusted = f"the authority {tls.ca}" if tls.ca else "an authority that this host knows"
    shown = f"the certificate of {address}"
    if "certificate has expired" in details:
        return f"{shown} has expired: the daemon needs a new one (it reads its files again by itself)"
    if "certificate is not yet valid" in details:
        return f"{shown} is not valid yet: are the clocks of both hosts right?"
    if "CERTIFICATE_VERIFY_FAILED" in details:
        return f"{shown} is not signed by {trusted}: name the one that signed it with --tls-ca"
    if "Hostname Verification" in details:
        name = tls.server_name or address.rpartition(":")[0]
        return f"{shown} is not for {name!r}: name one that it is for with --tls-server-name"
    if "WRONG_VERSION_NUMBER" in details:
        return f"{address} speaks no TLS: leave the options of TLS out (or is it another port?)"
    if "handshake" in details or "Unwrap failed" in details or "Connection reset" in details:
        if tls.certificate is None:
            return f"{address} ended the TLS connection: it wants a client certificate, --tls-cert with --tls-key"
        return (
            f"{address} refuses the client certificate {tls.certificate}: it has expired, or the daemon's tls_client_ca"
            " did not sign it"
        )
    return ""


def _read(path: Path | None, what: str) -> bytes | None:
    if path is None:
        return None
    try:
        return path.read_bytes()
    except OSError as error:
        raise ContextError(f"{what} {path} cannot be read: {error.strerror}") from error


def _check(tls: ClientTls) -> None:
    """Raise for unusable TLS files, which gRPC reports only as a connection failure."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        if tls.ca is not None:
            context.load_verify_locations(cafile=tls.ca)
    except (OSError, ssl.SSLError):
        raise ContextError(f"the authority's certificate {tls.ca} cannot be used; expected a PEM file") from None
    try:
        if tls.certificate is not None:
            context.load_cert_chain(tls.certificate, tls.key, password="")
    except (OSError, ssl.SSLError, ValueError) as error:
        why = getattr(error, "reason", None) or "two PEM files are expected, the key without a password"
        files = f"the client certificate {tls.certificate} with the key {tls.key}"
        raise ContextError(f"{files} cannot be used: {why}") from None
