"""Signature of a webhook by the Standard Webhooks specification: HMAC-SHA256 over id, timestamp and body. Pure.

The secret file has one secret per line, each ``whsec_`` and 24 to 64 bytes in base64. With two secrets a webhook has
two signatures, so that a receiver can change its secret without a gap.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from dmq.errors import DmqError
from dmq.runtime.secret_file import read_secret_file

_PREFIX: Final = "whsec_"
_BYTES_MIN, _BYTES_MAX = 24, 64
_FILE_BYTES_MAX: Final = 4096
_EXPECTED: Final = "expected whsec_ and 24 to 64 random bytes in base64, one secret per line"


def read_secrets(path: Path) -> list[bytes]:
    """Return the secrets of a file, at least one. Raise ``DmqError``, which never shows the content."""
    try:
        text = read_secret_file(path, _FILE_BYTES_MAX).decode("ascii")
    except OSError as error:
        raise DmqError(f"webhook_secret_file: {path} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError:
        raise DmqError(f"webhook_secret_file: {path} is no text: {_EXPECTED}") from None
    except ValueError as error:
        raise DmqError(f"webhook_secret_file: {error}") from None
    secrets = [_secret(path, number, line.strip()) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    if not secrets:
        raise DmqError(f"webhook_secret_file: {path} is empty: {_EXPECTED}")
    return secrets


def _secret(path: Path, number: int, line: str) -> bytes:
    try:
        secret = base64.b64decode(line.removeprefix(_PREFIX), validate=True)
    except binascii.Error:
        secret = b""
    if not line.startswith(_PREFIX) or not _BYTES_MIN <= len(secret) <= _BYTES_MAX:
        raise DmqError(f"webhook_secret_file: line {number} of {path} is no secret: {_EXPECTED}")
    return secret


def headers_of(secrets: Sequence[bytes], webhook_id: str, timestamp_s: int, body: bytes) -> dict[str, str]:
    """Return the headers that identify and sign a webhook."""
    signed = f"{webhook_id}.{timestamp_s}.".encode() + body
    signatures = (base64.b64encode(hmac.digest(secret, signed, hashlib.sha256)).decode() for secret in secrets)
    return {
        "webhook-id": webhook_id,
        "webhook-timestamp": str(timestamp_s),
        "webhook-signature": " ".join(f"v1,{each}" for each in signatures),
    }
