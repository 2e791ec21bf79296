"""Signature of calls by clients of Apache RocketMQ 5, for the calling side.

    x-mq-date-time   20240131T120000Z
    authorization    MQv2-HMAC-SHA1 Credential=KEY, SignedHeaders=x-mq-date-time, Signature=HEX

The signature is HMAC-SHA1(secret, date-time). It covers the date-time only: an eavesdropper can make other calls with
the signature until the date-time is too old. TLS protects against eavesdroppers.
"""

from __future__ import annotations

import hmac
from datetime import UTC, datetime
from typing import Final

from broker_adapter.runtime.clock import Clock

AUTHORIZATION_HEADER: Final = "authorization"
DATE_TIME_HEADER: Final = "x-mq-date-time"
ALGORITHM: Final = "MQv2-HMAC-SHA1"


def signature_of(secret: bytes, date_time: str) -> bytes:
    """Return the signature of ``date_time``."""
    return hmac.digest(secret, date_time.encode(), "sha1")


class Signer:
    """Signer of the calls of one of our clients. No ``repr`` shows the secret. Thread-safe."""

    def __init__(self, access_key: str, secret_key: str, clock: Clock) -> None:
        self._access_key = access_key
        self._secret = secret_key.encode()
        self._clock = clock

    def __repr__(self) -> str:
        return f"Signer({self._access_key!r})"

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Return the signed metadata of the next call."""
        date_time = f"{datetime.fromtimestamp(self._clock.now_ms() // 1000, UTC):%Y%m%dT%H%M%SZ}"
        signature = signature_of(self._secret, date_time).hex().upper()
        text = f"{ALGORITHM} Credential={self._access_key}, SignedHeaders={DATE_TIME_HEADER}, Signature={signature}"
        return (DATE_TIME_HEADER, date_time), (AUTHORIZATION_HEADER, text)
