"""Signatures: as each official client sends them, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from broker_adapter.contracts.errors import Refused, Rule
from broker_adapter.runtime.clock import ManualClock
from broker_adapter.wire.signature import Signer, signature_of
from dmq.acl.signature import claim_of, dated_ms

DATE = "20240131T120000Z"
DATE_MS = 1_706_702_400_000
SECRET = b"s3cret-of-shop"
# printf 20240131T120000Z | openssl dgst -sha1 -hmac s3cret-of-shop
HEX = "f360763cb9f0900943ceac388c1f1866d6af95e1"


def headers(authorization: str | None, date: str | None = DATE) -> dict[str, str]:
    found = {"authorization": authorization, "x-mq-date-time": date}
    return {name: value for name, value in found.items() if value is not None}


@pytest.mark.parametrize(
    "authorization",
    [
        f"MQv2-HMAC-SHA1 Credential=AK, SignedHeaders=x-mq-date-time, Signature={HEX.upper()}",  # Java, Node
        f"MQv2-HMAC-SHA1 Credential=AK//Rocketmq, SignedHeaders=x-mq-date-time, Signature={HEX}",  # Go
        f"MQv2-HMAC-SHA1 Credential=AK, SignedHeaders=x-mq-date-time, Signature={HEX}",  # Python, Rust
        f"MQv2-HMAC-SHA1 Credential=AK/cn-north/RocketMQ, SignedHeaders=x-mq-date-time, Signature={HEX}",  # C++
        f"MQv2-HMAC-SHA1 Signature={HEX},Credential=AK",
    ],
)
def test_each_language_is_understood(authorization: str) -> None:
    """The access key, the date and the signature come out, whatever stands around them."""
    claim = claim_of(headers(authorization).get)
    assert (claim.access_key, claim.date_time) == ("AK", DATE)
    assert claim.signature == signature_of(SECRET, DATE) == bytes.fromhex(HEX)


@pytest.mark.parametrize(
    ("authorization", "date", "why"),
    [
        (None, DATE, "authorization is missing"),
        ("", DATE, "authorization is missing"),
        ("Bearer abc", DATE, "unknown signature algorithm"),
        ("x" * 5000, DATE, "too long"),
        (f"MQv2-HMAC-SHA1 Credential=, SignedHeaders=x-mq-date-time, Signature={HEX}", DATE, "no access key"),
        (
            f"MQv2-HMAC-SHA1 Credential=AK, SignedHeaders=x-mq-request-id, Signature={HEX}",
            DATE,
            "the signature must cover",
        ),
        (f"MQv2-HMAC-SHA1 Credential=AK, SignedHeaders=x-mq-date-time, Signature={HEX}", None, "x-mq-date-time is"),
        ("MQv2-HMAC-SHA1 Credential=AK, SignedHeaders=x-mq-date-time, Signature=xyz", DATE, "hexadecimal"),
        ("MQv2-HMAC-SHA1", DATE, "no access key"),
    ],
)
def test_an_invalid_signature_is_refused(authorization: str | None, date: str | None, why: str) -> None:
    """With what is missing, and nothing of what was sent."""
    with pytest.raises(Refused, match=why) as caught:
        claim_of(headers(authorization, date).get)
    assert caught.value.rule is Rule.UNAUTHORIZED
    assert HEX not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "at_ms"),
    [
        (DATE, DATE_MS),
        ("2024-01-31T12:00:00.123456789Z", DATE_MS + 123),
        ("2024-01-31T13:00:00+01:00", DATE_MS),
        ("20240131T120000", DATE_MS),
        ("0001-01-01T00:00:00+23:59", -62_135_596_800_000 - 86_340_000),
        ("9999-12-31T23:59:59-23:59", 253_402_300_799_000 + 86_340_000),
    ],
)
def test_dates_of_every_form_are_read(text: str, at_ms: int) -> None:
    """Also those at the end of what can be written."""
    assert dated_ms(text) == at_ms


@pytest.mark.parametrize("text", ["", "now", "1706702400000", "20241331T120000Z", "\x00", "2024-01-31T25:00:00Z"])
def test_an_invalid_date_is_refused(text: str) -> None:
    """As a call that is not signed."""
    with pytest.raises(Refused, match="expected a time") as caught:
        dated_ms(text)
    assert caught.value.rule is Rule.UNAUTHORIZED


def test_our_own_clients_sign_as_the_official_ones() -> None:
    """Anew for each second, and without the secret in what is printed."""
    clock = ManualClock(DATE_MS + 999)
    signer: Any = Signer("AK", SECRET.decode(), clock)
    assert dict(signer.metadata()) == {
        "x-mq-date-time": DATE,
        "authorization": f"MQv2-HMAC-SHA1 Credential=AK, SignedHeaders=x-mq-date-time, Signature={HEX.upper()}",
    }
    clock.advance(1)
    assert dict(signer.metadata())["x-mq-date-time"] == "20240131T120001Z"
    assert SECRET.decode() not in f"{signer} {signer!r}"
