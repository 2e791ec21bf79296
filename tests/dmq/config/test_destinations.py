"""Destinations of notifications: only whole URLs and topics, and no token in any text."""

from __future__ import annotations

from pathlib import Path

import pytest

from dmq.config.destinations import NotificationTopic, WebhookUrl, parse_destination
from dmq.config.settings import ConfigError, load


@pytest.mark.parametrize(
    ("text", "expected", "shown"),
    [
        (
            "https://hooks.example/a?b=c",
            WebhookUrl("https", "hooks.example", 443, "/a?b=c"),
            "https://hooks.example/...",
        ),
        ("http://hooks.example:8080", WebhookUrl("http", "hooks.example", 8080, "/"), "http://hooks.example:8080/"),
        ("https://[2001:db8::1]/x", WebhookUrl("https", "2001:db8::1", 443, "/x"), "https://[2001:db8::1]/..."),
        ("topic:alerts", NotificationTopic("alerts"), "topic:alerts"),
    ],
)
def test_a_destination_is_a_url_or_a_topic(text: str, expected: object, shown: str) -> None:
    """Its text leaves out the path, which may be a secret of the receiver."""
    found = parse_destination(text)
    assert (found, str(found)) == (expected, shown)


@pytest.mark.parametrize(
    "text",
    [
        *("hooks.example", "ftp://hooks.example/", "https://", "https:///x", "https://u:p@hooks.example/", "//x/y"),
        *(
            "https://hooks.example/#x",
            "https://hooks.example/a b",
            "https://hooks.example/\r\nx",
            "https://ex\u00e4mple/",
        ),
        *("https://hooks.example:0x/", "https://hooks.example:99999/", "https://[::1/", "http:hooks.example"),
        *("topic:", "topic:a b", "topic:%DLQ%workers", "topic:%RETRY%workers", "topic:TBW102"),
    ],
)
def test_everything_else_is_refused(text: str) -> None:
    """Credentials, fragments, control characters, other schemes, derived topics."""
    with pytest.raises(ValueError, match=r"expected|topic"):
        parse_destination(text)


def test_settings_of_notifications(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A URL needs a secret, a secret needs a URL, and a refused URL is not shown."""
    monkeypatch.chdir(tmp_path)
    url = "https://hooks.example/token"
    config = load({"on_dead_letter": url, "webhook_secret_file": "secret", "on_overdue": "topic:alerts"})
    shown = config.shown()
    assert (shown["on_dead_letter"], shown["on_overdue"]) == ("https://hooks.example/...", "topic:alerts")
    assert load().shown()["on_dead_letter"] == "none"
    for wrong, expected in (
        ({"on_dead_letter": url}, "on_dead_letter is a URL and needs webhook_secret_file"),
        (
            {"webhook_secret_file": "secret", "on_overdue": "topic:alerts"},
            "requires a URL in on_dead_letter or on_overdue",
        ),
        (
            {"on_overdue": "https://user:hunter2@hooks.example/"},
            "expected none, topic:NAME, or a URL without credentials",
        ),
        ({"overdue_after": "59s"}, "1m to 1d is allowed"),
    ):
        with pytest.raises(ConfigError) as caught:
            load(wrong)
        assert expected in str(caught.value)
        assert "token" not in str(caught.value)
        assert "hunter2" not in str(caught.value)
