"""Files that are reloaded while the daemon serves: access keys and certificates. Polled for changes.

An invalid new version is reported at once, in the log and by ``dmq status``, and not only to the next client.
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
class WatchedFiles:
    """Reloaded files of this daemon."""

    keys: KeyFile | None
    certificates: Certificates | None

    @classmethod
    def of(cls, config: DaemonConfig, clock: Clock) -> WatchedFiles:
        """Read all files, and create a missing self-signed certificate. Raise ``DmqError``."""
        files = cls(
            KeyFile(config.acl, clock) if config.acl is not None else None,
            certificates_of(config, clock) if config.transport == "http2" else None,
        )
        files._look()
        return files

    def problems(self) -> str:
        """Return the current faults of the files, empty if there are none; the last valid version stays in use."""
        return "; ".join(each.problem for each in (self.keys, self.certificates) if each is not None and each.problem)

    async def watch(self) -> None:
        """Poll the files for changes until cancelled."""
        while self.keys is not None or self.certificates is not None:
            await asyncio.sleep(_LOOK_S)
            with suppress(DmqError):  # an earlier version was valid, so the fault is only reported
                self._look()

    def _look(self) -> None:
        if self.keys is not None:
            self.keys.keys()
        if self.certificates is not None:
            self.certificates.context()  # an unusable one fails here, and not at the first client


def certificates_of(config: DaemonConfig, clock: Clock, *, makes: bool = True) -> Certificates | None:
    """Return the certificates of the daemon, not read yet; None without TLS.

    With ``makes`` a missing self-signed certificate is created; without it, None is returned. Raise ``DmqError``.
    """
    files = certificate_files(config)
    if files is None:
        return None
    is_made = config.tls_certificate == "auto"
    if is_made and makes:
        self_signed(files[0].parent, clock.now_ms())
    elif is_made and not all(each.exists() for each in files):  # a start creates both
        return None
    return Certificates(*files, clock, config.tls_client_ca, tells_expiry=not is_made)


def certificate_files(config: DaemonConfig) -> tuple[Path, Path] | None:
    """Return the paths of the certificate and its key, which may not exist yet; None without TLS."""
    if config.tls_certificate == "off":
        return None
    if config.tls_certificate == "auto":
        folder = config.data / "tls"
        return folder / "certificate.pem", folder / "key.pem"
    return config.tls_certificate, config.tls_key or config.tls_certificate
