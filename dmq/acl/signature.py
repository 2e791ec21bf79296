"""What the signature on a call says (``broker_adapter.wire.signature`` has its form), as all official clients write it.

The date-time is RFC 3339 in some clients, and the client's local time, whatever the Z says. The signature is in upper
or lower case. What follows a ``/`` in the credential is a region or a product, of no meaning here.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Final, NamedTuple

from broker_adapter.contracts.errors import Refused
from broker_adapter.contracts.errors import Rule as Broken
from broker_adapter.wire.signature import ALGORITHM, AUTHORIZATION_HEADER, DATE_TIME_HEADER

Header = Callable[[str], str | None]  # gives the value of a header, by its name in lower case

_DATE_TIME_CHARS_MAX: Final = 64
_AUTHORIZATION_CHARS_MAX: Final = 1024
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MS: Final = timedelta(milliseconds=1)


class Claim(NamedTuple):
    """What a call says of itself."""

    access_key: str
    date_time: str
    signature: bytes


def claim_of(header: Header) -> Claim:
    """Read who a call says it is from; ``Refused(UNAUTHORIZED)`` if it does not say, or not so that it can be read."""
    authorization, date_time = header(AUTHORIZATION_HEADER), header(DATE_TIME_HEADER)
    if not authorization:
        raise unauthorized(f"the call is not signed: the metadata entry {AUTHORIZATION_HEADER} is missing")
    if len(authorization) > _AUTHORIZATION_CHARS_MAX:
        raise unauthorized(f"the metadata entry {AUTHORIZATION_HEADER} is too long")
    algorithm, _, rest = authorization.strip().partition(" ")
    if algorithm != ALGORITHM:
        raise unauthorized(f"{ALGORITHM} is the one signature that is known here")
    parts = dict(_pair(part) for part in rest.split(","))
    access_key = parts.get("credential", "").partition("/")[0]
    if not access_key:
        raise unauthorized("the client has no access key: set its credentials")
    if parts.get("signedheaders", DATE_TIME_HEADER).lower() != DATE_TIME_HEADER:
        raise unauthorized(f"{DATE_TIME_HEADER} is what must be signed, and nothing else")
    if not date_time or len(date_time) > _DATE_TIME_CHARS_MAX:
        raise unauthorized(f"the metadata entry {DATE_TIME_HEADER} is missing or too long")
    try:
        return Claim(access_key, date_time, bytes.fromhex(parts.get("signature", "")))
    except ValueError:
        raise unauthorized("the signature is not in hexadecimal digits") from None


def dated_ms(date_time: str) -> int:
    """Return what a date-time says in epoch milliseconds, taking it at its word; ``Refused(UNAUTHORIZED)`` for none."""
    try:
        when = datetime.fromisoformat(date_time)
    except ValueError:
        raise unauthorized(f"{DATE_TIME_HEADER} is no time: 20240131T120000Z is expected") from None
    return ((when if when.tzinfo else when.replace(tzinfo=UTC)) - _EPOCH) // _MS


def unauthorized(why: str) -> Refused:
    """Return the refusal of a call whose sender is not known."""
    return Refused(Broken.UNAUTHORIZED, why)


def _pair(part: str) -> tuple[str, str]:
    name, _, value = part.partition("=")
    return name.strip().lower(), value.strip()
