"""Files that count while the daemon serves: of access keys, of certificates. Looked at again and again.

A new one that is wrong is told at once, in the log and by ``dmq status``, and not to the client that comes next.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from broker_adapter.runtime.clock import Clock
from dmq.acl.file import KeyFile
from dmq.config.settings import DaemonConfig
from dmq.errors import DmqError
from dmq.rocketmq_server.transport.tls import Certificates, self_signed

_LOOK_S = 1.0


@dataclass(frozen=True, slots=True)
class Files:
    """Those that this daemon has."""

    keys: KeyFile | None
    certificates: Certificates | None

    @classmethod
    def of(cls, config: DaemonConfig, clock: Clock) -> Files:
        """Read them all; the certificate is made, if it is one that signs itself. Raises ``DmqError``."""
        files = cls(
            KeyFile(config.acl, clock) if config.acl is not None else None,
            certificates_of(config, clock) if config.transport == "http2" else None,
        )
        files._look()
        return files

    def problems(self) -> str:
        """Return what is wrong with them now, empty: nothing; what was right before is in use then."""
        return "; ".join(each.problem for each in (self.keys, self.certificates) if each is not None and each.problem)

    async def watch(self) -> None:
        """Look whether they changed, until cancelled."""
        while self.keys is not None or self.certificates is not None:
            await asyncio.sleep(_LOOK_S)
            with suppress(DmqError):  # there was a good one before: it is told
                self._look()

    def _look(self) -> None:
        if self.keys is not None:
            self.keys.keys()
        if self.certificates is not None:
            self.certificates.context()  # what cannot be used is said now, and not to the first client


def certificates_of(config: DaemonConfig, clock: Clock, *, makes: bool = True) -> Certificates | None:
    """Return the certificates of the daemon, not read yet; ``None``: it speaks no TLS.

    With ``makes`` one that signs itself is made if there is none; without, there is none then. Raises ``DmqError``.
    """
    files = certificate_files(config)
    if files is None:
        return None
    is_made = config.tls_certificate == "auto"
    if is_made and makes:
        self_signed(files[0].parent, clock.now_ms())
    elif is_made and not all(each.exists() for each in files):  # both are made, then
        return None
    return Certificates(*files, clock, config.tls_client_ca, tells_expiry=not is_made)


def certificate_files(config: DaemonConfig) -> tuple[Path, Path] | None:
    """Return where the certificate and its key are, or will be; ``None``: the daemon speaks no TLS."""
    if config.tls_certificate == "off":
        return None
    if config.tls_certificate == "auto":
        folder = config.data / "tls"
        return folder / "certificate.pem", folder / "key.pem"
    return config.tls_certificate, config.tls_key or config.tls_certificate
