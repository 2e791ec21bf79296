"""Parsing of a call's signature in the form of all official clients (see ``broker_adapter.wire.signature``).

The date-time is RFC 3339 in some clients, and the client's local time in spite of the Z. The signature is in upper or
lower case. The part after a ``/`` in the credential is a region or a product, and is ignored.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Final, NamedTuple

from broker_adapter.contracts.errors import Refused
from broker_adapter.contracts.errors import Rule as Broken
from broker_adapter.wire.signature import ALGORITHM, AUTHORIZATION_HEADER, DATE_TIME_HEADER

Header = Callable[[str], str | None]  # returns the value of a header by its lower-case name

_DATE_TIME_CHARS_MAX: Final = 64
_AUTHORIZATION_CHARS_MAX: Final = 1024
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MS: Final = timedelta(milliseconds=1)


class UnverifiedSignature(NamedTuple):
    """The unverified signature of a call."""

    access_key: str
    date_time: str
    signature: bytes


def claim_of(header: Header) -> UnverifiedSignature:
    """Return the signature in the headers; raise ``Refused(UNAUTHORIZED)`` if it is missing or malformed."""
    authorization, date_time = header(AUTHORIZATION_HEADER), header(DATE_TIME_HEADER)
    if not authorization:
        raise unauthorized(f"the call is not signed: the metadata entry {AUTHORIZATION_HEADER} is missing")
    if len(authorization) > _AUTHORIZATION_CHARS_MAX:
        raise unauthorized(f"the metadata entry {AUTHORIZATION_HEADER} is too long")
    algorithm, _, rest = authorization.strip().partition(" ")
    if algorithm != ALGORITHM:
        raise unauthorized(f"unknown signature algorithm; expected {ALGORITHM}")
    parts = dict(_pair(part) for part in rest.split(","))
    access_key = parts.get("credential", "").partition("/")[0]
    if not access_key:
        raise unauthorized("the client has no access key: set its credentials")
    if parts.get("signedheaders", DATE_TIME_HEADER).lower() != DATE_TIME_HEADER:
        raise unauthorized(f"the signature must cover {DATE_TIME_HEADER} and nothing else")
    if not date_time or len(date_time) > _DATE_TIME_CHARS_MAX:
        raise unauthorized(f"the metadata entry {DATE_TIME_HEADER} is missing or too long")
    try:
        return UnverifiedSignature(access_key, date_time, bytes.fromhex(parts.get("signature", "")))
    except ValueError:
        raise unauthorized("the signature is not hexadecimal") from None


def dated_ms(date_time: str) -> int:
    """Return a date-time in epoch ms, in its stated zone (default UTC); raise ``Refused(UNAUTHORIZED)`` if invalid."""
    try:
        when = datetime.fromisoformat(date_time)
    except ValueError:
        raise unauthorized(f"invalid {DATE_TIME_HEADER}; expected a time such as 20240131T120000Z") from None
    return ((when if when.tzinfo else when.replace(tzinfo=UTC)) - _EPOCH) // _MS


def unauthorized(why: str) -> Refused:
    """Return the refusal of an unauthenticated call."""
    return Refused(Broken.UNAUTHORIZED, why)


def _pair(part: str) -> tuple[str, str]:
    name, _, value = part.partition("=")
    return name.strip().lower(), value.strip()
