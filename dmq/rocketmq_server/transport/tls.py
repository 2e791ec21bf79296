"""TLS certificates, configured or self-signed; reloaded when their files change.

Java and Go clients use TLS by default and accept any certificate. To authenticate the server, configure a certificate
signed by an authority.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import ssl
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from weakref import WeakSet

import structlog

from broker_adapter.runtime.clock import Clock
from dmq.errors import DmqError
from dmq.http2 import make_context

log = structlog.get_logger("dmq.rocketmq_server")

_VALID_DAYS = 3650
_WARN_DAYS = 30
_LOOK_S = 1.0  # interval of the checks for changed files
_Stamp = tuple[tuple[int, int, int], ...]


class CertificateError(DmqError):
    """A certificate or key that cannot be used; the text names it and the reason."""


@dataclass(slots=True)
class Certificates:
    """Source of the TLS context for the next connection.

    Changed files are reloaded. While they are invalid, connections use the last valid ones; the log and ``problem``
    report it. With ``client_ca``, clients must present a certificate that it signed. ``fault`` returns the reason why a
    connection has to end.
    """

    certificate: Path
    key: Path
    clock: Clock
    client_ca: Path | None = None
    tells_expiry: bool = True  # False for a self-signed one: not worth loading the library
    tells: bool = True  # False if another process logs it
    problem: str = field(default="", init=False)
    _context: ssl.SSLContext | None = field(default=None, init=False)
    _earlier: WeakSet[ssl.SSLContext] = field(default_factory=WeakSet, init=False)
    _withdrawn: WeakSet[ssl.SSLContext] = field(default_factory=WeakSet, init=False)  # trusted a removed authority
    _stamp: _Stamp = field(default=(), init=False)
    _look_at_s: float = field(default=0.0, init=False)

    def context(self) -> ssl.SSLContext:
        """Return the context; raise ``CertificateError`` if no valid one was ever loaded."""
        now_s = self.clock.monotonic_s()
        if self._context is not None and now_s < self._look_at_s:
            return self._context
        self._look_at_s = now_s + _LOOK_S
        stamp = self._files()
        if self._context is None or stamp != self._stamp:
            self._stamp = stamp
            try:
                self._use(self._load())
            except CertificateError as error:
                if self._context is None:
                    raise
                if self.tells:
                    log.error("certificate_load_failed", error=str(error), still="the one before")  # noqa: TRY400
                self.problem = f"{error}; the one before it is used"
            else:
                self.problem = ""
        assert self._context is not None
        return self._context

    def fault(self, context: ssl.SSLContext, until_s: float) -> str:
        """Return the reason, in one word, why a connection that ``context`` accepted has to end, or an empty string.

        ``until_s`` is the expiry of its client's certificate, in epoch seconds. After the removal of an authority all
        earlier connections end. Clients with a certificate of another authority can reconnect at once.
        """
        if self.clock.now_ms() > until_s * 1000:
            return "expired"
        self.context()
        return "authority_removed" if context in self._withdrawn else ""

    def _use(self, context: ssl.SSLContext) -> None:
        authorities = set(context.get_ca_certs(binary_form=True))
        self._withdrawn.update(each for each in self._earlier if not authorities.issuperset(each.get_ca_certs(True)))
        self._earlier.add(context)
        self._context = context

    def _files(self) -> _Stamp:
        found = []
        for path in (self.certificate, self.key, self.client_ca or self.certificate):
            with suppress(OSError):
                stat = path.stat()
                found.append((stat.st_mtime_ns, stat.st_size, stat.st_ino))
        return tuple(found)

    def _load(self) -> ssl.SSLContext:
        try:
            context = make_context(str(self.certificate), str(self.key), str(self.client_ca or ""))
        except (OSError, ssl.SSLError) as error:
            why = getattr(error, "reason", None) or getattr(error, "strerror", None) or str(error)
            if _has_passphrase(self.key):
                why = (
                    "the key has a passphrase, which the daemon cannot enter: write it without one "
                    "(openssl pkey -in KEY -out NEW), to be read by the daemon's user only"
                )
            elif "PEM lib" in why:  # the only reason that the library gives
                why = "they are not a certificate and a key in PEM"
            clients = f" and {self.client_ca}, for clients," if self.client_ca else ""
            raise CertificateError(
                f"the certificate {self.certificate} with {self.key}{clients} cannot be used: {why}"
            ) from error
        if self.tells_expiry:
            until = _valid_until(self.certificate)
            left = until - _date(self.clock.now_ms())
            if left < timedelta(days=_WARN_DAYS):
                log.warning("certificate_expires", path=str(self.certificate), until=until.isoformat(), days=left.days)
        return context


def _has_passphrase(key: Path) -> bool:
    with suppress(OSError):
        return b"ENCRYPTED" in key.read_bytes()[:4096]
    return False


def self_signed(directory: Path, now_ms: int) -> tuple[Path, Path]:
    """Return certificate and key in ``directory``; create them the first time, for this host's names, valid for ten
    years.
    """
    certificate, key = directory / "certificate.pem", directory / "key.pem"
    if not (certificate.exists() and key.exists()):
        text, secret = _make(_date(now_ms))
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            certificate.unlink(missing_ok=True)  # a crash must not leave it with a key that does not match
            _write(key, secret, 0o600)
            _write(certificate, text, 0o644)
        except OSError as error:
            raise CertificateError(f"{directory} cannot be written: {error.strerror}") from error
        log.info("certificate_created", path=str(certificate))
    return certificate, key


def _make(now: datetime) -> tuple[bytes, bytes]:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "rock-dmq")])
    names = {"localhost", socket.gethostname()}
    addresses = [ipaddress.ip_address("127.0.0.1"), ipaddress.ip_address("::1")]
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=_VALID_DAYS))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(
            x509.SubjectAlternativeName(
                [*map(x509.DNSName, sorted(names)), *(x509.IPAddress(address) for address in addresses)]
            ),
            critical=False,
        )
        .sign(key, hashes.SHA256())
    )
    secret = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return made.public_bytes(serialization.Encoding.PEM), secret


def _date(at_ms: int) -> datetime:
    return datetime.fromtimestamp(at_ms / 1000, UTC)


def _write(path: Path, content: bytes, mode: int) -> None:
    part = path.with_name(path.name + ".tmp")
    part.unlink(missing_ok=True)
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)


def _valid_until(path: Path) -> datetime:
    from cryptography import x509

    try:
        return x509.load_pem_x509_certificate(path.read_bytes()).not_valid_after_utc.astimezone(UTC)
    except (OSError, ValueError) as error:
        raise CertificateError(f"the certificate {path} cannot be read: {error}") from error
