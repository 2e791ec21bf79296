"""Secrets and signatures of webhooks, by the Standard Webhooks specification."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest
from support.rigs.services.webhooks import OTHER_SECRET, SECRET, Webhook, is_signed, secret_file

from dmq.errors import DmqError
from dmq.notifications.signature import headers_of, read_secrets


def test_the_example_of_the_specification_has_its_signature() -> None:
    """The id, time, body and secret that its libraries test with give the signature that they expect."""
    secret = base64.b64decode("MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw")
    headers = headers_of([secret], "msg_p5jXN8AQM9LWM0D4loKWxJek", 1_614_265_330, b'{"test": 2432232314}')
    assert headers["webhook-signature"] == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="


def test_each_secret_of_the_file_signs(tmp_path: Path) -> None:
    """While a receiver changes its secret, both are valid."""
    secrets = read_secrets(secret_file(tmp_path, SECRET, OTHER_SECRET))
    webhook = Webhook("", headers_of(secrets, "id", 1, b"body"), b"body")
    assert is_signed(webhook, SECRET)
    assert is_signed(webhook, OTHER_SECRET)
    assert not is_signed(webhook._replace(body=b"other"))
    assert not is_signed(Webhook("", headers_of(secrets[:1], "id", 1, b"body"), b"body"), OTHER_SECRET)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "is empty"),
        (b"\n\n", "is empty"),
        (b"whsec_c2hvcnQ=\n", "line 1"),
        (b"MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw\n", "line 1"),
        (SECRET.encode() + b"\nwhsec_no base64\n", "line 2"),
        (SECRET.encode() + b"\n" * 5000, "is larger than 4096 bytes"),
        (b"whsec_\xff\n", "is no text"),
    ],
)
def test_a_wrong_secret_is_refused_and_not_shown(tmp_path: Path, content: bytes, expected: str) -> None:
    """The error names the file and the line, never the text."""
    path = tmp_path / "secret"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(DmqError, match=expected) as caught:
        read_secrets(path)
    assert str(path) in str(caught.value)
    assert "MfKQ" not in str(caught.value)


def test_a_secret_that_others_can_read_is_refused(tmp_path: Path) -> None:
    """With the command that protects it."""
    path = secret_file(tmp_path)
    path.chmod(0o644)
    with pytest.raises(DmqError, match=r"webhook_secret_file: .* others can access it \(mode 0644\); run: chmod 600"):
        read_secrets(path)


def test_a_missing_secret_file_is_named(tmp_path: Path) -> None:
    """With the setting that names it."""
    with pytest.raises(DmqError, match=r"webhook_secret_file: .*gone cannot be read: No such file"):
        read_secrets(tmp_path / "gone")
