"""The access key of an HTTP request, as metadata of the calls that it causes.

    Authorization: Bearer KEY:SECRET
    Authorization: MQv2-HMAC-SHA1 Credential=KEY, SignedHeaders=x-mq-date-time, Signature=HEX
    X-Mq-Date-Time: 20240131T120000Z

The second form is the signature of all official clients, and is passed on unchanged. The first form is signed here. The
daemon alone decides about both. A request without either is passed on without a key.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Final

from broker_adapter.contracts.errors import Rule
from broker_adapter.runtime.clock import Clock
from broker_adapter.wire.signature import ALGORITHM, AUTHORIZATION_HEADER, DATE_TIME_HEADER, Signer
from dmq.admin.requests.validate import WHY_HEADER
from dmq.http_api.problems import Problem, of_rule

Metadata = tuple[tuple[str, str], ...]

_BEARER: Final = "bearer"


def metadata_of(headers: Mapping[str, str], clock: Clock) -> Metadata:
    """Return the metadata of the caller's calls: its signature, and its reason for a change."""
    passed_on = tuple((name, value) for name in (WHY_HEADER, DATE_TIME_HEADER) if (value := headers.get(name)))
    authorization = headers.get(AUTHORIZATION_HEADER, "")
    if not all(value.isascii() and value.isprintable() for _, value in passed_on):
        raise Problem(400, f"the headers {WHY_HEADER} and {DATE_TIME_HEADER} are printable ASCII; encode others as %XX")
    scheme, _, token = authorization.partition(" ")
    if not authorization:
        return passed_on
    if scheme.lower() == _BEARER:
        return (*passed_on, *_signed(token.strip(), clock))
    if scheme != ALGORITHM or not authorization.isascii() or not authorization.isprintable():
        raise of_rule(Rule.UNAUTHORIZED, f"unknown authorization; expected Bearer KEY:SECRET, or {ALGORITHM}")
    return (*passed_on, (AUTHORIZATION_HEADER, authorization))


def credentials_of(headers: Mapping[str, str]) -> str:
    """Return a text that identifies the credentials of a request; empty if it has none.

    It is the digest of a bearer token, which contains the secret, and the access key of a signature, which is another
    one for each request.
    """
    authorization = headers.get(AUTHORIZATION_HEADER, "")
    scheme, _, rest = authorization.partition(" ")
    if scheme == ALGORITHM:
        credential = next((each for each in rest.split(",") if each.strip().lower().startswith("credential=")), "")
        return f"key {credential.partition('=')[2].partition('/')[0]}"
    return f"token {hashlib.blake2b(authorization.encode(), digest_size=16).hexdigest()}" if authorization else ""


def _signed(token: str, clock: Clock) -> Metadata:
    key, separator, secret = token.partition(":")
    if not separator or not key or not secret or not key.isascii() or not key.isprintable():
        raise of_rule(Rule.UNAUTHORIZED, "the bearer token is the access key and its secret, as KEY:SECRET")
    try:
        signer = Signer(key, secret.encode("latin-1").decode(), clock)  # headers arrive as Latin-1
    except UnicodeError:
        raise of_rule(Rule.UNAUTHORIZED, "the secret of the bearer token is not UTF-8") from None
    return signer.metadata()
